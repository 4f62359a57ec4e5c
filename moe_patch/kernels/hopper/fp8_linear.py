"""FP8 product of rows in plan order on Hopper, in Gluon: the counterpart of hopper/linear.py.

The producer is one warp: it loads both sides by TMA.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from moe_patch.kernels.common.device import cdiv
from moe_patch.kernels.common.e4m3_scale import GROUP
from moe_patch.kernels.common.gemm_device import rows_of_tile
from moe_patch.kernels.common.launcher import Launcher
from moe_patch.kernels.hopper.common import (
    BK_C,
    BM,
    BN,
    BN_C,
    CHUNK,
    CHUNK_C,
    HALF_C,
    OUTS_C,
    RAGGED_ROWS_C,
    RANK2_C,
    RANK4_C,
    claim,
    constants,
    programs,
    ragged_box,
    rank_depth,
    specialise,
    store_box,
    whole_box,
)
from moe_patch.kernels.hopper.fp8 import (
    BK8,
    BK8_C,
    HALF_ACC,
    RANK2_8,
    RANK3_8,
    RANK3_8C,
    STAGE_BYTES_C,
    chunk_of,
    factor_box,
    load_low_rank,
    low_rank_boxes,
    make_ring8,
    sum_low_rank,
    sum_scaled,
)
from moe_patch.kernels.hopper.gluon_names import seen_as, tma_load
from moe_patch.kernels.plan.row_tiles import RowTiling


def grouped_linear(
    inputs_NI: tuple[Tensor, Tensor],
    rows: RowTiling,
    w_EOI: tuple[Tensor, Tensor],
    out_NO: Tensor,
    low_rank: tuple[Tensor, Tensor] | None,
    group: int,
) -> None:
    """Write out_n = W_e in_n (+ L_e u_n) in 16 bits.

    Args:
        inputs_NI: values and scales in plan order.
        rows: the plan and its tile table for :data:`BM`.
        w_EOI: values, contiguous, and scales, one per 128 x 128 block.
        out_NO: output.
        low_rank: (u_NR, L_EOR) in 16 bits. L's rank or its output axis is contiguous.
        group: row tiles that share a pass over the columns.
    """
    (values_NI, scales_NI), (w, scales_w) = inputs_NI, w_EOI
    O, I = w.shape[1:]
    weight, factor, R, depth_last = whole_box(w, (1, BN, BK8), RANK3_8), None, 0, True
    if low_rank is not None:
        R, depth_last = low_rank[0].shape[1], low_rank[1].stride(2) == 1
        factor = factor_box(low_rank[1], depth_last)
    u, factor = low_rank_boxes(low_rank, weight, factor)
    columns = cdiv(O, BN)
    _launch(
        (programs(rows.bound * columns, values_NI),),
        (whole_box(values_NI, (BM // 2, BK8), RANK2_8), u, weight, factor,
         ragged_box(out_NO, (BM // 2, CHUNK)), scales_NI, scales_w, rows.plan.offsets_S,
         rows.table),
        (rows.bound,), (columns, O // GROUP, I // GROUP, R),
        constants(group, DEPTH_LAST=depth_last, LOW_RANK=rank_depth(low_rank)),
    )  # fmt: skip


@gluon.jit
def _produce(
    rows, u, weight, factor, offsets_ptr, table_ptr, ring, M, columns, steps, low_steps,
    DEPTH_LAST: gl.constexpr, LOW_RANK: gl.constexpr, GROUP: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    row_tiles = gl.load(table_ptr)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * columns, gl.num_programs(0)):
        e, start, _end, column_tile = rows_of_tile(
            tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP
        )
        column = column_tile * BN_C
        for i in range(0, steps):
            stage = claim(ring, step, STAGE_BYTES_C)
            bar = ring.ready.index(stage)
            right = seen_as(ring.right.index(stage), [1, BN_C, BK8_C], RANK3_8C)
            tma_load(weight, [e, column, i * BK8_C], bar, right)
            for half in gl.static_range(2):
                # Rows past the expert's end belong to the next expert and are never stored.
                at = [start + half * HALF_C, i * BK8_C]
                tma_load(rows, at, bar, ring.left.index(2 * stage + half))
            step += 1
        if LOW_RANK > 0:
            step = load_low_rank(
                u, factor, e, start, column, low_steps, ring, step, dtype, DEPTH_LAST, False
            )  # fmt: skip


@gluon.jit
def _consume(
    half, out, rs_ptr, ws_ptr, offsets_ptr, table_ptr, ring, out_bufs, M, columns, blocks, steps,
    low_steps, DEPTH_LAST: gl.constexpr, LOW_RANK: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = out_bufs.dtype
    row_tiles = gl.load(table_ptr)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * columns, gl.num_programs(0)):
        e, start, end, column_tile = rows_of_tile(
            tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP
        )
        n = start + half * HALF_C + gl.arange(0, HALF_C, layout=gl.SliceLayout(1, HALF_ACC))
        rows_at = rs_ptr + gl.minimum(n, end - 1).to(gl.int64) * steps
        # The last tile of an odd number of blocks has columns that do not exist.
        block = e.to(gl.int64) * blocks + column_tile * 2
        other = gl.minimum(column_tile * 2 + 1, blocks - 1) - column_tile * 2
        first = gl.zeros((HALF_C, BK8_C), dtype=gl.float32, layout=HALF_ACC)
        second = gl.zeros((HALF_C, BK8_C), dtype=gl.float32, layout=HALF_ACC)
        first, second, step = sum_scaled(
            first, second, steps, step, half, ring, rows_at, ws_ptr + block * steps,
            ws_ptr + (block + other) * steps, False,
        )  # fmt: skip
        if LOW_RANK > 0:
            first, second, step = sum_low_rank(
                first, second, low_steps, step, half, ring, dtype, LOW_RANK, DEPTH_LAST
            )  # fmt: skip
        clip = RAGGED_ROWS_C - (end - start) + half * HALF_C
        for q in gl.static_range(4):
            value = chunk_of(first if q < 2 else second, q % 2)
            at = [RAGGED_ROWS_C, end, clip, column_tile * BN_C + q * CHUNK_C]
            store_box(
                value.to(dtype), out_bufs.index(half * OUTS_C + q % OUTS_C), out, at,
                [1, 1, HALF_C, CHUNK_C], RANK4_C, OUTS_C - 1,
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "columns", "blocks", "steps"])
def _hopper_fp8_rows_kernel(
    rows, u, weight, factor, out, rs_ptr, ws_ptr, offsets_ptr, table_ptr,
    M, columns, blocks, steps, R,
    DEPTH_LAST: gl.constexpr, LOW_RANK: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Grid: the multiprocessors. Each program loops over tiles of BM rows x BN columns."""
    dtype: gl.constexpr = out.dtype
    ring = make_ring8(rows.dtype, 1)
    out_bufs = gl.allocate_shared_memory(dtype, [2 * OUTS_C, HALF_C, CHUNK_C], RANK2_C)
    low_steps = (R + BK_C - 1) // BK_C
    specialise(
        _consume,
        (out, rs_ptr, ws_ptr, offsets_ptr, table_ptr, ring, out_bufs, M, columns, blocks, steps,
         low_steps, DEPTH_LAST, LOW_RANK, GROUP),
        _produce,
        (rows, u, weight, factor, offsets_ptr, table_ptr, ring, M, columns, steps, low_steps,
         DEPTH_LAST, LOW_RANK, GROUP, dtype),
        1, [216, 72],
    )  # fmt: skip


_launch = Launcher(_hopper_fp8_rows_kernel)
