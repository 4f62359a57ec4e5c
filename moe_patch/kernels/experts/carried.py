"""Sums over each token's experts where rows of y were computed with another chunk of tokens.

kernels/plan/full_tiles.py describes which rows those are and where they are kept.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_patch.kernels.common.device import cdiv, next_power_of_2
from moe_patch.kernels.common.launcher import Launcher
from moe_patch.kernels.plan.full_tiles import FullTiles
from moe_patch.types import Plan

_ROWS, _COLUMNS = 16, 256


def combine_carried(
    rows_ND: Tensor, carried_MD: Tensor, plan: Plan, weights_TK: Tensor, out_TD: Tensor
) -> None:
    """Write out_t = sum_k w_tk rows[slot_tk], bit for bit as ``reduce.combine`` does.

    Args:
        rows_ND: contiguous, in plan order.
        carried_MD: rows with slots from N on, last axis contiguous.
        plan: the plan of a chunk (:meth:`FullTiles.plan`).
        weights_TK: contiguous routing weights.
        out_TD: where to write, last axis contiguous.
    """
    (T, K), (N, D) = plan.slot_of_TK.shape, rows_ND.shape
    block = min(next_power_of_2(D), _COLUMNS)
    columns = cdiv(D, block)
    _launch_combine(
        (T * columns,),
        (rows_ND, carried_MD, plan.slot_of_TK, weights_TK, out_TD),
        (N,), (columns, D, carried_MD.stride(0), out_TD.stride(0)),
        K=K, BLOCK=block, num_warps=1,
    )  # fmt: skip


def carry(rows_ND: Tensor, full: FullTiles, number: int, carried_MD: Tensor) -> None:
    """Copy the rows of chunk ``number`` that belong to later tokens to their places.

    Args:
        rows_ND: contiguous, in the order of the chunk's plan.
        full: the plans of all chunks.
        number: the chunk.
        carried_MD: [E block_m, D], last axis contiguous.
    """
    D, ends = rows_ND.shape[1], full.ends
    columns = min(next_power_of_2(D), _COLUMNS)
    _launch_carry(
        (full.experts, cdiv(full.block_m, _ROWS), cdiv(D, columns)),
        (rows_ND, ends.offsets_CS[number], ends.begun_CS[number], ends.ended_CS[number],
         carried_MD),
        (), (D, carried_MD.stride(0)),
        BLOCK_M=full.block_m, ROWS=_ROWS, COLUMNS=columns,
    )  # fmt: skip


@triton.jit(do_not_specialize=["N"])
def _combine_kernel(
    rows_ptr, carried_ptr, slot_ptr, weights_ptr, out_ptr, N, columns, D, stride_carried,
    stride_out,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (T * columns,): BLOCK of the output columns of one token per program."""
    t = (tl.program_id(0) // columns).to(tl.int64)
    d = tl.program_id(0) % columns * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(K):
        slot = tl.load(slot_ptr + t * K + k).to(tl.int64)
        width = tl.where(slot >= 0, D, 0)
        later = carried_ptr + (slot - N) * stride_carried
        row = tl.load(tl.where(slot < N, rows_ptr + slot * D, later) + d, mask=d < width, other=0.0)
        weight = tl.load(weights_ptr + t * K + k, mask=slot >= 0, other=0.0).to(tl.float32)
        acc += weight * row.to(tl.float32)
    tl.store(out_ptr + t * stride_out + d, acc.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def _carry_kernel(
    rows_ptr, offsets_ptr, begun_ptr, ended_ptr, carried_ptr, D, stride_carried,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (E, cdiv(BLOCK_M, ROWS), cdiv(D, COLUMNS)): copy some rows and columns of an expert."""
    e = tl.program_id(0).to(tl.int64)
    begun = tl.load(begun_ptr + e)
    first = tl.maximum(tl.load(ended_ptr + e), begun)
    offset = tl.load(offsets_ptr + e)
    count = tl.load(offsets_ptr + e + 1) - offset
    place = first + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (place - begun < count)[:, None] & (d < D)[None, :]
    source = rows_ptr + (offset + place - begun).to(tl.int64)[:, None] * D + d[None, :]
    to = (e * BLOCK_M + place % BLOCK_M)[:, None] * stride_carried + d[None, :]
    tl.store(carried_ptr + to, tl.load(source, mask=mask, other=0.0), mask=mask)


_launch_combine = Launcher(_combine_kernel)
_launch_carry = Launcher(_carry_kernel)
