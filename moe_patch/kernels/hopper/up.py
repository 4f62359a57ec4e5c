"""The up projection of up.py on Hopper, in Gluon: gather, product and gated activation in one.

One warpgroup produces: it gathers rows of x by cp.async and brings gate and up columns of W13 as
the two halves of one box by TMA. Two warpgroups multiply 64 rows each and write h and a in chunks,
clipped at the expert's end, while the producer is in the next tile.
"""

from __future__ import annotations

import functools

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from moe_patch.kernels.common.device import approximate, cdiv
from moe_patch.kernels.common.glu import glu_constants, glu_forward, rounded
from moe_patch.kernels.common.launcher import Box, Constants, Launcher
from moe_patch.kernels.common.tiling import rows_of_tile
from moe_patch.kernels.common.versions import available
from moe_patch.kernels.hopper.common import (
    BK,
    BM,
    BN,
    CHUNK,
    OUTS,
    RAGGED_ROWS,
    RAGGED_ROWS_C,
    RANK4,
    RANK4_C,
    constants,
    copies_boxes,
    copies_rows,
    programs,
    quarter,
    ragged_box,
    rank_depth,
    ring,
    store_box,
    sum_both,
    with_factors,
)
from moe_patch.kernels.hopper.gather import gather_steps, halves
from moe_patch.kernels.plan.row_tiles import Rows
from moe_patch.types import Glu


def supported(
    x_TD: Tensor, rows: Rows, w_EHD: Tensor, glu: Glu, low_rank: tuple[Tensor, Tensor] | None
) -> bool:
    """Whether this kernel takes the operands: gate and up side by side, whole 16 bytes."""
    sides, weights = with_factors([x_TD], w_EHD, low_rank)
    return (
        rows.block_m == BM
        and rows.count < RAGGED_ROWS
        and available(x_TD)
        and glu.gated
        and not glu.interleaved
        and w_EHD.shape[1] % 16 == 0
        and copies_rows(*sides)
        and copies_boxes(*weights, axis=2)
    )


def specialised_up(
    x_TD: Tensor,
    rows: Rows,
    w_EHD: Tensor,
    b_EH: Tensor | None,
    glu: Glu,
    h_NH: Tensor,
    a_NF: Tensor,
    low_rank: tuple[Tensor, Tensor] | None,
    group: int,
) -> None:
    """Writes h_NH and a_NF, where they are not empty; see :func:`moe_patch.kernels.experts.up.up`.

    Args:
        group: row tiles that share a pass over the columns.
    """
    F, D = w_EHD.shape[1] // 2, w_EHD.shape[2]
    weight = _halves(w_EHD)
    u_NR, factor = x_TD, weight
    if low_rank is not None:
        u_NR, factor = low_rank[0], _halves(low_rank[1])
    bias = b_EH if b_EH is not None else x_TD
    columns = cdiv(F, BN // 2)
    save_h, save_a = h_NH.numel() > 0, a_NF.numel() > 0
    either = a_NF if save_a else h_NH
    sides = (h_NH, h_NH[:, F:]) if save_h else (either, either)
    outputs = [ragged_box(side, (BM // 2, CHUNK), F) for side in (*sides, either)]
    _launch(
        (programs(rows.bound * columns, x_TD),),
        (x_TD, u_NR, weight, factor, *outputs, bias, rows.plan.row_of_N, rows.plan.offsets_S,
         rows.table),
        (rows.bound,),
        (columns, D // 8, F, u_NR.shape[1] // 8, x_TD.stride(0) // 8, u_NR.stride(0) // 8,
         rows.top_k, bias.stride(0), bias.stride(1)),
        _constants(glu, approximate(x_TD), rank_depth(low_rank), b_EH is not None, save_h, save_a,
                   group),
    )  # fmt: skip


@functools.cache
def _constants(
    glu: Glu, fast: bool, low_rank: int, biased: bool, save_h: bool, save_a: bool, group: int
) -> Constants:
    return constants(
        group, **glu_constants(glu, fast=fast), LOW_RANK=low_rank, BIASED=biased, SAVE_H=save_h,
        SAVE_A=save_a, OUTS=OUTS,
    )  # fmt: skip


def _halves(w_EHI: Tensor) -> Box:
    """Boxes with as many columns of gate as of up."""
    E, H, I = w_EHI.shape
    stride_e, stride_h, stride_i = w_EHI.stride()
    strides = (stride_e, H // 2 * stride_h, stride_h, stride_i)
    return Box(w_EHI, (E, 2, H // 2, I), strides, (1, 2, BN // 2, BK), RANK4)


@gluon.jit
def _produce(
    x_ptr, u_ptr, weight, factor, row_ptr, offsets_ptr, table_ptr, left_bufs, right_bufs, ready,
    empty, M, columns, steps, low_steps, width_8, rank_8, stride_8, stride_u8, K,
    LOW_RANK: gl.constexpr, GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    row_tiles = gl.load(table_ptr)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * columns, gl.num_programs(0)):
        e, start, end, column_tile = rows_of_tile(
            tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP
        )
        f = column_tile * (BN // 2)
        low, high = halves(start, end, BM // 2)
        # Strides in units of 8, so that the compiler knows that copies of 16 bytes are aligned.
        step = gather_steps(
            x_ptr, gl.load(row_ptr + low) // K, gl.load(row_ptr + high) // K, stride_8 * 8, start,
            end, width_8 * 8, weight, e, f, left_bufs, right_bufs, ready, empty, steps, step,
            [1, 2, BN // 2, BK], RANK4_C, BK, STAGES,
        )  # fmt: skip
        if LOW_RANK > 0:
            step = gather_steps(
                u_ptr, low, high, stride_u8 * 8, start, end, rank_8 * 8, factor, e, f, left_bufs,
                right_bufs, ready, empty, low_steps, step, [1, 2, BN // 2, BK], RANK4_C, BK, STAGES,
            )  # fmt: skip


@gluon.jit
def _with_bias(
    h, bias_at, f, F, stride_bo, CHUNK: gl.constexpr, BIASED: gl.constexpr, part: gl.constexpr
):  # fmt: skip
    if BIASED:
        o = f + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, part))
        h += gl.load(bias_at + o * stride_bo, mask=o < F, other=0.0).to(gl.float32)[None, :]
    return h


@gluon.jit
def _consume(
    half, h_gate, h_up, a_out, b_ptr, offsets_ptr, table_ptr, left_bufs, right_bufs, out_bufs,
    ready, empty, M, columns, F, steps, low_steps, stride_be, stride_bo,
    KIND: gl.constexpr, GATED: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    CLAMPED: gl.constexpr, FAST: gl.constexpr, BIASED: gl.constexpr, SAVE_H: gl.constexpr,
    SAVE_A: gl.constexpr, LOW_RANK: gl.constexpr, GROUP: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, OUTS: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BM // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    part: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    dtype: gl.constexpr = out_bufs.dtype
    SHAPE: gl.constexpr = [1, 1, HALF, CHUNK]
    WRITES: gl.constexpr = 2 * SAVE_H + SAVE_A
    row_tiles = gl.load(table_ptr)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * columns, gl.num_programs(0)):
        e, start, end, column_tile = rows_of_tile(
            tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP
        )
        acc = gl.zeros((HALF, BN), dtype=gl.float32, layout=layout)
        acc, step = sum_both(
            acc, steps, low_steps, step, half, left_bufs, right_bufs, ready, empty, True, True,
            STAGES, LOW_RANK,
        )  # fmt: skip
        clip = RAGGED_ROWS_C - (end - start) + half * HALF
        bias_at = b_ptr + e.to(gl.int64) * stride_be
        for c in gl.static_range(BN // 2 // CHUNK):
            f = column_tile * (BN // 2) + c * CHUNK
            at = [RAGGED_ROWS_C, end, clip, f]
            slot = half * OUTS
            gate = _with_bias(quarter(acc, c, part), bias_at, f, F, stride_bo, CHUNK, BIASED, part)
            up = _with_bias(
                quarter(acc, 2 + c, part), bias_at + F * stride_bo, f, F, stride_bo, CHUNK, BIASED,
                part,
            )  # fmt: skip
            gate = rounded(gate, dtype, FAST)
            up = rounded(up, dtype, FAST)
            if SAVE_H:
                store_box(
                    gate.to(dtype), out_bufs.index(slot + WRITES * c % OUTS), h_gate, at, SHAPE,
                    RANK4_C, OUTS - 1,
                )  # fmt: skip
                store_box(
                    up.to(dtype), out_bufs.index(slot + (WRITES * c + 1) % OUTS), h_up, at, SHAPE,
                    RANK4_C, OUTS - 1,
                )  # fmt: skip
            if SAVE_A:
                a = glu_forward(gate, up, KIND, GATED, ALPHA, LIMIT, CLAMPED, FAST)
                store_box(
                    a.to(dtype), out_bufs.index(slot + (WRITES * c + WRITES - 1) % OUTS), a_out,
                    at, SHAPE, RANK4_C, OUTS - 1,
                )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def _specialised_up_kernel(
    x_ptr, u_ptr, weight, factor, h_gate, h_up, a_out, b_ptr, row_ptr, offsets_ptr, table_ptr,
    M, columns, width_8, F, rank_8, stride_8, stride_u8, K, stride_be, stride_bo,
    KIND: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr, CLAMPED: gl.constexpr, FAST: gl.constexpr,
    LOW_RANK: gl.constexpr, BIASED: gl.constexpr, SAVE_H: gl.constexpr, SAVE_A: gl.constexpr,
    GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    CHUNK: gl.constexpr, STAGES: gl.constexpr, OUTS: gl.constexpr,
):  # fmt: skip
    """Grid: the multiprocessors. Each program takes tiles of BM rows x BN columns of h in turn."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    left_bufs, right_bufs, ready, empty = ring(dtype, (BM // 2, BK), (BN, BK), 129, STAGES)
    out_bufs = gl.allocate_shared_memory(
        dtype, [2 * OUTS, BM // 2, CHUNK], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    steps = (width_8 * 8 + BK - 1) // BK
    low_steps = (rank_8 * 8 + BK - 1) // BK
    gl.warp_specialize(
        [
            (_consume, (0, h_gate, h_up, a_out, b_ptr, offsets_ptr, table_ptr, left_bufs,
                        right_bufs, out_bufs, ready, empty, M, columns, F, steps, low_steps,
                        stride_be, stride_bo, KIND, GATED, ALPHA, LIMIT, CLAMPED, FAST, BIASED,
                        SAVE_H, SAVE_A, LOW_RANK, GROUP, BM, BN, CHUNK, STAGES, OUTS)),
            (_consume, (1, h_gate, h_up, a_out, b_ptr, offsets_ptr, table_ptr, left_bufs,
                        right_bufs, out_bufs, ready, empty, M, columns, F, steps, low_steps,
                        stride_be, stride_bo, KIND, GATED, ALPHA, LIMIT, CLAMPED, FAST, BIASED,
                        SAVE_H, SAVE_A, LOW_RANK, GROUP, BM, BN, CHUNK, STAGES, OUTS)),
            (_produce, (x_ptr, u_ptr, weight, factor, row_ptr, offsets_ptr, table_ptr, left_bufs,
                        right_bufs, ready, empty, M, columns, steps, low_steps, width_8, rank_8,
                        stride_8, stride_u8, K, LOW_RANK, GROUP, BM, BN, BK, STAGES)),
        ],
        [4, 4],
        [216, 56],
    )  # fmt: skip


_launch = Launcher(_specialised_up_kernel)
