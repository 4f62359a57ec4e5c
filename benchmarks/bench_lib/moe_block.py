"""Whole MoE blocks of op ``block``: router and experts of Qwen3-MoE on one set of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench_lib.impls import peft_lora, split_lora
from bench_lib.moe_layer import LORA_SCALING, LayerInputs, make_layer
from bench_lib.shapes import Point
from bench_lib.spec import Program


@dataclass(frozen=True)
class BlockInputs:
    """One block's tensors.

    Attributes:
        layer: the experts' inputs; its ids and weights are not used.
        router_ED: the router's weight, trained if the experts are.
    """

    layer: LayerInputs
    router_ED: Tensor


def make_inputs(point: Point, device: torch.device) -> BlockInputs:
    """Return random inputs for a point, the same on every call."""
    layer = make_layer(point, device, train_base=point.R is None)
    E, D = point.sizes.E, point.sizes.D
    generator = torch.Generator(device).manual_seed(1)
    router_ED = torch.randn(E, D, generator=generator, device=device, dtype=point.torch_dtype)
    router_ED.mul_(D**-0.5).requires_grad_(point.R is None)
    return BlockInputs(layer, router_ED)


def qwen_block(inputs: BlockInputs, point: Point) -> nn.Module:
    """Return a Qwen3MoeSparseMoeBlock over the tensors, on transformers' grouped_mm."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    s = point.sizes
    config = Qwen3MoeConfig(
        hidden_size=s.D, moe_intermediate_size=s.F, num_experts=s.E, num_experts_per_tok=s.K,
        hidden_act="silu", norm_topk_prob=True, experts_implementation="grouped_mm",
    )  # fmt: skip
    with torch.device("meta"):
        block = Qwen3MoeSparseMoeBlock(config)
    tensors = {
        "gate.weight": inputs.router_ED,
        "experts.gate_up_proj": inputs.layer.w13_EHD,
        "experts.down_proj": inputs.layer.w2_EDF,
    }
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        parameter = nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
        setattr(block.get_submodule(owner), leaf, parameter)
    return block


class _Model(nn.Module):
    """The smallest module in which PEFT and ``patch_model`` can find a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.mlp = block

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.mlp(x_BTD)


def adapted(model: nn.Module, point: Point) -> Any:
    """Return PEFT's model around the block, with adapters on both projections of the experts."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=point.R, lora_alpha=LORA_SCALING * (point.R or 1), target_modules=[],
        target_parameters=[f"mlp.experts.{name}" for name in peft_lora.FACTORS],
    )  # fmt: skip
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def build_module(
    inputs: BlockInputs, point: Point, *, patched: bool, compiled: bool = False
) -> Program:
    """Build transformers' own block, with PEFT's adapters if there is a rank; patched or not."""
    from moe_patch import patch_model

    block = qwen_block(inputs, point)
    model: Any = _Model(block)
    leaves: dict[str, Tensor] = {"x": inputs.layer.x_TD}
    canonical = {}
    if point.R is None:
        leaves |= {"router": block.gate.weight}
        leaves |= {"w13": block.experts.gate_up_proj, "w2": block.experts.down_proj}
    else:
        model = adapted(model, point)
        wrapper = model.base_model.model.mlp.experts
        factors, canonical = peft_lora.set_factors(wrapper, inputs.layer, point.sizes.E)
        leaves |= factors
    if patched:
        patch_model(model, {"fuse_lora": "require"} if point.R else None)
    run: Callable[[Tensor], Tensor] = model
    if compiled:
        torch.compiler.reset()
        run = torch.compile(model, mode="reduce-overhead", dynamic=False)
    x_TD = inputs.layer.x_TD
    return Program(lambda: run(x_TD[None])[0], leaves, canonical)


def _routed(inputs: BlockInputs, K: int) -> LayerInputs:
    """Return the layer's inputs with the router's decisions, computed by torch."""
    layer = inputs.layer
    logits_TE = functional.linear(layer.x_TD, inputs.router_ED)
    probs_TE = torch.softmax(logits_TE, -1, dtype=torch.float32)
    weights_TK, ids_TK = probs_TE.topk(K, dim=-1)
    weights_TK = (weights_TK / weights_TK.sum(-1, keepdim=True)).to(logits_TE.dtype)
    return LayerInputs(
        layer.x_TD, ids_TK, weights_TK, layer.w13_EHD, layer.w2_EDF, layer.dout_TD,
        layer.factors, layer.trained,
    )  # fmt: skip


def build_split(inputs: BlockInputs, point: Point) -> Program:
    """Build the router in torch and the adapters as separate grouped products."""
    leaves = {"x": inputs.layer.x_TD} | {n: inputs.layer.factors[n] for n in inputs.layer.factors}
    return Program(lambda: split_lora.layer(_routed(inputs, point.sizes.K)), leaves)


@contextmanager
def kernels_timed(device: torch.device) -> Iterator[list[float]]:
    """Append the sum of the kernels' times inside, in milliseconds, at the end; not on a CPU."""
    found: list[float] = []
    if device.type == "cpu":
        yield found
        return
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        yield found
        torch.cuda.synchronize(device)
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    found.append(sum(e.time_range.elapsed_us() for e in events) / 1e3)
