"""Down projection and gradient of x on Hopper, in Gluon: the counterpart of experts/linear.py.

The producer is one warp and loads everything by TMA. Two warpgroups are consumers: each multiplies
64 rows by 256 columns and stores them in four chunks, clipped at the expert's end. Meanwhile the
producer works on the next tile.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from moe_patch.kernels.common.device import cdiv
from moe_patch.kernels.common.gemm_device import rows_of_tile
from moe_patch.kernels.common.launcher import Box, Launcher
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
    RANK2,
    RANK2_C,
    RANK3,
    RANK4_C,
    claim,
    constants,
    load_box,
    make_ring,
    programs,
    quarter,
    ragged_box,
    rank_depth,
    specialise,
    store_box,
    sum_both,
    takes,
    whole_box,
)
from moe_patch.kernels.hopper.gluon_names import tma_load
from moe_patch.kernels.plan.row_tiles import RowTiling


def supported(
    inputs: Tensor, rows: RowTiling, w_EOI: Tensor, low_rank: tuple[Tensor, Tensor] | None
) -> bool:
    """Return whether the kernel supports the operands: 16-byte units, factor laid like weight."""
    axis = 2 if w_EOI.stride(2) == 1 else 1
    return w_EOI.shape[1] % 8 == 0 and takes(rows, (inputs,), w_EOI, low_rank, axis)


def grouped_linear(
    inputs: Tensor,
    rows: RowTiling,
    w_EOI: Tensor,
    b_EO: Tensor | None,
    out_NO: Tensor,
    low_rank: tuple[Tensor, Tensor] | None,
    group: int,
) -> None:
    """Write out_NO; see :func:`moe_patch.kernels.experts.linear.grouped_linear`.

    Args:
        group: row tiles that share a pass over the columns.
    """
    O, I = w_EOI.shape[1:]
    depth_last = w_EOI.stride(2) == 1
    sides, weight, R = _sides(inputs), _boxes(w_EOI, depth_last), 0
    ranks, factor = sides, weight
    if low_rank is not None:
        u_NR, l_EOR = low_rank
        ranks, factor, R = _sides(u_NR), _boxes(l_EOR, depth_last), u_NR.shape[1]
    bias = b_EO if b_EO is not None else inputs
    columns = cdiv(O, BN)
    _launch(
        (programs(rows.bound * columns, inputs),),
        (sides, ranks, weight, factor, ragged_box(out_NO, (BM // 2, CHUNK)), bias,
         rows.plan.offsets_S, rows.table),
        (rows.bound,), (columns, O, I, R, bias.stride(0), bias.stride(1)),
        constants(group, DEPTH_LAST=depth_last, LOW_RANK=rank_depth(low_rank),
                  BIASED=b_EO is not None),
    )  # fmt: skip


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
    rows, ranks, weight, factor, offsets_ptr, table_ptr, ring, M, columns, steps, low_steps,
    DEPTH_LAST: gl.constexpr, LOW_RANK: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    row_tiles = gl.load(table_ptr)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * columns, gl.num_programs(0)):
        e, start, _end, column_tile = rows_of_tile(
            tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP
        )
        column = column_tile * BN_C
        for i in range(0, steps):
            _step(rows, weight, e, start, column, i * BK_C, ring, step, DEPTH_LAST)
            step += 1
        if LOW_RANK > 0:
            for i in range(0, low_steps):
                _step(ranks, factor, e, start, column, i * BK_C, ring, step, DEPTH_LAST)
                step += 1


@gluon.jit
def _step(rows, weight, e, start, column, k0, ring, step, DEPTH_LAST: gl.constexpr):
    """Load one step. Rows past the expert's end belong to the next expert and are never stored."""
    stage = claim(ring, step, (BM_C + BN_C) * BK_C * 2)
    bar = ring.ready.index(stage)
    if DEPTH_LAST:
        load_box(weight, [e, column, k0], bar, ring.right.index(stage), [1, BN_C, BK_C])
    else:
        load_box(weight, [e, k0, column], bar, ring.right.index(stage), [1, BK_C, BN_C])
    for half in gl.static_range(2):
        at = [start + half * HALF_C, k0]
        tma_load(rows, at, bar, ring.left.index(2 * stage + half))


@gluon.jit
def _consume(
    half, out, b_ptr, offsets_ptr, table_ptr, ring, out_bufs, M, columns, O, steps, low_steps,
    stride_be, stride_bo,
    DEPTH_LAST: gl.constexpr, LOW_RANK: gl.constexpr, BIASED: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    row_tiles = gl.load(table_ptr)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * columns, gl.num_programs(0)):
        e, start, end, column_tile = rows_of_tile(
            tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP
        )
        acc = gl.zeros((HALF_C, BN_C), dtype=gl.float32, layout=ACC)
        acc, step = sum_both(acc, steps, low_steps, step, half, ring, DEPTH_LAST, False, LOW_RANK)
        clip = RAGGED_ROWS_C - (end - start) + half * HALF_C
        for q in gl.static_range(BN_C // CHUNK_C):
            value = quarter(acc, q, PART)
            column = column_tile * BN_C + q * CHUNK_C
            if BIASED:
                o = column + gl.arange(0, CHUNK_C, layout=gl.SliceLayout(0, PART))
                at = b_ptr + e.to(gl.int64) * stride_be + o * stride_bo
                value += gl.load(at, mask=o < O, other=0.0).to(gl.float32)[None, :]
            store_box(
                value.to(out_bufs.dtype), out_bufs.index(half * OUTS_C + q % OUTS_C), out,
                [RAGGED_ROWS_C, end, clip, column], [1, 1, HALF_C, CHUNK_C], RANK4_C, OUTS_C - 1,
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def _hopper_rows_kernel(
    rows, ranks, weight, factor, out, b_ptr, offsets_ptr, table_ptr,
    M, columns, O, I, R, stride_be, stride_bo,
    DEPTH_LAST: gl.constexpr, LOW_RANK: gl.constexpr, BIASED: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Grid: the multiprocessors. Each program loops over tiles of BM rows x BN columns."""
    dtype: gl.constexpr = out.dtype
    RIGHT: gl.constexpr = (BN_C, BK_C) if DEPTH_LAST else (BK_C, BN_C)
    ring = make_ring(dtype, (HALF_C, BK_C), RIGHT, 1)
    out_bufs = gl.allocate_shared_memory(dtype, [2 * OUTS_C, HALF_C, CHUNK_C], RANK2_C)
    steps = (I + BK_C - 1) // BK_C
    low_steps = (R + BK_C - 1) // BK_C
    specialise(
        _consume,
        (out, b_ptr, offsets_ptr, table_ptr, ring, out_bufs, M, columns, O, steps, low_steps,
         stride_be, stride_bo, DEPTH_LAST, LOW_RANK, BIASED, GROUP),
        _produce,
        (rows, ranks, weight, factor, offsets_ptr, table_ptr, ring, M, columns, steps, low_steps,
         DEPTH_LAST, LOW_RANK, GROUP),
        1, [216, 56],
    )  # fmt: skip


_launch = Launcher(_hopper_rows_kernel)
