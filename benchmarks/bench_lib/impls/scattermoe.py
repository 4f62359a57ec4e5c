"""scattermoe's parallel linear (Triton), from the peers folder (see scripts/peers.sh)."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from bench_lib.moe_layer import LayerInputs
from bench_lib.shapes import Point
from bench_lib.spec import Impl, Program


def layer(inputs: LayerInputs, flatten_sort_count: Any, parallel_linear: Any) -> Tensor:
    """Run up (rows leave in expert order), activation, and down (rows to weighted tokens)."""
    K, E = inputs.ids_TK.shape[1], inputs.w13_EHD.shape[0]
    experts, rows, ends = flatten_sort_count(inputs.ids_TK, E)
    up = inputs.w13_EHD.transpose(1, 2)
    h_NH = parallel_linear(inputs.x_TD, up, K, experts, rows, ends, grouped_out=True)
    gate_NF, up_NF = h_NH.chunk(2, dim=-1)
    a_NF = functional.silu(gate_NF) * up_NF
    down = inputs.w2_EDF.transpose(1, 2)
    return parallel_linear(
        a_NF, down, 1, experts, rows, ends, grouped_in=True, gates=inputs.weights_TK
    )


def build(inputs: LayerInputs, point: Point) -> Program:
    """Build the layer on the op's own tensors."""
    from axolotl.integrations.kernels.libs.scattermoe_lora.parallel_experts import (
        flatten_sort_count,
        parallel_linear,
    )

    return Program(partial(layer, inputs, flatten_sort_count, parallel_linear), inputs.leaves())


SCATTERMOE = Impl(
    "scattermoe", build, peer=True, needs_cuda=True, compiles="shapes",
    modules=("axolotl.integrations.kernels.libs.scattermoe_lora.parallel_experts",),
)  # fmt: skip
