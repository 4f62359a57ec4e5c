"""Gather, FP8 up projection and gated activation on Hopper, in Gluon; see kernels/hopper/up.py.

A tile has 128 columns of gate and 128 of up, so each has one weight scale per step. The tile's
columns of a are one group of the down projection's input. The epilogue quantises them.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from moe_patch.kernels.common.device import approximate
from moe_patch.kernels.common.e4m3_scale import GROUP
from moe_patch.kernels.common.gemm_device import rows_of_tile
from moe_patch.kernels.common.glu import glu_forward, rounded
from moe_patch.kernels.common.launcher import Box, Launcher
from moe_patch.kernels.hopper.common import (
    BK,
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
    RANK4,
    RANK4_C,
    claim,
    constants,
    programs,
    ragged_box,
    rank_depth,
    specialise,
    store_box,
)
from moe_patch.kernels.hopper.fp8 import (
    BK8,
    BK8_C,
    HALF_ACC,
    RANK4_8,
    RANK4_8C,
    STAGE_BYTES_C,
    chunk_of,
    low_rank_boxes,
    make_ring8,
    store_values,
    sum_low_rank,
    sum_scaled,
    value_box,
)
from moe_patch.kernels.hopper.fp8_gather import gather_tile8
from moe_patch.kernels.hopper.gluon_names import cast_as, tma_load
from moe_patch.kernels.plan.row_tiles import RowTiling
from moe_patch.types import Glu


def up(
    x_TD: tuple[Tensor, Tensor],
    rows: RowTiling,
    w_EHD: tuple[Tensor, Tensor],
    glu: Glu,
    h_NH: Tensor,
    a_NF: Tensor,
    quantised_NF: tuple[Tensor, Tensor],
    low_rank: tuple[Tensor, Tensor] | None,
    group: int,
) -> None:
    """Write h and a in 16 bits unless they are empty, and a in e4m3 with its scales.

    Args:
        x_TD: values and scales from :func:`moe_patch.kernels.packed.rows.quantise_rows`.
        rows: the plan and its tile table for :data:`BM`.
        w_EHD: values and scales, one per 128 x 128 block.
        glu: a gated activation with gate and up in halves.
        h_NH, a_NF, quantised_NF: outputs.
        low_rank: (u_NR, B_EHR) in 16 bits; the rank is a multiple of 8, contiguous in both.
        group: row tiles that share a pass over the columns.
    """
    (values_TD, scales_TD), (w, scales_w) = x_TD, w_EHD
    F, D = w.shape[1] // 2, w.shape[2]
    weight, R = _halves(w, BK8, RANK4_8), 0
    u, factor = low_rank_boxes(low_rank, weight, low_rank and _halves(low_rank[1], BK, RANK4))
    if low_rank is not None:
        R = low_rank[0].shape[1]
    values_NF, scales_NF = quantised_NF
    save_h, save_a = h_NH.numel() > 0, a_NF.numel() > 0
    block, columns = (BM // 2, CHUNK), F // GROUP
    if save_h:
        outputs = ragged_box(h_NH, block, F), ragged_box(h_NH, block, F, F)
    else:
        outputs = (value_box(values_NF),) * 2
    outputs += (ragged_box(a_NF, block, F) if save_a else value_box(values_NF),)
    _launch(
        (programs(rows.bound * columns, values_TD),),
        (values_TD, u, weight, factor, *outputs, value_box(values_NF), scales_TD, scales_w,
         scales_NF, rows.plan.row_of_N, rows.plan.offsets_S, rows.table),
        (rows.bound,),
        (columns, D // GROUP, R, rows.top_k),
        constants(group, glu, approximate(h_NH), LOW_RANK=rank_depth(low_rank), SAVE_H=save_h,
                  SAVE_A=save_a, BITS16=_name(h_NH)),
    )  # fmt: skip


def _name(like: Tensor) -> str:
    return str(like.dtype).removeprefix("torch.")


def _halves(w_EHI: Tensor, depth: int, layout: object) -> Box:
    """Return a Box whose blocks have as many columns of gate as of up."""
    E, H, I = w_EHI.shape
    stride_e, stride_h, stride_i = w_EHI.stride()
    strides = (stride_e, H // 2 * stride_h, stride_h, stride_i)
    return Box(w_EHI, (E, 2, H // 2, I), strides, (1, 2, BN // 2, depth), layout)


@gluon.jit
def _produce(
    x_ptr, u, weight, factor, row_ptr, offsets_ptr, table_ptr, ring, M, columns, steps, low_steps,
    K, LOW_RANK: gl.constexpr, GROUP: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    row_tiles = gl.load(table_ptr)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * columns, gl.num_programs(0)):
        e, start, end, column_tile = rows_of_tile(
            tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP
        )
        column = column_tile * BK8_C
        step = gather_tile8(
            x_ptr, row_ptr, K, start, end, steps * BK8_C, weight, e, column, ring, steps, step,
            [1, 2, BN_C // 2, BK8_C], RANK4_8C,
        )  # fmt: skip
        if LOW_RANK > 0:
            for i in range(0, low_steps):
                stage = claim(ring, step, STAGE_BYTES_C)
                bar = ring.ready.index(stage)
                k0 = i * BK_C
                right = cast_as(
                    ring.right.index(stage), dtype, [1, 2, BN_C // 2, BK_C], RANK4_C
                )  # fmt: skip
                tma_load(factor, [e, 0, column, k0], bar, right)
                for half in gl.static_range(2):
                    left = cast_as(
                        ring.left.index(2 * stage + half), dtype, [HALF_C, BK_C], RANK2_C
                    )  # fmt: skip
                    tma_load(u, [start + half * HALF_C, k0], bar, left)
                # Arrive for the 128 threads, which gather only in the other stages.
                mbarrier.arrive(bar, count=128)
                step += 1


@gluon.jit
def _consume(
    half, h_gate, h_up, a_out, a_values, xs_ptr, ws_ptr, as_ptr, row_ptr, offsets_ptr, table_ptr,
    ring, out_bufs, M, columns, steps, low_steps, K, glu,
    FAST: gl.constexpr, SAVE_H: gl.constexpr, SAVE_A: gl.constexpr, LOW_RANK: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = out_bufs.dtype
    SHAPE: gl.constexpr = [1, 1, HALF_C, CHUNK_C]
    row_tiles = gl.load(table_ptr)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * columns, gl.num_programs(0)):
        e, start, end, column_tile = rows_of_tile(
            tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP
        )
        n = start + half * HALF_C + gl.arange(0, HALF_C, layout=gl.SliceLayout(1, HALF_ACC))
        token = gl.load(row_ptr + gl.minimum(n, end - 1)) // K
        block = ws_ptr + (e.to(gl.int64) * 2 * columns + column_tile) * steps
        gate = gl.zeros((HALF_C, BK8_C), dtype=gl.float32, layout=HALF_ACC)
        up = gl.zeros((HALF_C, BK8_C), dtype=gl.float32, layout=HALF_ACC)
        gate, up, step = sum_scaled(
            gate, up, steps, step, half, ring, xs_ptr + token.to(gl.int64) * steps, block,
            block + columns * steps, True,
        )  # fmt: skip
        if LOW_RANK > 0:
            gate, up, step = sum_low_rank(
                gate, up, low_steps, step, half, ring, dtype, LOW_RANK, True
            )  # fmt: skip
        clip = RAGGED_ROWS_C - (end - start) + half * HALF_C
        base = half * OUTS_C
        column = column_tile * BK8_C
        tma.store_wait(0)
        gate = rounded(gate, dtype, FAST)
        up = rounded(up, dtype, FAST)
        if SAVE_H:
            for c in gl.static_range(2):
                at = [RAGGED_ROWS_C, end, clip, column + c * CHUNK_C]
                store_box(
                    chunk_of(gate, c).to(dtype), out_bufs.index(base), h_gate, at, SHAPE, RANK4_C,
                    OUTS_C - 1,
                )  # fmt: skip
                store_box(
                    chunk_of(up, c).to(dtype), out_bufs.index(base + 1), h_up, at, SHAPE, RANK4_C,
                    OUTS_C - 1,
                )  # fmt: skip
        a = rounded(glu_forward(gate, up, *glu, FAST), dtype, FAST)
        if SAVE_A:
            for c in gl.static_range(2):
                at = [RAGGED_ROWS_C, end, clip, column + c * CHUNK_C]
                store_box(
                    chunk_of(a, c).to(dtype), out_bufs.index(base + c), a_out, at, SHAPE, RANK4_C,
                    OUTS_C - 1,
                )  # fmt: skip
        store_values(
            a, as_ptr + n.to(gl.int64) * columns + column_tile, n < end, out_bufs.index(base),
            a_values, [RAGGED_ROWS_C, end, clip, column], OUTS_C - 1,
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "columns", "steps", "K"])
def _hopper_fp8_up_kernel(
    x_ptr, u, weight, factor, h_gate, h_up, a_out, a_values, xs_ptr, ws_ptr, as_ptr, row_ptr,
    offsets_ptr, table_ptr, M, columns, steps, R, K,
    KIND: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr, CLAMPED: gl.constexpr, FAST: gl.constexpr,
    LOW_RANK: gl.constexpr, SAVE_H: gl.constexpr, SAVE_A: gl.constexpr, BITS16: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Grid: the multiprocessors. Each program loops over tiles of BM rows x BN columns of h."""
    dtype: gl.constexpr = gl.bfloat16 if BITS16 == "bfloat16" else gl.float16
    ring = make_ring8(x_ptr.dtype.element_ty, 129)
    out_bufs = gl.allocate_shared_memory(dtype, [2 * OUTS_C, HALF_C, CHUNK_C], RANK2_C)
    low_steps = (R + BK_C - 1) // BK_C
    specialise(
        _consume,
        (h_gate, h_up, a_out, a_values, xs_ptr, ws_ptr, as_ptr, row_ptr, offsets_ptr, table_ptr,
         ring, out_bufs, M, columns, steps, low_steps, K, (KIND, GATED, ALPHA, LIMIT, CLAMPED),
         FAST, SAVE_H, SAVE_A, LOW_RANK, GROUP),
        _produce,
        (x_ptr, u, weight, factor, row_ptr, offsets_ptr, table_ptr, ring, M, columns, steps,
         low_steps, K, LOW_RANK, GROUP, dtype),
        4, [224, 56],
    )  # fmt: skip


_launch = Launcher(_hopper_fp8_up_kernel)
