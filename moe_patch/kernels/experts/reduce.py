"""Reductions around the grouped GEMMs. Every sum has a fixed order; no atomics are used."""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from moe_patch.kernels.common.device import cdiv, next_power_of_2
from moe_patch.kernels.common.launcher import Constants, Launcher
from moe_patch.kernels.plan.row_tiles import RowTiling
from moe_patch.types import Plan


def combine(
    rows_ND: Tensor, plan: Plan, weights_TK: Tensor | None, out_TD: Tensor | None = None
) -> Tensor:
    """Compute out_t = sum_k w_tk rows[slot_tk] in the order of k, in fp32; [T, D].

    Args:
        rows_ND: contiguous, in plan order.
        plan: the plan of the rows; an empty slot (-1) adds nothing.
        weights_TK: contiguous routing weights, or None for a plain sum (the gradient of x).
        out_TD: where to write, last axis contiguous; None allocates.
    """
    T, K = plan.slot_of_TK.shape
    D = rows_ND.shape[1]
    if out_TD is None:
        out_TD = rows_ND.new_empty(T, D)
    block = min(next_power_of_2(D), 2048)
    _launch_combine(
        (T, cdiv(D, block)),
        (rows_ND, plan.slot_of_TK, plan.slot_of_TK if weights_TK is None else weights_TK, out_TD),
        (), (D, out_TD.stride(0)),
        _combine_constants(K, weights_TK is not None, block, out_TD.stride(0) > D),
    )  # fmt: skip
    return out_TD


@functools.cache
def _combine_constants(K: int, weighted: bool, block: int, narrow: bool) -> Constants:
    warps = 8 if block >= 2048 else 4
    # Of a few columns of a wide output, each thread loads 16 bytes of a row in 16-bit dtypes.
    return Constants(
        K=K, WEIGHTED=weighted, BLOCK=block, num_warps=max(1, block // 256) if narrow else warps
    )


def routing_gradient(
    partial_NC: Tensor, rows: RowTiling, weights_TK: Tensor, dout_TD: Tensor, b2_ED: Tensor | None
) -> Tensor:
    """Compute dw_tk: the partial sums of <da', a>, plus <dout_t, b2_e>; 0 for empty slots.

    Args:
        partial_NC: partial sums, fp32, in plan order.
        rows: the plan and a tile table.
        weights_TK: routing weights; the result has their dtype.
        dout_TD, b2_ED: gradient of the output, and the bias of the down projection or None.
    """
    N, C = partial_NC.shape
    grad_TK = weights_TK.new_empty(weights_TK.shape)
    bias_N = partial_NC.new_empty(N) if b2_ED is not None else partial_NC
    if b2_ED is not None:
        _launch_bias_dot(
            (rows.bound,),
            (dout_TD, b2_ED, bias_N, rows.plan.row_of_N, rows.plan.offsets_S, rows.table),
            (rows.bound,),
            (dout_TD.shape[1], rows.top_k, dout_TD.stride(0), *b2_ED.stride()),
            BM=rows.block_m, BD=64,
        )  # fmt: skip
    _launch_routing_gradient(
        (cdiv(N, 128),), (partial_NC, bias_N, rows.plan.slot_of_TK, grad_TK), (N,), (C,),
        _gradient_constants(b2_ED is not None, C),
    )  # fmt: skip
    return grad_TK


@functools.cache
def _gradient_constants(biased: bool, columns: int) -> Constants:
    return Constants(BIASED=biased, BLOCK=128, COLUMNS_P2=next_power_of_2(columns))


def expert_sum(
    source: Tensor,
    plan: Plan,
    like_EO: Tensor,
    *,
    gather: bool = False,
    weights_TK: Tensor | None = None,
) -> Tensor:
    """Compute a bias gradient: the sum of each expert's rows, [E, O] in the dtype of ``like_EO``.

    Args:
        source: [N, O] in plan order, or with ``gather`` [T, O] by token; last axis contiguous.
        plan: the plan of the rows.
        like_EO: the bias.
        gather: the source is given by token.
        weights_TK: factors of the rows, or None.
    """
    E, O = like_EO.shape
    grad_EO = like_EO.new_empty(E, O)
    block = min(next_power_of_2(O), 128)
    _launch_expert_sum(
        (E, cdiv(O, block)),
        (source, plan.row_of_N if weights_TK is None else weights_TK, grad_EO, plan.row_of_N,
         plan.offsets_S),
        (), (O, plan.slot_of_TK.shape[1], source.stride(0)),
        GATHER=gather, WEIGHTED=weights_TK is not None, BLOCK_N=64, BLOCK_O=block,
    )  # fmt: skip
    return grad_EO


@triton.jit
def _combine_kernel(
    rows_ptr, slot_ptr, weights_ptr, out_ptr, D, stride_out,
    K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (T, cdiv(D, BLOCK)): BLOCK output columns of one token per program."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(K):
        slot = tl.load(slot_ptr + t * K + k)
        width = tl.where(slot >= 0, D, 0)
        row = tl.load(rows_ptr + slot.to(tl.int64) * D + d, mask=d < width, other=0.0)
        if WEIGHTED:
            weight = tl.load(weights_ptr + t * K + k, mask=slot >= 0, other=0.0).to(tl.float32)
            acc += weight * row.to(tl.float32)
        else:
            acc += row.to(tl.float32)
    tl.store(out_ptr + t * stride_out + d, acc.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["M"])
def _bias_dot_kernel(
    dout_ptr, b_ptr, out_ptr, row_ptr, offsets_ptr, table_ptr, M, D, K, stride_dout, stride_be,
    stride_bd,
    BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles,): <dout_t, b_e> of the rows of one tile per program."""
    row_tile = tl.program_id(0)
    if row_tile < tl.load(table_ptr):
        e = tl.load(table_ptr + 1 + row_tile).to(tl.int64)
        n = tl.load(table_ptr + 1 + M + row_tile) + tl.arange(0, BM)
        end = tl.load(offsets_ptr + e + 1)
        token = tl.load(row_ptr + n, mask=n < end, other=0) // K
        acc = tl.zeros((BM,), dtype=tl.float32)
        for d0 in range(0, D, BD):
            d = d0 + tl.arange(0, BD)
            at = dout_ptr + token.to(tl.int64)[:, None] * stride_dout + d[None, :]
            dout = tl.load(at, mask=(n < end)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
            bias = tl.load(b_ptr + e * stride_be + d * stride_bd, mask=d < D, other=0.0).to(
                tl.float32
            )
            acc += tl.sum(dout * bias[None, :], axis=1)
        tl.store(out_ptr + n, acc, mask=n < end)


@triton.jit(do_not_specialize=["N"])
def _routing_gradient_kernel(
    partial_ptr, bias_ptr, slot_ptr, grad_ptr, N, C,
    BIASED: tl.constexpr, BLOCK: tl.constexpr, COLUMNS_P2: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(N, BLOCK),): add the partial sums of each row."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + n, mask=n < N, other=-1)
    c = tl.arange(0, COLUMNS_P2)
    at = partial_ptr + slot.to(tl.int64)[:, None] * C + c[None, :]
    total = tl.sum(tl.load(at, mask=(slot >= 0)[:, None] & (c < C)[None, :], other=0.0), axis=1)
    if BIASED:
        total += tl.load(bias_ptr + slot, mask=slot >= 0, other=0.0)
    tl.store(grad_ptr + n, total.to(grad_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _expert_sum_kernel(
    in_ptr, weights_ptr, out_ptr, row_ptr, offsets_ptr, O, K, stride_in,
    GATHER: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Grid (E, cdiv(O, BLOCK_O)): BLOCK_O columns of one expert per program, rows in order."""
    e = tl.program_id(0)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    acc = tl.zeros((BLOCK_O,), dtype=tl.float32)
    end = tl.load(offsets_ptr + e + 1)
    for n0 in range(tl.load(offsets_ptr + e), end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        row = tl.load(row_ptr + n, mask=n < end, other=0)
        source = row // K if GATHER else n
        at = in_ptr + source.to(tl.int64)[:, None] * stride_in + o[None, :]
        value = tl.load(at, mask=(n < end)[:, None] & (o < O)[None, :], other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights_ptr + row, mask=n < end, other=0.0).to(tl.float32)[:, None]
        acc += tl.sum(value, axis=0)
    tl.store(out_ptr + e.to(tl.int64) * O + o, acc.to(out_ptr.dtype.element_ty), mask=o < O)


_launch_combine = Launcher(_combine_kernel)
_launch_bias_dot = Launcher(_bias_dot_kernel)
_launch_routing_gradient = Launcher(_routing_gradient_kernel)
_launch_expert_sum = Launcher(_expert_sum_kernel)
