"""LoRA as separate grouped products beside the base: x W + s (x A) B, on torch's grouped_mm."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from bench_lib.impls.torch_grouped import sort_rows, weighted_activation
from bench_lib.moe_layer import LayerInputs
from bench_lib.shapes import Point
from bench_lib.spec import Impl, Program


def adapted(x_NI: Tensor, w_EOI: Tensor, lora: Any, ends_E: Tensor) -> Tensor:
    """Run one projection with its adapter, rows in expert order."""
    base_NO = functional.grouped_mm(x_NI, w_EOI.transpose(1, 2), offs=ends_E)
    p_NR = functional.grouped_mm(x_NI, lora.A_ERI.transpose(1, 2), offs=ends_E)
    return base_NO + lora.scaling * functional.grouped_mm(
        p_NR, lora.B_EOR.transpose(1, 2), offs=ends_E
    )


def layer(inputs: LayerInputs) -> Tensor:
    """Return the adapted experts' weighted sum."""
    T, K = inputs.ids_TK.shape
    order_N, inverse_N, ends_E = sort_rows(inputs.ids_TK, inputs.w13_EHD.shape[0])
    h_NH = adapted(inputs.x_TD[order_N // K], inputs.w13_EHD, inputs.lora13, ends_E)
    a_NF = weighted_activation(h_NH, inputs.weights_TK, order_N)
    y_ND = adapted(a_NF, inputs.w2_EDF, inputs.lora2, ends_E)
    return y_ND[inverse_N].view(T, K, -1).sum(dim=1)


def build(inputs: LayerInputs, point: Point) -> Program:
    """Build the layer on the op's own tensors."""
    return Program(partial(layer, inputs), inputs.leaves())


SPLIT_LORA = Impl("split_lora", build, covers=lambda point: point.R is not None)
