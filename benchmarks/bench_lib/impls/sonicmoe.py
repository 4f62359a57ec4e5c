"""SonicMoE (CuTe DSL, Hopper and newer), from the peers folder (see scripts/peers.sh)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench_lib.moe_layer import LayerInputs
from bench_lib.shapes import Point
from bench_lib.spec import Impl, Program


def layer(inputs: LayerInputs, run: Any, swiglu: Any) -> Tensor:
    """Run the whole layer; scores are flat in token order, weights are [out, in, E] views."""
    T, K = inputs.ids_TK.shape
    tokens_N = torch.arange(T, dtype=torch.int32, device=inputs.x_TD.device).repeat_interleave(K)
    out_TD, _ = run(
        inputs.x_TD,
        inputs.weights_TK.reshape(-1),
        tokens_N,
        inputs.ids_TK.reshape(-1).to(torch.int32),
        inputs.w13_EHD.permute(1, 2, 0),
        None,
        inputs.w2_EDF.permute(1, 2, 0),
        None,
        E=inputs.w13_EHD.shape[0],
        stream_id=torch.cuda.current_stream().cuda_stream,
        activation_type=swiglu,
        is_inference_mode_enabled=False,
        concat_layout=True,
    )
    return out_TD


def build(inputs: LayerInputs, point: Point) -> Program:
    """Build the layer on the op's own tensors."""
    from sonicmoe import moe_general_routing_inputs
    from sonicmoe.enums import ActivationType

    return Program(
        partial(layer, inputs, moe_general_routing_inputs, ActivationType.SWIGLU), inputs.leaves()
    )


def why_not(point: Point, device: torch.device) -> str | None:
    """Return a reason below compute capability 9.0, whose instructions its kernels need."""
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 9 else f"needs compute capability 9.0, the device has {major}.{minor}"


SONICMOE = Impl(
    "sonicmoe", build, peer=True, needs_cuda=True, compiles="shapes", modules=("sonicmoe",),
    why_not=why_not,
)  # fmt: skip
