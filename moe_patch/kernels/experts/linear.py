"""Grouped product of rows with their expert's matrix: out_n = alpha W_e in_n (+ b_e) (+ L_e u_n).

One kernel computes the down projection, the gradient of x and the thin products of LoRA. They
differ only in whether rows are gathered from tokens, and in the strides of the weight.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_patch.kernels.common.device import cdiv, device_of
from moe_patch.kernels.common.gemm_device import (
    multiply,
    multiply_low_rank,
    row_operand,
    rows_of_tile,
    weight_operand,
)
from moe_patch.kernels.common.launcher import Constants, Launcher
from moe_patch.kernels.common.tiles import Tile
from moe_patch.kernels.common.versions import hopper_module, known_triton, whole_rank
from moe_patch.kernels.plan.row_tiles import RowTiling, depth_block, programs


def grouped_linear(
    inputs: Tensor,
    rows: RowTiling,
    w_EOI: Tensor,
    b_EO: Tensor | None,
    tile: Tile,
    *,
    gather: bool = False,
    low_rank: tuple[Tensor, Tensor] | None = None,
    alpha: float = 1.0,
    into: Tensor | None = None,
) -> Tensor:
    """Return out [N, out] in plan order, in the dtype of ``inputs``.

    Args:
        inputs: [N, in] in plan order, or with ``gather`` [T, in] by token; last axis contiguous.
        rows: the plan and its tile table for ``tile.m``.
        w_EOI, b_EO: weight and optional bias, any strides.
        tile: tile sizes.
        gather: the inputs are given by token.
        low_rank: (u_NR, L_EOR): adds L_e u_n.
        alpha: factor of the product, applied before rounding.
        into: result of an earlier call over other experts of the plan, to be filled in further.
    """
    O, I = w_EOI.shape[1:]
    out_NO = inputs.new_empty(rows.count, O) if into is None else into
    if tile.hopper and known_triton() and not gather and alpha == 1.0:
        hopper = hopper_module("linear")
        low_rank = whole_rank(low_rank)
        if hopper.supported(inputs, rows, w_EOI, low_rank):
            hopper.grouped_linear(inputs, rows, w_EOI, b_EO, out_NO, low_rank, tile.group)
            return out_NO
    weight, mode = weight_operand(w_EOI, tile)
    source, described = (inputs, False) if gather else row_operand(inputs, tile)
    u_NR, l_EOR = low_rank if low_rank is not None else (inputs, w_EOI)
    R = u_NR.shape[1] if low_rank is not None else 0
    bias = b_EO if b_EO is not None else inputs
    columns = cdiv(O, tile.n)
    _launch(
        (programs(rows.bound * columns, tile, device_of(inputs)),),
        (source, weight, bias, u_NR, l_EOR, out_NO, rows.plan.row_of_N, rows.plan.offsets_S,
         rows.table),
        (rows.bound,),
        (columns, O, I, R, rows.top_k, float(alpha), inputs.stride(0), *w_EOI.stride(),
         bias.stride(0), bias.stride(1), *l_EOR.stride()),
        _constants(tile, inputs.dtype, I % tile.k == 0, R, gather, described, b_EO is not None,
                   mode),
    )  # fmt: skip
    return out_NO


@functools.cache
def _constants(
    tile: Tile, dtype: torch.dtype, even: bool, rank: int, gather: bool, described: bool,
    biased: bool, mode: int,
) -> Constants:  # fmt: skip
    return Constants(
        GATHER=gather, DESCRIBED=described, BIASED=biased, LOW_RANK=rank > 0, MODE=mode, BM=tile.m,
        BN=tile.n, BK=tile.k, BR=depth_block(rank), EVEN_K=even, IN_RUNS=dtype == torch.float32,
        GROUP=tile.group, FLATTEN=tile.flatten and rank == 0, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _rows_kernel(
    in_ptr, w, b_ptr, u_ptr, l_ptr, out_ptr, row_ptr, offsets_ptr, table_ptr,
    M, columns, O, I, R, K, alpha, stride_in, stride_we, stride_wo, stride_wi,
    stride_be, stride_bo, stride_le, stride_lo, stride_li,
    GATHER: tl.constexpr, DESCRIBED: tl.constexpr, BIASED: tl.constexpr, LOW_RANK: tl.constexpr,
    MODE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    EVEN_K: tl.constexpr, IN_RUNS: tl.constexpr, GROUP: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Grid: row tiles x column tiles, or persistent. One tile: BM rows by BN columns of out."""
    row_tiles = tl.load(table_ptr)
    for tile in tl.range(
        tl.program_id(0), row_tiles * columns, tl.num_programs(0), flatten=FLATTEN
    ):
        e, start, end, column_tile = rows_of_tile(
            tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP
        )
        n = start + tl.arange(0, BM)
        column = column_tile * BN + tl.arange(0, BN)
        in_row = start
        if not DESCRIBED:
            source = tl.minimum(n, end - 1)
            if GATHER:
                source = tl.load(row_ptr + source) // K
            in_row = in_ptr + source.to(tl.int64)[:, None] * stride_in
        acc = multiply(
            in_ptr, in_row, start, w, e, column_tile * BN, column, column < O, I,
            stride_we, stride_wo, stride_wi, DESCRIBED, MODE, EVEN_K, IN_RUNS, BM, BN, BK,
        )  # fmt: skip
        n64 = n.to(tl.int64)[:, None]
        if LOW_RANK:
            acc = multiply_low_rank(
                acc, u_ptr, n, end, l_ptr, e, column, column < O, R, stride_le, stride_lo,
                stride_li, BR,
            )  # fmt: skip
        acc = acc * alpha
        if BIASED:
            here = b_ptr + e.to(tl.int64) * stride_be + column * stride_bo
            acc += tl.load(here, mask=column < O, other=0.0).to(tl.float32)[None, :]
        stored = (n < end)[:, None] & (column < O)[None, :]
        tl.store(out_ptr + n64 * O + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=stored)


_launch = Launcher(_rows_kernel)
