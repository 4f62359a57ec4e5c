"""The up projection: h_n = W13_e x_t (+ b13_e) (+ B13_e u_n), a_n = act(h_n), in one kernel.

The prologue gathers x. The epilogue evaluates the activation from the rounded h, so that backward
recomputes a bit for bit.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_patch.kernels.common.device import approximate, cdiv, device_of
from moe_patch.kernels.common.gemm_device import (
    multiply,
    multiply_low_rank,
    pair_columns,
    rows_of_tile,
    split_pair,
    weight_operand,
)
from moe_patch.kernels.common.glu import glu_constants, glu_forward
from moe_patch.kernels.common.launcher import Constants, Launcher
from moe_patch.kernels.common.tiles import Tile
from moe_patch.kernels.common.versions import hopper_module, known_triton, whole_rank
from moe_patch.kernels.plan.row_tiles import RowTiling, depth_block, programs
from moe_patch.types import Glu


def up(
    x_TD: Tensor,
    rows: RowTiling,
    w_EHD: Tensor,
    b_EH: Tensor | None,
    glu: Glu,
    tile: Tile,
    *,
    low_rank: tuple[Tensor, Tensor] | None = None,
    save_h: bool = True,
    save_a: bool = True,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute h and a of every row, in plan order.

    Args:
        x_TD: hidden states, last axis contiguous.
        rows: the plan and its tile table for ``tile.m``.
        w_EHD, b_EH: up projection, any strides.
        glu: the activation.
        tile: tile sizes; n counts gate and up columns together.
        low_rank: (u_NR, B_EHR): adds B_e u_n to h.
        save_h, save_a: outputs to write; an output that is not written is empty.
        into: result of an earlier call over other experts of the plan, to be filled in further.
    """
    N, D = rows.count, x_TD.shape[1]
    H = w_EHD.shape[1]
    F = H // 2 if glu.gated else H
    if into is None:
        into = x_TD.new_empty((N, H) if save_h else 0), x_TD.new_empty((N, F) if save_a else 0)
    h_NH, a_NF = into
    if tile.hopper and known_triton():
        hopper = hopper_module("up")
        low_rank = whole_rank(low_rank)
        if hopper.supported(x_TD, rows, w_EHD, glu, low_rank):
            hopper.up(x_TD, rows, w_EHD, b_EH, glu, h_NH, a_NF, low_rank, tile.group)
            return h_NH, a_NF
    halves = 2 if glu.gated and not glu.interleaved else 1
    weight, mode = weight_operand(w_EHD, tile, halves)
    u_NR, lb_EHR = low_rank if low_rank is not None else (x_TD, w_EHD)
    R = u_NR.shape[1] if low_rank is not None else 0
    bias = b_EH if b_EH is not None else x_TD
    columns = cdiv(H // halves, tile.n // halves)
    _launch(
        (programs(rows.bound * columns, tile, device_of(x_TD)),),
        (x_TD, weight, bias, u_NR, lb_EHR, h_NH, a_NF, rows.plan.row_of_N, rows.plan.offsets_S,
         rows.table),
        (rows.bound,),
        (columns, D, F, R, rows.top_k, x_TD.stride(0), *w_EHD.stride(), bias.stride(0),
         bias.stride(1), *lb_EHR.stride()),
        _constants(glu, tile, x_TD.dtype, approximate(x_TD), D % tile.k == 0, R,
                   b_EH is not None, save_h, save_a, mode),
    )  # fmt: skip
    return h_NH, a_NF


@functools.cache
def _constants(
    glu: Glu, tile: Tile, dtype: torch.dtype, fast: bool, even: bool, rank: int, biased: bool,
    save_h: bool, save_a: bool, mode: int,
) -> Constants:  # fmt: skip
    return Constants(
        **glu_constants(glu, fast=fast), BIASED=biased, LOW_RANK=rank > 0, SAVE_H=save_h,
        SAVE_A=save_a, MODE=mode, BM=tile.m, BN=tile.n, BK=tile.k, BR=depth_block(rank),
        EVEN_K=even, IN_RUNS=dtype == torch.float32, GROUP=tile.group, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _up_kernel(
    x_ptr, w, b_ptr, u_ptr, lb_ptr, h_ptr, a_ptr, row_ptr, offsets_ptr, table_ptr,
    M, columns, D, F, R, K, stride_x, stride_we, stride_wo, stride_wi,
    stride_be, stride_bo, stride_le, stride_lo, stride_li,
    KIND: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, CLAMPED: tl.constexpr, FAST: tl.constexpr,
    BIASED: tl.constexpr, LOW_RANK: tl.constexpr, SAVE_H: tl.constexpr, SAVE_A: tl.constexpr,
    MODE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    EVEN_K: tl.constexpr, IN_RUNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid: row tiles x column tiles, or persistent. One tile: BM rows of h by BN columns."""
    BF: tl.constexpr = BN // 2 if GATED else BN
    SPLIT: tl.constexpr = GATED and not INTERLEAVED
    H = 2 * F if GATED else F
    row_tiles = tl.load(table_ptr)
    for tile in range(tl.program_id(0), row_tiles * columns, tl.num_programs(0)):
        e, start, end, column_tile = rows_of_tile(
            tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP
        )
        n = start + tl.arange(0, BM)
        # Rows past the expert's end repeat its last row and are never stored. This saves a mask in
        # the loop.
        token = tl.load(row_ptr + tl.minimum(n, end - 1)) // K
        x_row = x_ptr + token.to(tl.int64)[:, None] * stride_x
        column, exists = pair_columns(column_tile, F, BN, GATED, INTERLEAVED)
        acc = multiply(
            x_ptr, x_row, start, w, e, column_tile * (BF if SPLIT else BN), column, exists, D,
            stride_we, stride_wo, stride_wi, False, MODE, EVEN_K, IN_RUNS, BM, BN, BK,
        )  # fmt: skip
        n64 = n.to(tl.int64)[:, None]
        if LOW_RANK:
            acc = multiply_low_rank(
                acc, u_ptr, n, end, lb_ptr, e, column, exists, R, stride_le, stride_lo, stride_li,
                BR,
            )  # fmt: skip
        if BIASED:
            here = b_ptr + e.to(tl.int64) * stride_be + column * stride_bo
            acc += tl.load(here, mask=exists, other=0.0).to(tl.float32)[None, :]
        h = acc.to(x_ptr.dtype.element_ty)
        if SAVE_H:
            stored = (n < end)[:, None] & exists[None, :]
            tl.store(h_ptr + n64 * H + column[None, :], h, mask=stored)
        if SAVE_A:
            f = column_tile * BF + tl.arange(0, BF)
            if GATED:
                gate, up = split_pair(h.to(tl.float32), BM, BF, INTERLEAVED)
            else:
                gate, up = h.to(tl.float32), h.to(tl.float32)
            a = glu_forward(gate, up, KIND, GATED, ALPHA, LIMIT, CLAMPED, FAST)
            stored = (n < end)[:, None] & (f < F)[None, :]
            tl.store(a_ptr + n64 * F + f[None, :], a.to(a_ptr.dtype.element_ty), mask=stored)


_launch = Launcher(_up_kernel)
