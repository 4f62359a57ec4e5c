"""Weight gradients on Hopper, in Gluon: the sum of :mod:`kernels.experts.dw`, warp-specialised.

One warpgroup produces, two consume. The producer brings BK token rows of both sides into the ring
(kernels/hopper/common.py): the side in plan order by TMA, whose ragged descriptor clips at the
expert's end, and the gathered side by cp.async, row by row. Each consumer multiplies 64 of the left
side's 128 columns by all 256 of the right.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

from moe_patch.kernels.common.device import cdiv
from moe_patch.kernels.common.launcher import Constants, Launcher
from moe_patch.kernels.common.tiling import locate_tile
from moe_patch.kernels.common.versions import available
from moe_patch.kernels.hopper.common import (
    BK,
    BM,
    BN,
    CHUNK,
    OUTS,
    RAGGED_ROWS_C,
    RANK3,
    RANK3_C,
    RANK4_C,
    claim,
    constants,
    copies_boxes,
    copies_rows,
    load_box,
    programs,
    quarter,
    ragged_box,
    ring,
    store_box,
    sum_steps,
    whole_box,
)
from moe_patch.kernels.hopper.gather import COPY, rows_at
from moe_patch.types import Plan


def supported(
    left: Tensor, right: Tensor, like_EOI: Tensor, *, gather_left: bool, gather_right: bool
) -> bool:
    """Whether this kernel takes the operands: one side gathered, whole 16 bytes."""
    return (
        available(left)
        and gather_left != gather_right
        and left.shape[0] > 0
        and copies_rows(left, right)
        and copies_boxes(like_EOI, axis=2)
    )


def specialised_outer_sum(
    left: Tensor,
    right: Tensor,
    plan: Plan,
    like_EOI: Tensor,
    *,
    gather_left: bool,
    group: int,
) -> Tensor:
    """[E, O, I] like ``like_EOI``; see :func:`moe_patch.kernels.experts.dw.outer_sum`.

    Args:
        left, right: [N, O] and [N, I] in plan order, one of them by token.
        plan: where each row sits.
        like_EOI: the weight whose gradient this is.
        gather_left: the left side is by token; otherwise the right one is.
        group: row tiles that share a pass over the columns.
    """
    E, O, I = like_EOI.shape
    grad_EOI = torch.empty_like(like_EOI)
    # The tile is oblong: of the two ways to lay it, the one that covers less beyond the edges.
    transposed = _covered(I, O) < _covered(O, I)
    if transposed:
        left, right, gather_left, O, I = right, left, not gather_left, I, O
    row_tiles, columns = cdiv(O, BM), cdiv(I, BN)
    tiles = E * row_tiles * columns
    sorted_side, box = (right, BN) if gather_left else (left, BM // 2)
    gathered = left if gather_left else right
    out = whole_box(grad_EOI, (1, CHUNK, CHUNK), RANK3)
    _launch(
        (programs(tiles, left),),
        (ragged_box(sorted_side, (BK, box)), gathered, out, plan.row_of_N, plan.offsets_S),
        (tiles,), (row_tiles, columns, gathered.shape[1] // 8, gathered.stride(0) // 8),
        _constants(plan.slot_of_TK.shape[1], gather_left, transposed, group),
    )  # fmt: skip
    return grad_EOI


@functools.cache
def _constants(top_k: int, gather_left: bool, transposed: bool, group: int) -> Constants:
    return constants(group, K=top_k, GATHER_LEFT=gather_left, TRANSPOSED=transposed, OUTS=OUTS)


def _covered(rows: int, columns: int) -> int:
    return cdiv(rows, BM) * BM * cdiv(columns, BN) * BN


@gluon.jit
def _tile(tile, row_tiles, columns, GROUP: gl.constexpr):
    """(expert, row tile, column tile)."""
    e = tile // (row_tiles * columns)
    row_tile, column_tile = locate_tile(tile - e * (row_tiles * columns), row_tiles, columns, GROUP)
    return e, row_tile, column_tile


@gluon.jit
def _rows(row_ptr, n0, end, BK: gl.constexpr):
    n = n0 + gl.arange(0, BK, layout=gl.SliceLayout(1, COPY))
    return gl.load(row_ptr + n, mask=n < end, other=0)


@gluon.jit
def _gather(source, bufs, index, n, end, column, width, WIDE: gl.constexpr):
    column += gl.arange(0, WIDE, layout=gl.SliceLayout(0, COPY))
    # Rows past the expert's end become zero: zero times a neighbour's Inf would be NaN.
    mask = (n < end)[:, None] & (column < width)[None, :]
    async_copy.async_copy_global_to_shared(bufs.index(index), source + column[None, :], mask=mask)


@gluon.jit
def _step(
    n0, row, sorted_side, gathered_ptr, end, o, i, left_bufs, right_bufs, ready, empty, step,
    width, stride,
    K: gl.constexpr, GATHER_LEFT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Bring one step, if the expert has that many rows; returns the next step."""
    HALF: gl.constexpr = BM // 2
    if n0 < end:
        stage = claim(ready, empty, step, BK * (BN if GATHER_LEFT else BM) * 2, STAGES)
        bar = ready.index(stage)
        n = n0 + gl.arange(0, BK, layout=gl.SliceLayout(1, COPY))
        source = rows_at(gathered_ptr, row // K, stride)
        clip = RAGGED_ROWS_C - (end - n0)
        if GATHER_LEFT:
            at = [RAGGED_ROWS_C, end, clip, i]
            load_box(sorted_side, at, bar, right_bufs.index(stage), [1, 1, BK, BN], RANK4_C)
            _gather(source, left_bufs, 2 * stage, n, end, o, width, HALF)
            _gather(source, left_bufs, 2 * stage + 1, n, end, o + HALF, width, HALF)
        else:
            for half in gl.static_range(2):
                at = [RAGGED_ROWS_C, end, clip, o + half * HALF]
                buffer = left_bufs.index(2 * stage + half)
                load_box(sorted_side, at, bar, buffer, [1, 1, BK, HALF], RANK4_C)
            _gather(source, right_bufs, stage, n, end, i, width, BN)
        async_copy.mbarrier_arrive(bar, increment_count=False)
        step += 1
    return step


@gluon.jit
def _produce(
    sorted_side, gathered_ptr, row_ptr, offsets_ptr, left_bufs, right_bufs, ready, empty,
    tiles, row_tiles, columns, width_8, stride_8,
    K: gl.constexpr, GATHER_LEFT: gl.constexpr, GROUP: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    # In units of 8, so that the compiler knows that rows keep the 16 bytes of a copy aligned.
    width, stride = width_8 * 8, stride_8 * 8
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        e, row_tile, column_tile = _tile(tile, row_tiles, columns, GROUP)
        o, i = row_tile * BM, column_tile * BN
        end = gl.load(offsets_ptr + e + 1)
        # Rows are looked up for four steps at once: one by one, that latency sets the pace.
        for n0 in range(gl.load(offsets_ptr + e), end, 4 * BK):
            row_0 = _rows(row_ptr, n0, end, BK)
            row_1 = _rows(row_ptr, n0 + BK, end, BK)
            row_2 = _rows(row_ptr, n0 + 2 * BK, end, BK)
            row_3 = _rows(row_ptr, n0 + 3 * BK, end, BK)
            step = _step(
                n0, row_0, sorted_side, gathered_ptr, end, o, i, left_bufs, right_bufs, ready,
                empty, step, width, stride, K, GATHER_LEFT, BM, BN, BK, STAGES,
            )  # fmt: skip
            step = _step(
                n0 + BK, row_1, sorted_side, gathered_ptr, end, o, i, left_bufs, right_bufs, ready,
                empty, step, width, stride, K, GATHER_LEFT, BM, BN, BK, STAGES,
            )  # fmt: skip
            step = _step(
                n0 + 2 * BK, row_2, sorted_side, gathered_ptr, end, o, i, left_bufs, right_bufs,
                ready, empty, step, width, stride, K, GATHER_LEFT, BM, BN, BK, STAGES,
            )  # fmt: skip
            step = _step(
                n0 + 3 * BK, row_3, sorted_side, gathered_ptr, end, o, i, left_bufs, right_bufs,
                ready, empty, step, width, stride, K, GATHER_LEFT, BM, BN, BK, STAGES,
            )  # fmt: skip


@gluon.jit
def _consume(
    half, grad, offsets_ptr, left_bufs, right_bufs, out_bufs, ready, empty, tiles, row_tiles,
    columns,
    TRANSPOSED: gl.constexpr, GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, OUTS: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BM // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    part: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        e, row_tile, column_tile = _tile(tile, row_tiles, columns, GROUP)
        rows = gl.load(offsets_ptr + e + 1) - gl.load(offsets_ptr + e)
        acc = gl.zeros((HALF, BN), dtype=gl.float32, layout=layout)
        acc, step = sum_steps(
            acc, (rows + BK - 1) // BK, step, half, left_bufs, right_bufs, ready, empty,
            True, False, True, STAGES,
        )  # fmt: skip
        for q in gl.static_range(BN // CHUNK):
            row = row_tile * BM + half * HALF
            column = column_tile * BN + q * CHUNK
            at = [e, column if TRANSPOSED else row, row if TRANSPOSED else column]
            store_box(
                quarter(acc, q, part).to(out_bufs.dtype), out_bufs.index(half * OUTS + q % OUTS),
                grad, at, [1, HALF, CHUNK], RANK3_C, OUTS - 1, TRANSPOSED,
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles"])
def _specialised_dw_kernel(
    sorted_side, gathered_ptr, grad, row_ptr, offsets_ptr, tiles, row_tiles, columns, width_8,
    stride_8,
    K: gl.constexpr, GATHER_LEFT: gl.constexpr, TRANSPOSED: gl.constexpr, GROUP: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, CHUNK: gl.constexpr,
    STAGES: gl.constexpr, OUTS: gl.constexpr,
):  # fmt: skip
    """Grid: the multiprocessors. Each program takes tiles of BM x BN in turn."""
    dtype: gl.constexpr = gathered_ptr.dtype.element_ty
    left_bufs, right_bufs, ready, empty = ring(dtype, (BK, BM // 2), (BK, BN), 129, STAGES)
    out_bufs = gl.allocate_shared_memory(
        dtype, [2 * OUTS, BM // 2, CHUNK], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    gl.warp_specialize(
        [
            (_consume, (0, grad, offsets_ptr, left_bufs, right_bufs, out_bufs, ready, empty,
                        tiles, row_tiles, columns, TRANSPOSED, GROUP, BM, BN, BK, CHUNK, STAGES,
                        OUTS)),
            (_consume, (1, grad, offsets_ptr, left_bufs, right_bufs, out_bufs, ready, empty,
                        tiles, row_tiles, columns, TRANSPOSED, GROUP, BM, BN, BK, CHUNK, STAGES,
                        OUTS)),
            (_produce, (sorted_side, gathered_ptr, row_ptr, offsets_ptr, left_bufs, right_bufs,
                        ready, empty, tiles, row_tiles, columns, width_8, stride_8, K,
                        GATHER_LEFT, GROUP, BM, BN, BK, STAGES)),
        ],
        [4, 4],
        [216, 56],
    )  # fmt: skip


_launch = Launcher(_specialised_dw_kernel)
