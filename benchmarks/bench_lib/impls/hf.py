"""transformers' own experts module (Qwen3-MoE's) in its eager, batched_mm and grouped_mm forms."""

from __future__ import annotations

import os
from functools import partial

import torch
from torch import nn

from bench_lib.moe_layer import LayerInputs
from bench_lib.shapes import Point
from bench_lib.spec import Impl, Program

GIB = 2**30


def experts_module(inputs: LayerInputs, point: Point, implementation: str) -> nn.Module:
    """Return a Qwen3MoeExperts on the op's tensors, set to one experts implementation."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    s = point.sizes
    config = Qwen3MoeConfig(
        hidden_size=s.D,
        moe_intermediate_size=s.F,
        num_experts=s.E,
        num_experts_per_tok=s.K,
        hidden_act="silu",
        experts_implementation=implementation,
    )
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    for name, weight in (("gate_up_proj", inputs.w13_EHD), ("down_proj", inputs.w2_EDF)):
        setattr(module, name, nn.Parameter(weight.detach(), requires_grad=weight.requires_grad))
    return module


def build(inputs: LayerInputs, point: Point, *, implementation: str) -> Program:
    """Build the module's forward, on ids and weights as its router returns them."""
    module = experts_module(inputs, point, implementation)
    leaves = inputs.leaves()
    leaves |= {"w13": module.gate_up_proj, "w2": module.down_proj}
    forward = partial(module, inputs.x_TD, inputs.ids_TK, inputs.weights_TK)
    return Program(forward, {name: leaves[name] for name in inputs.trained})


def why_not_batched_mm(point: Point, device: torch.device) -> str | None:
    """Say before a try whether batched_mm lacks memory: it copies the weights for every row."""
    s = point.sizes
    gathered = 3 * point.rows * s.D * s.F * point.torch_dtype.itemsize
    needed = gathered * (2 if point.backward else 1)
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    else:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed <= available:
        return None
    return (
        f"copies {needed / GIB:.0f} GiB of weights, one set per row; "
        f"{available / GIB:.0f} GiB are free"
    )


MODULES = ("transformers.models.qwen3_moe.modeling_qwen3_moe",)
HF_EAGER = Impl("hf_eager", partial(build, implementation="eager"), modules=MODULES)
HF_GROUPED_MM = Impl("hf_grouped_mm", partial(build, implementation="grouped_mm"), modules=MODULES)
HF_BATCHED_MM = Impl(
    "hf_batched_mm",
    partial(build, implementation="batched_mm"),
    why_not=why_not_batched_mm,
    modules=MODULES,
)
HF_IMPLS = (HF_EAGER, HF_GROUPED_MM, HF_BATCHED_MM)
