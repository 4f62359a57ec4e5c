"""Liger's fused MoE (Triton), optional, from the peers folder (see scripts/peers.sh)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench_lib.moe_layer import LayerInputs
from bench_lib.shapes import Point
from bench_lib.spec import Impl, Program


def layer(inputs: LayerInputs, run: Any) -> Tensor:
    """Run the whole layer; it takes ids as int32."""
    ids_TK = inputs.ids_TK.to(torch.int32)
    return run(inputs.x_TD, inputs.w13_EHD, inputs.w2_EDF, ids_TK, inputs.weights_TK)


def build(inputs: LayerInputs, point: Point) -> Program:
    """Build the layer on the op's own tensors."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    return Program(partial(layer, inputs, LigerFusedMoEFunction.apply), inputs.leaves())


LIGER = Impl(
    "liger", build, peer=True, needs_cuda=True, compiles="shapes",
    modules=("liger_kernel.ops.fused_moe",),
)  # fmt: skip
