"""Weight gradients on Hopper, in Gluon: the warp-specialised counterpart of experts/dw.py.

One warpgroup is the producer, two are consumers. The producer loads BK token rows of both sides
into the ring (kernels/hopper/common.py). TMA loads the side in plan order, with a ragged descriptor
that clips at the expert's end. The gathered side is loaded by cp.async, row by row. Each consumer
multiplies 64 of the left side's 128 columns by all 256 columns of the right side.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

from moe_patch.kernels.common.device import cdiv
from moe_patch.kernels.common.gemm_device import locate_tile
from moe_patch.kernels.common.launcher import Launcher
from moe_patch.kernels.common.versions import available
from moe_patch.kernels.hopper.common import (
    ACC,
    BK,
    BK_C,
    BM,
    BM_C,
    BN,
    BN_C,
    CHUNK,
    CHUNK_C,
    HALF_C,
    OUTS_C,
    PART,
    RAGGED_ROWS_C,
    RANK2_C,
    RANK3,
    RANK3_C,
    RANK4_C,
    claim,
    constants,
    copies_boxes,
    copies_rows,
    load_box,
    make_ring,
    programs,
    quarter,
    ragged_box,
    specialise,
    store_box,
    sum_steps,
    whole_box,
)
from moe_patch.kernels.hopper.gather import COPY, rows_at
from moe_patch.kernels.hopper.gluon_names import load_rows
from moe_patch.kernels.hopper.sums import add_sums, sums_box, sums_buffers, write_sums
from moe_patch.types import Plan


def supported(
    left: Tensor, right: Tensor, like_EOI: Tensor, *, gather_left: bool, gather_right: bool
) -> bool:
    """Return whether the kernel supports the operands: one side gathered, 16-byte units."""
    return (
        available(left)
        and gather_left != gather_right
        and left.shape[0] > 0
        and copies_rows(left, right)
        and copies_boxes(like_EOI, axis=2)
    )


def outer_sum(
    left: Tensor,
    right: Tensor,
    plan: Plan,
    like_EOI: Tensor,
    *,
    gather_left: bool,
    group: int,
    chunks: int = 1,
    sums: tuple[Tensor, bool] | None = None,
) -> Tensor:
    """Return the gradient [E, O, I]; see :func:`moe_patch.kernels.experts.dw.outer_sum`.

    Args:
        left, right: [N, O] and [N, I]; one side in plan order, the other one by token.
        plan: the plan of the rows.
        like_EOI: the weight that the gradient belongs to.
        gather_left: the left side is given by token; otherwise the right side is.
        group: row tiles that share a pass over the columns.
        chunks, sums: as there.
    """
    E, O, I = like_EOI.shape
    grad_EOI, again = sums or (torch.empty_like(like_EOI), False)
    transposed, row_tiles, columns = _laid(O, I)
    sizes, (stride_e, *strides) = [O, I], grad_EOI.stride()
    if transposed:
        left, right, gather_left = right, left, not gather_left
        sizes, strides = sizes[::-1], strides[::-1]
    tiles = E * row_tiles * columns
    sorted_side, box = (right, BN) if gather_left else (left, BM // 2)
    gathered = left if gather_left else right
    if sums is None:
        out = whole_box(grad_EOI, (1, CHUNK, CHUNK), RANK3)
    elif transposed:
        # These sums are written without TMA; the weight stands for them, because its box exists.
        out = whole_box(like_EOI, (1, CHUNK, CHUNK), RANK3)
    else:
        out = sums_box(grad_EOI)
    _launch(
        (programs(tiles, left),),
        (ragged_box(sorted_side, (BK, box)), gathered, out, grad_EOI, plan.row_of_N,
         plan.offsets_S),
        (tiles,), (E + 1, chunks, row_tiles, columns, gathered.shape[1] // 8,
                   gathered.stride(0) // 8, *sizes, stride_e, *strides),
        constants(group, K=plan.slot_of_TK.shape[1], GATHER_LEFT=gather_left,
                  TRANSPOSED=transposed, CHUNKED=chunks > 1, WIDE=sums is not None, ADD=again),
    )  # fmt: skip
    return grad_EOI


@functools.cache
def _laid(O: int, I: int) -> tuple[bool, int, int]:
    """Return whether the gradient is computed transposed, and its row and column tiles.

    A tile is not square, so choose the orientation with less padding at the edges.
    """
    transposed = _covered(I, O) < _covered(O, I)
    rows, columns = (I, O) if transposed else (O, I)
    return transposed, cdiv(rows, BM), cdiv(columns, BN)


def _covered(rows: int, columns: int) -> int:
    return cdiv(rows, BM) * BM * cdiv(columns, BN) * BN


@gluon.jit
def _tile(tile, row_tiles, columns, GROUP: gl.constexpr):
    """Return (expert, row tile, column tile)."""
    e = tile // (row_tiles * columns)
    row_tile, column_tile = locate_tile(tile - e * (row_tiles * columns), row_tiles, columns, GROUP)
    return e, row_tile, column_tile


@gluon.jit
def _rows(row_ptr, n0, end):
    n = n0 + gl.arange(0, BK_C, layout=gl.SliceLayout(1, COPY))
    return gl.load(row_ptr + n, mask=n < end, other=0)


@gluon.jit
def _gather(source, bufs, index, n, end, column, width, WIDE: gl.constexpr):
    column += gl.arange(0, WIDE, layout=gl.SliceLayout(0, COPY))
    # Zero the rows past the expert's end: zero times an Inf of the next expert would be NaN.
    mask = (n < end)[:, None] & (column < width)[None, :]
    load_rows(bufs.index(index), source + column[None, :], mask=mask)


@gluon.jit
def _step(
    n0, row, sorted_side, gathered_ptr, end, o, i, ring, step, width, stride,
    K: gl.constexpr, GATHER_LEFT: gl.constexpr,
):  # fmt: skip
    """Load one step if the expert has that many rows; return the next step."""
    if n0 < end:
        stage = claim(ring, step, BK_C * (BN_C if GATHER_LEFT else BM_C) * 2)
        bar = ring.ready.index(stage)
        n = n0 + gl.arange(0, BK_C, layout=gl.SliceLayout(1, COPY))
        source = rows_at(gathered_ptr, row // K, stride)
        clip = RAGGED_ROWS_C - (end - n0)
        if GATHER_LEFT:
            at = [RAGGED_ROWS_C, end, clip, i]
            load_box(sorted_side, at, bar, ring.right.index(stage), [1, 1, BK_C, BN_C], RANK4_C)
            _gather(source, ring.left, 2 * stage, n, end, o, width, HALF_C)
            _gather(source, ring.left, 2 * stage + 1, n, end, o + HALF_C, width, HALF_C)
        else:
            for half in gl.static_range(2):
                at = [RAGGED_ROWS_C, end, clip, o + half * HALF_C]
                buffer = ring.left.index(2 * stage + half)
                load_box(sorted_side, at, bar, buffer, [1, 1, BK_C, HALF_C], RANK4_C)
            _gather(source, ring.right, stage, n, end, i, width, BN_C)
        async_copy.mbarrier_arrive(bar, increment_count=False)
        step += 1
    return step


@gluon.jit
def _produce_rows(
    sorted_side, gathered_ptr, row_ptr, bounds_ptr, o, i, ring, step, width, stride,
    K: gl.constexpr, GATHER_LEFT: gl.constexpr,
):  # fmt: skip
    """Load one range of rows, whose two bounds are in memory; return the next step."""
    end = gl.load(bounds_ptr + 1)
    # Load the row indices of four steps at once, to hide the latency of these loads.
    for n0 in range(gl.load(bounds_ptr), end, 4 * BK_C):
        row_0 = _rows(row_ptr, n0, end)
        row_1 = _rows(row_ptr, n0 + BK_C, end)
        row_2 = _rows(row_ptr, n0 + 2 * BK_C, end)
        row_3 = _rows(row_ptr, n0 + 3 * BK_C, end)
        four = (row_0, row_1, row_2, row_3)
        for s in gl.static_range(4):
            step = _step(
                n0 + s * BK_C, four[s], sorted_side, gathered_ptr, end, o, i, ring, step, width,
                stride, K, GATHER_LEFT,
            )  # fmt: skip
    return step


@gluon.jit
def _produce(
    sorted_side, gathered_ptr, row_ptr, offsets_ptr, ring, tiles, S, chunks, row_tiles, columns,
    width_8, stride_8,
    K: gl.constexpr, GATHER_LEFT: gl.constexpr, CHUNKED: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    # Sizes are passed in units of 8, so that the compiler can prove 16-byte alignment.
    width, stride = width_8 * 8, stride_8 * 8
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        e, row_tile, column_tile = _tile(tile, row_tiles, columns, GROUP)
        o, i = row_tile * BM_C, column_tile * BN_C
        if CHUNKED:
            for chunk in range(0, chunks):
                step = _produce_rows(
                    sorted_side, gathered_ptr, row_ptr, offsets_ptr + chunk * S + e, o, i, ring,
                    step, width, stride, K, GATHER_LEFT,
                )  # fmt: skip
        else:
            step = _produce_rows(
                sorted_side, gathered_ptr, row_ptr, offsets_ptr + e, o, i, ring, step, width,
                stride, K, GATHER_LEFT,
            )  # fmt: skip


@gluon.jit
def _consume_rows(acc, bounds_ptr, step, half, ring):
    rows = gl.load(bounds_ptr + 1) - gl.load(bounds_ptr)
    return sum_steps(acc, (rows + BK_C - 1) // BK_C, step, half, ring, True, False, True)


@gluon.jit
def _consume(
    half, grad, sums_ptr, offsets_ptr, ring, out_bufs, tiles, S, chunks, row_tiles, columns,
    O, I, stride_e, stride_row, stride_column,
    TRANSPOSED: gl.constexpr, CHUNKED: gl.constexpr, WIDE: gl.constexpr, ADD: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        e, row_tile, column_tile = _tile(tile, row_tiles, columns, GROUP)
        acc = gl.zeros((HALF_C, BN_C), dtype=gl.float32, layout=ACC)
        if CHUNKED:
            for chunk in range(0, chunks):
                acc, step = _consume_rows(acc, offsets_ptr + chunk * S + e, step, half, ring)
        else:
            acc, step = _consume_rows(acc, offsets_ptr + e, step, half, ring)
        if WIDE and not TRANSPOSED:
            add_sums(acc, grad, out_bufs, half, e, row_tile, column_tile, ADD)
        elif WIDE:
            write_sums(
                acc, sums_ptr + e.to(gl.int64) * stride_e, row_tile * BM_C + half * HALF_C,
                column_tile * BN_C, O, I, stride_row, stride_column, ADD,
            )  # fmt: skip
        else:
            for q in gl.static_range(BN_C // CHUNK_C):
                row = row_tile * BM_C + half * HALF_C
                column = column_tile * BN_C + q * CHUNK_C
                at = [e, column if TRANSPOSED else row, row if TRANSPOSED else column]
                store_box(
                    quarter(acc, q, PART).to(out_bufs.dtype),
                    out_bufs.index(half * OUTS_C + q % OUTS_C), grad, at, [1, HALF_C, CHUNK_C],
                    RANK3_C, OUTS_C - 1, TRANSPOSED,
                )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles"])
def _hopper_dw_kernel(
    sorted_side, gathered_ptr, grad, sums_ptr, row_ptr, offsets_ptr, tiles, S, chunks, row_tiles,
    columns, width_8, stride_8, O, I, stride_e, stride_row, stride_column,
    K: gl.constexpr, GATHER_LEFT: gl.constexpr, TRANSPOSED: gl.constexpr, CHUNKED: gl.constexpr,
    WIDE: gl.constexpr, ADD: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Grid: the multiprocessors. Each program loops over tiles of BM x BN."""
    dtype: gl.constexpr = gathered_ptr.dtype.element_ty
    ring = make_ring(dtype, (BK_C, HALF_C), (BK_C, BN_C), 129)
    if WIDE:
        out_bufs = sums_buffers()
    else:
        out_bufs = gl.allocate_shared_memory(dtype, [2 * OUTS_C, HALF_C, CHUNK_C], RANK2_C)
    specialise(
        _consume,
        (grad, sums_ptr, offsets_ptr, ring, out_bufs, tiles, S, chunks, row_tiles, columns, O, I,
         stride_e, stride_row, stride_column, TRANSPOSED, CHUNKED, WIDE, ADD, GROUP),
        _produce,
        (sorted_side, gathered_ptr, row_ptr, offsets_ptr, ring, tiles, S, chunks, row_tiles,
         columns, width_8, stride_8, K, GATHER_LEFT, CHUNKED, GROUP),
        4, [216, 56],
    )  # fmt: skip


_launch = Launcher(_hopper_dw_kernel)
