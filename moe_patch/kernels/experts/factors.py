"""Low-rank factors: conversion of their layout, and backward of a factor B.

PEFT stores B with the experts innermost. The kernels read B and write its gradient with the rank
innermost. Transposing these few megabytes costs less than scattered accesses would.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_patch.kernels.common.device import cdiv, next_power_of_2
from moe_patch.kernels.common.gemm_device import RUN
from moe_patch.kernels.common.launcher import Constants, Launcher
from moe_patch.kernels.common.tiles import Tile
from moe_patch.kernels.plan.row_tiles import depth_block
from moe_patch.types import Plan

_ROWS = 128
_TRANSPOSED = Constants(BM=64, BN=64, num_warps=4)


def rank_innermost(b_EOR: Tensor) -> Tensor:
    """Return ``b_EOR`` in contiguous storage; the same tensor if it is contiguous."""
    if not _experts_innermost(b_EOR):
        return b_EOR.contiguous()
    E, O, R = b_EOR.shape
    found_EOR = b_EOR.new_empty(E, O, R)
    _transpose(b_EOR, found_EOR, O * R, E)
    return found_EOR


def laid_like(grad_EOR: Tensor, b_EOR: Tensor) -> Tensor:
    """Return contiguous ``grad_EOR`` in the strides of ``b_EOR``."""
    if b_EOR.stride() == grad_EOR.stride():
        return grad_EOR
    found_EOR = torch.empty_like(b_EOR)
    if not _experts_innermost(b_EOR):
        return found_EOR.copy_(grad_EOR)
    E, O, R = b_EOR.shape
    _transpose(grad_EOR, found_EOR, E, O * R)
    return found_EOR


def _experts_innermost(b_EOR: Tensor) -> bool:
    E, _, R = b_EOR.shape
    return b_EOR.stride() == (1, R * E, E) and not b_EOR.is_contiguous()


def _transpose(source: Tensor, out: Tensor, rows: int, columns: int) -> None:
    grid = cdiv(rows, 64), cdiv(columns, 64)
    _launch_transpose(grid, (source, out), (), (rows, columns), _TRANSPOSED)


@triton.jit
def _transpose_kernel(in_ptr, out_ptr, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    """Grid (cdiv(rows, BM), cdiv(columns, BN)): [rows, columns] to [columns, rows]."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    column = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(in_ptr + row[:, None] * columns + column[None, :], mask=inside)
    tl.store(out_ptr + column[:, None] * rows + row[None, :], tile.T, mask=inside.T)


def weighted(rows_NR: Tensor, plan: Plan, weights_TK: Tensor) -> Tensor:
    """Multiply rows in plan order by their routing weights; zeros past the last valid row.

    Args:
        rows_NR, weights_TK: contiguous; the result has the dtype of the rows.
        plan: the plan of the rows.
    """
    N, R = rows_NR.shape
    out_NR = rows_NR.new_empty(N, R)
    _launch_weighted(
        (cdiv(N, _ROWS),), (rows_NR, weights_TK, plan.row_of_N, out_NR), (N,), (R,),
        _weighted_constants(R),
    )  # fmt: skip
    return out_NR


@functools.cache
def _weighted_constants(rank: int) -> Constants:
    return Constants(BN=_ROWS, BR=min(next_power_of_2(rank), 64), num_warps=4)


@triton.jit(do_not_specialize=["N"])
def _weighted_kernel(
    rows_ptr, weights_ptr, row_ptr, out_ptr, N, R, BN: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """Grid (cdiv(N, BN),)."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.load(row_ptr + n, mask=n < N, other=-1)
    weight = tl.load(weights_ptr + row, mask=row >= 0, other=0.0).to(tl.float32)[:, None]
    for r0 in range(0, R, BR):
        r = r0 + tl.arange(0, BR)[None, :]
        at = n.to(tl.int64)[:, None] * R + r
        value = tl.load(rows_ptr + at, mask=(row >= 0)[:, None] & (r < R), other=0.0)
        value = weight * value.to(tl.float32)
        tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (r < R))


@functools.cache
def _backward_constants(
    tile: Tile, rank_block: int, gather: bool, passed: bool, summed: bool, in_runs: bool
) -> Constants:
    return Constants(
        GATHER=gather, PASSED=passed, SUMMED=summed, IN_RUNS=in_runs, BO=tile.n, BK=tile.k,
        BR=rank_block, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def factor_backward(
    source: Tensor,
    plan: Plan,
    b_EOR: Tensor,
    u_NR: Tensor | None,
    tile: Tile,
    *,
    alpha: float | None,
    gather: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the input and weight gradients of a factor B, in one pass over the output's gradient.

    Args:
        source: gradient of the output: [N, O] in plan order, or with ``gather`` [T, O] by token;
            last axis contiguous.
        plan: the plan of the rows.
        b_EOR: the factor, contiguous.
        u_NR: input of the factor, contiguous; None if its weight gradient is not needed.
        tile: a step covers n columns and k rows of the source.
        alpha: scale of the input gradient; None if it is not needed.
        gather: the source is given by token.

    Returns:
        (alpha B_eᵀ source_n, [N, R]; sum_n source_n ⊗ u_n, [E, O, R] contiguous).
    """
    E, O, R = b_EOR.shape
    N, K = plan.row_of_N.shape[0], plan.slot_of_TK.shape[1]
    chunks, BR = cdiv(O, tile.n), depth_block(R)
    part_CNR, grad_EOR = source, b_EOR
    if alpha is not None:
        part_CNR = torch.empty((chunks, N, R), dtype=torch.float32, device=source.device)
    if u_NR is not None:
        grad_EOR = torch.empty_like(b_EOR)
    _launch_backward(
        (E * chunks, cdiv(R, BR)),
        (source, b_EOR, b_EOR if u_NR is None else u_NR, part_CNR, grad_EOR, plan.row_of_N,
         plan.offsets_S),
        (N,), (chunks, O, R, K, source.stride(0)),
        _backward_constants(
            tile, BR, gather, alpha is not None, u_NR is not None, source.dtype == torch.float32
        ),
    )  # fmt: skip
    passed_NR = None
    if alpha is not None:
        passed_NR = source.new_empty(N, R)
        _launch_sum(
            (cdiv(N * R, 1024),), (part_CNR, passed_NR), (N * R,), (chunks, float(alpha)),
            BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return passed_NR, None if u_NR is None else grad_EOR


@triton.jit(do_not_specialize=["N"])
def _factor_backward_kernel(
    source_ptr, b_ptr, u_ptr, part_ptr, grad_ptr, row_ptr, offsets_ptr,
    N, chunks, O, R, K, stride_source,
    GATHER: tl.constexpr, PASSED: tl.constexpr, SUMMED: tl.constexpr, IN_RUNS: tl.constexpr,
    BO: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Grid (E x chunks of the output's columns, blocks of the rank): all rows of one expert."""
    e = tl.program_id(0) // chunks
    chunk = tl.program_id(0) - e * chunks
    o = chunk * BO + tl.arange(0, BO)
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    inside = (o < O)[:, None] & (r < R)[None, :]
    at = (e.to(tl.int64) * O + o[:, None]) * R + r[None, :]
    start = tl.load(offsets_ptr + e)
    end = tl.load(offsets_ptr + e + 1)
    # Triton's interpreter does not combine a scalar and a block in a mask, so make start a block.
    b = tl.load(b_ptr + at, mask=inside & (start + 0 * o < end)[:, None], other=0.0)
    part_ptr += chunk.to(tl.int64) * N * R
    grad = tl.zeros((BO, BR), dtype=tl.float32)
    if IN_RUNS:
        for n1 in range(start, end, RUN):
            run = tl.zeros((BO, BR), dtype=tl.float32)
            for n0 in range(n1, min(n1 + RUN, end), BK):
                run = _step(
                    run, source_ptr, b, u_ptr, part_ptr, row_ptr, n0, end, o, r, O, R, K,
                    stride_source, GATHER, PASSED, SUMMED, BK,
                )  # fmt: skip
            grad += run
    else:
        for n0 in range(start, end, BK):
            grad = _step(
                grad, source_ptr, b, u_ptr, part_ptr, row_ptr, n0, end, o, r, O, R, K,
                stride_source, GATHER, PASSED, SUMMED, BK,
            )  # fmt: skip
    if SUMMED:
        tl.store(grad_ptr + at, grad.to(grad_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _step(
    grad, source_ptr, b, u_ptr, part_ptr, row_ptr, n0, end, o, r, O, R, K, stride_source,
    GATHER: tl.constexpr, PASSED: tl.constexpr, SUMMED: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Process BK rows: write their input gradient for these columns; return the summed gradient."""
    n = n0 + tl.arange(0, BK)
    row = n
    if GATHER:
        row = tl.load(row_ptr + n, mask=n < end, other=0) // K
    source_at = source_ptr + row.to(tl.int64)[:, None] * stride_source + o[None, :]
    # Mask both sides past the expert's end: zero times an Inf of the next expert would be NaN.
    source = tl.load(source_at, mask=(n < end)[:, None] & (o < O)[None, :], other=0.0)
    at = n.to(tl.int64)[:, None] * R + r[None, :]
    stored = (n < end)[:, None] & (r < R)[None, :]
    if PASSED:
        passed = tl.dot(source, b, input_precision="ieee")
        tl.store(part_ptr + at, passed, mask=stored)
    if SUMMED:
        u = tl.load(u_ptr + at, mask=stored, other=0.0)
        grad = tl.dot(source.T, u, grad, input_precision="ieee")
    return grad


@triton.jit(do_not_specialize=["count"])
def _sum_parts_kernel(part_ptr, out_ptr, count, chunks, alpha, BLOCK: tl.constexpr):
    """Grid (cdiv(count, BLOCK),): alpha times the sum over the chunks, in their order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    part_at = part_ptr + at
    for _ in range(0, chunks):
        acc += tl.load(part_at, mask=inside, other=0.0)
        part_at += count
    tl.store(out_ptr + at, (acc * alpha).to(out_ptr.dtype.element_ty), mask=inside)


_launch_transpose = Launcher(_transpose_kernel)
_launch_weighted = Launcher(_weighted_kernel)
_launch_backward = Launcher(_factor_backward_kernel)
_launch_sum = Launcher(_sum_parts_kernel)
