"""Gather, up projection and gated activation on Hopper, in Gluon: the counterpart of experts/up.py.

One warpgroup is the producer. It gathers rows of x by cp.async, and loads gate and up columns of
W13 by TMA as the two halves of one box. Two warpgroups are consumers: each multiplies 64 rows and
stores h and a in chunks, clipped at the expert's end. Meanwhile the producer works on the next
tile.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from moe_patch.kernels.common.device import approximate, cdiv
from moe_patch.kernels.common.gemm_device import rows_of_tile
from moe_patch.kernels.common.glu import glu_forward, rounded
from moe_patch.kernels.common.launcher import Box, Launcher
from moe_patch.kernels.hopper.common import (
    ACC,
    BK,
    BK_C,
    BM,
    BN,
    BN_C,
    CHUNK,
    CHUNK_C,
    HALF_C,
    OUTS_C,
    PART,
    RAGGED_ROWS,
    RAGGED_ROWS_C,
    RANK2_C,
    RANK4,
    RANK4_C,
    constants,
    make_ring,
    programs,
    quarter,
    ragged_box,
    rank_depth,
    specialise,
    store_box,
    sum_both,
    takes,
)
from moe_patch.kernels.hopper.gather import gather_steps, halves
from moe_patch.kernels.plan.row_tiles import RowTiling
from moe_patch.types import Glu


def supported(
    x_TD: Tensor, rows: RowTiling, w_EHD: Tensor, glu: Glu, low_rank: tuple[Tensor, Tensor] | None
) -> bool:
    """Return whether the kernel supports the operands: gate and up in halves, 16-byte units."""
    return (
        glu.gated
        and not glu.interleaved
        and rows.count < RAGGED_ROWS
        and w_EHD.shape[1] % 16 == 0
        and takes(rows, (x_TD,), w_EHD, low_rank)
    )


def up(
    x_TD: Tensor,
    rows: RowTiling,
    w_EHD: Tensor,
    b_EH: Tensor | None,
    glu: Glu,
    h_NH: Tensor,
    a_NF: Tensor,
    low_rank: tuple[Tensor, Tensor] | None,
    group: int,
) -> None:
    """Write h_NH and a_NF unless they are empty; see :func:`moe_patch.kernels.experts.up.up`.

    Args:
        group: row tiles that share a pass over the columns.
    """
    F, D = w_EHD.shape[1] // 2, w_EHD.shape[2]
    weight = _halves(w_EHD)
    u_NR, factor = (x_TD, weight) if low_rank is None else (low_rank[0], _halves(low_rank[1]))
    bias = b_EH if b_EH is not None else x_TD
    columns = cdiv(F, BN // 2)
    save_h, save_a = h_NH.numel() > 0, a_NF.numel() > 0
    either = a_NF if save_a else h_NH
    gate, second = (h_NH, F) if save_h else (either, 0)
    block = BM // 2, CHUNK
    outputs = (
        ragged_box(gate, block, F), ragged_box(gate, block, F, second), ragged_box(either, block, F)
    )  # fmt: skip
    _launch(
        (programs(rows.bound * columns, x_TD),),
        (x_TD, u_NR, weight, factor, *outputs, bias, rows.plan.row_of_N, rows.plan.offsets_S,
         rows.table),
        (rows.bound,),
        (columns, D // 8, F, u_NR.shape[1] // 8, x_TD.stride(0) // 8, u_NR.stride(0) // 8,
         rows.top_k, bias.stride(0), bias.stride(1)),
        constants(group, glu, approximate(x_TD), LOW_RANK=rank_depth(low_rank),
                  BIASED=b_EH is not None, SAVE_H=save_h, SAVE_A=save_a),
    )  # fmt: skip


def _halves(w_EHI: Tensor) -> Box:
    """Return a Box whose blocks have as many columns of gate as of up."""
    E, H, I = w_EHI.shape
    stride_e, stride_h, stride_i = w_EHI.stride()
    strides = (stride_e, H // 2 * stride_h, stride_h, stride_i)
    return Box(w_EHI, (E, 2, H // 2, I), strides, (1, 2, BN // 2, BK), RANK4)


@gluon.jit
def _produce(
    x_ptr, u_ptr, weight, factor, row_ptr, offsets_ptr, table_ptr, ring, M, columns, steps,
    low_steps, width_8, rank_8, stride_8, stride_u8, K,
    LOW_RANK: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    row_tiles = gl.load(table_ptr)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * columns, gl.num_programs(0)):
        e, start, end, column_tile = rows_of_tile(
            tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP
        )
        f = column_tile * (BN_C // 2)
        low, high = halves(start, end)
        # Pass strides in units of 8, so that the compiler can prove 16-byte alignment.
        step = gather_steps(
            x_ptr, gl.load(row_ptr + low) // K, gl.load(row_ptr + high) // K, stride_8 * 8, start,
            end, width_8 * 8, weight, e, f, ring, steps, step, [1, 2, BN_C // 2, BK_C], RANK4_C,
        )  # fmt: skip
        if LOW_RANK > 0:
            step = gather_steps(
                u_ptr, low, high, stride_u8 * 8, start, end, rank_8 * 8, factor, e, f, ring,
                low_steps, step, [1, 2, BN_C // 2, BK_C], RANK4_C,
            )  # fmt: skip


@gluon.jit
def _with_bias(h, bias_at, f, F, stride_bo, BIASED: gl.constexpr):
    if BIASED:
        o = f + gl.arange(0, CHUNK_C, layout=gl.SliceLayout(0, PART))
        h += gl.load(bias_at + o * stride_bo, mask=o < F, other=0.0).to(gl.float32)[None, :]
    return h


@gluon.jit
def _consume(
    half, h_gate, h_up, a_out, b_ptr, offsets_ptr, table_ptr, ring, out_bufs, M, columns, F, steps,
    low_steps, stride_be, stride_bo, glu,
    FAST: gl.constexpr, BIASED: gl.constexpr, SAVE_H: gl.constexpr, SAVE_A: gl.constexpr,
    LOW_RANK: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = out_bufs.dtype
    SHAPE: gl.constexpr = [1, 1, HALF_C, CHUNK_C]
    WRITES: gl.constexpr = 2 * SAVE_H + SAVE_A
    row_tiles = gl.load(table_ptr)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * columns, gl.num_programs(0)):
        e, start, end, column_tile = rows_of_tile(
            tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP
        )
        acc = gl.zeros((HALF_C, BN_C), dtype=gl.float32, layout=ACC)
        acc, step = sum_both(acc, steps, low_steps, step, half, ring, True, True, LOW_RANK)
        clip = RAGGED_ROWS_C - (end - start) + half * HALF_C
        bias_at = b_ptr + e.to(gl.int64) * stride_be
        for c in gl.static_range(BN_C // 2 // CHUNK_C):
            f = column_tile * (BN_C // 2) + c * CHUNK_C
            at = [RAGGED_ROWS_C, end, clip, f]
            base = half * OUTS_C
            gate = _with_bias(quarter(acc, c, PART), bias_at, f, F, stride_bo, BIASED)
            up = _with_bias(
                quarter(acc, 2 + c, PART), bias_at + F * stride_bo, f, F, stride_bo, BIASED
            )
            gate = rounded(gate, dtype, FAST)
            up = rounded(up, dtype, FAST)
            if SAVE_H:
                store_box(
                    gate.to(dtype), out_bufs.index(base + WRITES * c % OUTS_C), h_gate, at, SHAPE,
                    RANK4_C, OUTS_C - 1,
                )  # fmt: skip
                store_box(
                    up.to(dtype), out_bufs.index(base + (WRITES * c + 1) % OUTS_C), h_up, at, SHAPE,
                    RANK4_C, OUTS_C - 1,
                )  # fmt: skip
            if SAVE_A:
                a = glu_forward(gate, up, *glu, FAST)
                store_box(
                    a.to(dtype), out_bufs.index(base + (WRITES * c + WRITES - 1) % OUTS_C), a_out,
                    at, SHAPE, RANK4_C, OUTS_C - 1,
                )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def _hopper_up_kernel(
    x_ptr, u_ptr, weight, factor, h_gate, h_up, a_out, b_ptr, row_ptr, offsets_ptr, table_ptr,
    M, columns, width_8, F, rank_8, stride_8, stride_u8, K, stride_be, stride_bo,
    KIND: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr, CLAMPED: gl.constexpr, FAST: gl.constexpr,
    LOW_RANK: gl.constexpr, BIASED: gl.constexpr, SAVE_H: gl.constexpr, SAVE_A: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Grid: the multiprocessors. Each program loops over tiles of BM rows x BN columns of h."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    ring = make_ring(dtype, (HALF_C, BK_C), (BN_C, BK_C), 129)
    out_bufs = gl.allocate_shared_memory(dtype, [2 * OUTS_C, HALF_C, CHUNK_C], RANK2_C)
    steps = (width_8 * 8 + BK_C - 1) // BK_C
    low_steps = (rank_8 * 8 + BK_C - 1) // BK_C
    specialise(
        _consume,
        (h_gate, h_up, a_out, b_ptr, offsets_ptr, table_ptr, ring, out_bufs, M, columns, F, steps,
         low_steps, stride_be, stride_bo, (KIND, GATED, ALPHA, LIMIT, CLAMPED), FAST, BIASED,
         SAVE_H, SAVE_A, LOW_RANK, GROUP),
        _produce,
        (x_ptr, u_ptr, weight, factor, row_ptr, offsets_ptr, table_ptr, ring, M, columns, steps,
         low_steps, width_8, rank_8, stride_8, stride_u8, K, LOW_RANK, GROUP),
        4, [216, 56],
    )  # fmt: skip


_launch = Launcher(_hopper_up_kernel)
