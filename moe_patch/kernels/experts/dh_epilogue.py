"""Epilogue of dh as a separate kernel, for products da'_n = W2_eᵀ dout_t that cannot include it.

Formulas and device functions are those of :mod:`moe_patch.kernels.experts.dh`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_patch.kernels.common.device import approximate, cdiv
from moe_patch.kernels.common.glu import glu_constants
from moe_patch.kernels.common.launcher import Constants, Launcher
from moe_patch.kernels.experts.dh import HiddenGradients, emit, load_h
from moe_patch.kernels.plan.row_tiles import RowTiling
from moe_patch.types import Glu

_ROWS, _COLUMNS = 16, 128


def hidden_gradients_from(
    da_NF: Tensor,
    rows: RowTiling,
    weights_TK: Tensor,
    h_NH: Tensor,
    glu: Glu,
    *,
    dh: bool,
    wa: bool,
    partial: bool,
    overwrite_h: bool = False,
) -> HiddenGradients:
    """Compute the outputs of :func:`moe_patch.kernels.experts.dh.hidden_gradients` from da'.

    Args:
        da_NF: W2_eᵀ dout_t, not multiplied by the routing weight; contiguous, in plan order, any
            dtype.
        rows: the plan.
        weights_TK, h_NH, glu, dh, wa, partial, overwrite_h: as for ``hidden_gradients``.
    """
    N, F = da_NF.shape
    columns = cdiv(F, _COLUMNS)
    found = HiddenGradients(
        h_NH if dh and overwrite_h else h_NH.new_empty(h_NH.shape if dh else 0),
        h_NH.new_empty((N, F) if wa else 0),
        h_NH.new_empty((N, columns) if partial else 0, dtype=torch.float32),
    )
    plan = rows.plan
    _launch(
        (cdiv(N, _ROWS), columns),
        (da_NF, weights_TK, h_NH, *found, plan.row_of_N, plan.offsets_S),
        (), (plan.offsets_S.shape[0] - 1, columns, F),
        _constants(glu, approximate(h_NH), dh, wa, partial),
    )  # fmt: skip
    return found


@functools.cache
def _constants(glu: Glu, fast: bool, dh: bool, wa: bool, partial: bool) -> Constants:
    return Constants(
        **glu_constants(glu, fast=fast), DH=dh, WA=wa, PARTIAL=partial, BM=_ROWS, BC=_COLUMNS
    )


@triton.jit
def _dh_epilogue_kernel(
    da_ptr, weights_ptr, h_ptr, dh_ptr, wa_ptr, partial_ptr, row_ptr, offsets_ptr, E, columns, F,
    KIND: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, CLAMPED: tl.constexpr, FAST: tl.constexpr, DH: tl.constexpr,
    WA: tl.constexpr, PARTIAL: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, column tiles): BM rows by BC columns of a."""
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    column_tile = tl.program_id(1)
    end = tl.load(offsets_ptr + E)
    row = tl.load(row_ptr + n, mask=n < end, other=0)
    weight_n = tl.load(weights_ptr + row).to(tl.float32)[:, None]
    f = column_tile * BC + tl.arange(0, BC)
    gate, up = load_h(h_ptr, column_tile, n, end, F, GATED, INTERLEAVED, BM, BC)
    da = tl.load(
        da_ptr + n.to(tl.int64)[:, None] * F + f[None, :],
        mask=(n < end)[:, None] & (f < F)[None, :],
        other=0.0,
    )
    partial = emit(
        da.to(tl.float32), gate, up, column_tile, weight_n, n, end, F, dh_ptr, wa_ptr, KIND, GATED,
        INTERLEAVED, ALPHA, LIMIT, CLAMPED, FAST, DH, WA, PARTIAL, BM, BC,
    )  # fmt: skip
    if PARTIAL:
        tl.store(partial_ptr + n.to(tl.int64) * columns + column_tile, partial, mask=n < end)


_launch = Launcher(_dh_epilogue_kernel)
