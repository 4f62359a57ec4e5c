"""The grouped product of rows.py on Hopper, in Gluon: the down projection and the gradient of x.

One warp produces, everything by TMA; two warpgroups multiply 64 rows each by 256 columns and write
them out in four chunks, clipped at the expert's end, while the producer is in the next tile.
"""

from __future__ import annotations

import functools

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from moe_patch.kernels.common.device import cdiv
from moe_patch.kernels.common.launcher import Box, Constants, Launcher
from moe_patch.kernels.common.tiling import rows_of_tile
from moe_patch.kernels.common.versions import available
from moe_patch.kernels.hopper.common import (
    BK,
    BM,
    BN,
    CHUNK,
    OUTS,
    RAGGED_ROWS_C,
    RANK2,
    RANK3,
    RANK4_C,
    claim,
    constants,
    copies_boxes,
    copies_rows,
    load_box,
    programs,
    quarter,
    ragged_box,
    rank_depth,
    ring,
    store_box,
    sum_both,
    whole_box,
    with_factors,
)
from moe_patch.kernels.plan.row_tiles import Rows


def supported(
    inputs: Tensor, rows: Rows, w_EOI: Tensor, low_rank: tuple[Tensor, Tensor] | None
) -> bool:
    """Whether this kernel takes the operands: all in whole 16 bytes, factor and weight alike."""
    sides, weights = with_factors([inputs], w_EOI, low_rank)
    return (
        rows.block_m == BM
        and available(inputs)
        and copies_rows(*sides)
        and w_EOI.shape[1] % 8 == 0
        and (copies_boxes(*weights, axis=2) or copies_boxes(*weights, axis=1))
    )


def specialised_grouped_linear(
    inputs: Tensor,
    rows: Rows,
    w_EOI: Tensor,
    b_EO: Tensor | None,
    out_NO: Tensor,
    low_rank: tuple[Tensor, Tensor] | None,
    group: int,
) -> None:
    """Writes out_NO; see :func:`moe_patch.kernels.experts.linear.grouped_linear`.

    Args:
        group: row tiles that share a pass over the columns.
    """
    O, I = w_EOI.shape[1:]
    depth_last = w_EOI.stride(2) == 1
    sides, weight, R = _sides(inputs), _boxes(w_EOI, depth_last), 0
    ranks, factor = sides, weight
    if low_rank is not None:
        ranks, factor, R = (
            _sides(low_rank[0]),
            _boxes(low_rank[1], depth_last),
            low_rank[0].shape[1],
        )
    bias = b_EO if b_EO is not None else inputs
    columns = cdiv(O, BN)
    _launch(
        (programs(rows.bound * columns, inputs),),
        (sides, ranks, weight, factor, ragged_box(out_NO, (BM // 2, CHUNK)), bias,
         rows.plan.offsets_S, rows.table),
        (rows.bound,), (columns, O, I, R, bias.stride(0), bias.stride(1)),
        _constants(depth_last, rank_depth(low_rank), b_EO is not None, group),
    )  # fmt: skip


@functools.cache
def _constants(depth_last: bool, low_rank: int, biased: bool, group: int) -> Constants:
    return constants(group, DEPTH_LAST=depth_last, LOW_RANK=low_rank, BIASED=biased, OUTS=OUTS)


def _sides(rows: Tensor) -> Box:
    return whole_box(rows, (BM // 2, BK), RANK2)


def _boxes(w_EOI: Tensor, depth_last: bool) -> Box:
    if depth_last:
        return whole_box(w_EOI, (1, BN, BK), RANK3)
    E, O, I = w_EOI.shape
    stride_e, stride_o, stride_i = w_EOI.stride()
    return Box(w_EOI, (E, I, O), (stride_e, stride_i, stride_o), (1, BK, BN), RANK3)


@gluon.jit
def _produce(
    rows, ranks, weight, factor, offsets_ptr, table_ptr, left_bufs, right_bufs, ready, empty,
    M, columns, steps, low_steps,
    DEPTH_LAST: gl.constexpr, LOW_RANK: gl.constexpr, GROUP: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    row_tiles = gl.load(table_ptr)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * columns, gl.num_programs(0)):
        e, start, _end, column_tile = rows_of_tile(
            tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP
        )
        column = column_tile * BN
        for i in range(0, steps):
            _step(
                rows, weight, e, start, column, i * BK, left_bufs, right_bufs, ready, empty, step,
                DEPTH_LAST, BM, BN, BK, STAGES,
            )  # fmt: skip
            step += 1
        if LOW_RANK > 0:
            for i in range(0, low_steps):
                _step(
                    ranks, factor, e, start, column, i * BK, left_bufs, right_bufs, ready, empty,
                    step, DEPTH_LAST, BM, BN, BK, STAGES,
                )  # fmt: skip
                step += 1


@gluon.jit
def _step(
    rows, weight, e, start, column, k0, left_bufs, right_bufs, ready, empty, step,
    DEPTH_LAST: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Bring one step's boxes. Rows past the expert's end are its neighbour's, and never stored."""
    stage = claim(ready, empty, step, (BM + BN) * BK * 2, STAGES)
    bar = ready.index(stage)
    if DEPTH_LAST:
        load_box(weight, [e, column, k0], bar, right_bufs.index(stage), [1, BN, BK])
    else:
        load_box(weight, [e, k0, column], bar, right_bufs.index(stage), [1, BK, BN])
    for half in gl.static_range(2):
        at = [start + half * (BM // 2), k0]
        tma.async_copy_global_to_shared(rows, at, bar, left_bufs.index(2 * stage + half))


@gluon.jit
def _consume(
    half, out, b_ptr, offsets_ptr, table_ptr, left_bufs, right_bufs, out_bufs, ready, empty,
    M, columns, O, steps, low_steps, stride_be, stride_bo,
    DEPTH_LAST: gl.constexpr, LOW_RANK: gl.constexpr, BIASED: gl.constexpr,
    GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, CHUNK: gl.constexpr,
    STAGES: gl.constexpr, OUTS: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BM // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    part: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    row_tiles = gl.load(table_ptr)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * columns, gl.num_programs(0)):
        e, start, end, column_tile = rows_of_tile(
            tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP
        )
        acc = gl.zeros((HALF, BN), dtype=gl.float32, layout=layout)
        acc, step = sum_both(
            acc, steps, low_steps, step, half, left_bufs, right_bufs, ready, empty, DEPTH_LAST,
            False, STAGES, LOW_RANK,
        )  # fmt: skip
        clip = RAGGED_ROWS_C - (end - start) + half * HALF
        for q in gl.static_range(BN // CHUNK):
            value = quarter(acc, q, part)
            column = column_tile * BN + q * CHUNK
            if BIASED:
                o = column + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, part))
                at = b_ptr + e.to(gl.int64) * stride_be + o * stride_bo
                value += gl.load(at, mask=o < O, other=0.0).to(gl.float32)[None, :]
            store_box(
                value.to(out_bufs.dtype), out_bufs.index(half * OUTS + q % OUTS), out,
                [RAGGED_ROWS_C, end, clip, column], [1, 1, HALF, CHUNK], RANK4_C, OUTS - 1,
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def _specialised_rows_kernel(
    rows, ranks, weight, factor, out, b_ptr, offsets_ptr, table_ptr,
    M, columns, O, I, R, stride_be, stride_bo,
    DEPTH_LAST: gl.constexpr, LOW_RANK: gl.constexpr, BIASED: gl.constexpr, GROUP: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, CHUNK: gl.constexpr,
    STAGES: gl.constexpr, OUTS: gl.constexpr,
):  # fmt: skip
    """Grid: the multiprocessors. Each program takes tiles of BM rows x BN columns in turn."""
    dtype: gl.constexpr = out.dtype
    RIGHT: gl.constexpr = (BN, BK) if DEPTH_LAST else (BK, BN)
    left_bufs, right_bufs, ready, empty = ring(dtype, (BM // 2, BK), RIGHT, 1, STAGES)
    out_bufs = gl.allocate_shared_memory(
        dtype, [2 * OUTS, BM // 2, CHUNK], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    steps = (I + BK - 1) // BK
    low_steps = (R + BK - 1) // BK
    gl.warp_specialize(
        [
            (_consume, (0, out, b_ptr, offsets_ptr, table_ptr, left_bufs, right_bufs, out_bufs,
                        ready, empty, M, columns, O, steps, low_steps, stride_be, stride_bo,
                        DEPTH_LAST, LOW_RANK, BIASED, GROUP, BM, BN, CHUNK, STAGES, OUTS)),
            (_consume, (1, out, b_ptr, offsets_ptr, table_ptr, left_bufs, right_bufs, out_bufs,
                        ready, empty, M, columns, O, steps, low_steps, stride_be, stride_bo,
                        DEPTH_LAST, LOW_RANK, BIASED, GROUP, BM, BN, CHUNK, STAGES, OUTS)),
            (_produce, (rows, ranks, weight, factor, offsets_ptr, table_ptr, left_bufs, right_bufs,
                        ready, empty, M, columns, steps, low_steps,
                        DEPTH_LAST, LOW_RANK, GROUP, BM, BN, BK, STAGES)),
        ],
        [4, 1],
        [216, 56],
    )  # fmt: skip


_launch = Launcher(_specialised_rows_kernel)
