"""A plain layer on torch's grouped_mm, with routing weights applied before the down projection.

A first implementation with torch alone would do this: gather, one grouped product, activation and
weight, a second grouped product, and a sum over rows.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from bench_lib.moe_layer import LayerInputs
from bench_lib.shapes import Point
from bench_lib.spec import Impl, Program


def sort_rows(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (rows in expert order, their inverse, int32 end offsets per expert)."""
    order_N = torch.argsort(ids_TK.reshape(-1), stable=True)
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(order_N.numel(), device=order_N.device)
    experts = torch.arange(num_experts, device=ids_TK.device)
    sorted_N = ids_TK.reshape(-1)[order_N]
    ends_E = torch.searchsorted(sorted_N, experts, right=True).to(torch.int32)
    return order_N, inverse_N, ends_E


def weighted_activation(h_NH: Tensor, weights_TK: Tensor, order_N: Tensor) -> Tensor:
    """Return silu(gate) * up * routing weight, rows in expert order."""
    gate_NF, up_NF = h_NH.chunk(2, dim=-1)
    return functional.silu(gate_NF) * up_NF * weights_TK.reshape(-1)[order_N, None]


def layer(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, w13_EHD: Tensor, w2_EDF: Tensor
) -> Tensor:
    """Return the experts' weighted sum."""
    T, K = ids_TK.shape
    order_N, inverse_N, ends_E = sort_rows(ids_TK, w13_EHD.shape[0])
    h_NH = functional.grouped_mm(x_TD[order_N // K], w13_EHD.transpose(1, 2), offs=ends_E)
    a_NF = weighted_activation(h_NH, weights_TK, order_N)
    y_ND = functional.grouped_mm(a_NF, w2_EDF.transpose(1, 2), offs=ends_E)
    return y_ND[inverse_N].view(T, K, -1).sum(dim=1)


def build(inputs: LayerInputs, point: Point) -> Program:
    """Build the layer on the op's own tensors."""
    forward = partial(
        layer, inputs.x_TD, inputs.ids_TK, inputs.weights_TK, inputs.w13_EHD, inputs.w2_EDF
    )
    return Program(forward, inputs.leaves())


TORCH_GROUPED_MM_EARLY = Impl("torch_grouped_mm_early", build)
