"""Main kernel of backward: da'_n = W2_eᵀ dout_t, with everything that follows in the epilogue:

    a_n = act(h_n)     dw_n = <da'_n, a_n>     dh_n = act'(h_n) (w_n da'_n)     wa_n = w_n a_n

Forward therefore saves neither y nor a. The kernel writes dw as one partial sum per column tile;
:func:`moe_patch.kernels.experts.reduce.routing_gradient` adds these in a fixed order.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_patch.kernels.common.device import approximate, cdiv, device_of
from moe_patch.kernels.common.gemm_device import (
    column_chunk,
    join_pair,
    multiply,
    multiply_low_rank,
    pair_columns,
    rows_of_tile,
    split_pair,
    weight_operand,
)
from moe_patch.kernels.common.glu import glu_backward, glu_constants, glu_forward, rounded
from moe_patch.kernels.common.launcher import Constants, Launcher
from moe_patch.kernels.common.tiles import Tile
from moe_patch.kernels.common.versions import hopper_module, known_triton, whole_rank
from moe_patch.kernels.plan.row_tiles import RowTiling, depth_block, programs
from moe_patch.types import Glu


class HiddenGradients(NamedTuple):
    """Outputs of :func:`hidden_gradients`; those not requested are empty.

    Attributes:
        dh_NH: gradient of h.
        wa_NF: routing weight times activation.
        partial_NC: fp32 partial sums of <da', a>, one per column tile.
    """

    dh_NH: Tensor
    wa_NF: Tensor
    partial_NC: Tensor


def hidden_gradients(
    dout_TD: Tensor,
    rows: RowTiling,
    w_EDF: Tensor,
    weights_TK: Tensor,
    h_NH: Tensor,
    glu: Glu,
    tile: Tile,
    *,
    low_rank: tuple[Tensor, Tensor] | None = None,
    dh: bool,
    wa: bool,
    partial: bool,
    overwrite_h: bool = False,
    wa_NF: Tensor | None = None,
    into: HiddenGradients | None = None,
) -> HiddenGradients:
    """Compute the gradients through the down projection and the activation.

    Args:
        dout_TD: gradient of the output, last axis contiguous.
        rows: the plan and its tile table for ``tile.m``.
        w_EDF: down projection, any strides.
        weights_TK: routing weights, contiguous.
        h_NH: saved or recomputed output of the up projection.
        glu: the activation.
        tile: tile sizes; n counts columns of a.
        low_rank: (q_NR, A_ERF): adds A_eᵀ q_n to da'.
        dh, wa, partial: outputs to compute; without dh and partial the product is skipped.
        overwrite_h: write dh over h. Each program reads its part of h before it writes there, and
            reads no other part.
        wa_NF: where to write w a; None allocates.
        into: result of an earlier call over other experts of the plan, to be filled in further.
    """
    N, F, H = rows.count, w_EDF.shape[2], h_NH.shape[1]
    on_hopper = tile.hopper and dh and known_triton()
    if on_hopper:
        hopper = hopper_module("dh")
        low_rank = whole_rank(low_rank, axis=1)
        on_hopper = hopper.supported(dout_TD, rows, w_EDF, h_NH, glu, low_rank)
    columns = cdiv(F, hopper.BN if on_hopper else tile.n)
    if into is None:
        into = HiddenGradients(
            h_NH if dh and overwrite_h else h_NH.new_empty((N, H) if dh else 0),
            h_NH.new_empty((N, F) if wa else 0) if wa_NF is None else wa_NF,
            h_NH.new_empty((N, columns) if partial or on_hopper else 0, dtype=torch.float32),
        )
    if on_hopper:
        hopper.hidden_gradients(
            dout_TD, rows, w_EDF, weights_TK, h_NH, glu, into, low_rank, tile.group
        )
        return into
    _portable(dout_TD, rows, w_EDF, weights_TK, h_NH, glu, tile, low_rank, into, dh, wa, partial)
    return into


def _portable(
    dout_TD: Tensor,
    rows: RowTiling,
    w_EDF: Tensor,
    weights_TK: Tensor,
    h_NH: Tensor,
    glu: Glu,
    tile: Tile,
    low_rank: tuple[Tensor, Tensor] | None,
    into: HiddenGradients,
    dh: bool,
    wa: bool,
    partial: bool,
) -> None:
    """Launch the portable kernel, which supports every device and layout."""
    D, F = w_EDF.shape[1:]
    columns = cdiv(F, tile.n)
    w_EFD = w_EDF.transpose(1, 2)
    weight, mode = weight_operand(w_EFD, tile)
    q_NR, a_EFR = (
        (low_rank[0], low_rank[1].transpose(1, 2)) if low_rank is not None else (h_NH, w_EFD)
    )
    R = q_NR.shape[1] if low_rank is not None else 0
    _launch(
        (programs(rows.bound * columns, tile, device_of(h_NH)),),
        (dout_TD, weight, q_NR, a_EFR, weights_TK, h_NH, *into, rows.plan.row_of_N,
         rows.plan.offsets_S, rows.table),
        (rows.bound,),
        (columns, D, F, R, rows.top_k, dout_TD.stride(0), *w_EFD.stride(), *a_EFR.stride()),
        _constants(glu, tile, h_NH.dtype, approximate(h_NH), D % tile.k == 0, R, dh, wa, partial,
                   mode),
    )  # fmt: skip


@functools.cache
def _constants(
    glu: Glu, tile: Tile, dtype: torch.dtype, fast: bool, even: bool, rank: int, dh: bool,
    wa: bool, partial: bool, mode: int,
) -> Constants:  # fmt: skip
    return Constants(
        **glu_constants(glu, fast=fast), LOW_RANK=rank > 0, DH=dh, WA=wa, PARTIAL=partial,
        MODE=mode, BM=tile.m, BN=tile.n, BK=tile.k, BR=depth_block(rank), EVEN_K=even,
        IN_RUNS=dtype == torch.float32, GROUP=tile.group, CHUNKS=tile.chunks,
        FLATTEN=tile.flatten and rank == 0 and (dh or partial), num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _dh_kernel(
    dout_ptr, w, q_ptr, l_ptr, weights_ptr, h_ptr, dh_ptr, wa_ptr, partial_ptr,
    row_ptr, offsets_ptr, table_ptr,
    M, columns, D, F, R, K, stride_dout, stride_we, stride_wo, stride_wi, stride_le, stride_lo,
    stride_li,
    KIND: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, CLAMPED: tl.constexpr, FAST: tl.constexpr,
    LOW_RANK: tl.constexpr, DH: tl.constexpr, WA: tl.constexpr, PARTIAL: tl.constexpr,
    MODE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    EVEN_K: tl.constexpr, IN_RUNS: tl.constexpr, GROUP: tl.constexpr, CHUNKS: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    """Grid: row tiles x column tiles, or persistent. One tile: BM rows by BN columns of a."""
    row_tiles = tl.load(table_ptr)
    for tile in tl.range(
        tl.program_id(0), row_tiles * columns, tl.num_programs(0), flatten=FLATTEN
    ):
        e, start, end, column_tile = rows_of_tile(
            tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP
        )
        n = start + tl.arange(0, BM)
        row = tl.load(row_ptr + tl.minimum(n, end - 1))
        f = column_tile * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        if DH or PARTIAL:
            dout_row = dout_ptr + (row // K).to(tl.int64)[:, None] * stride_dout
            acc = multiply(
                dout_ptr, dout_row, start, w, e, column_tile * BN, f, f < F, D,
                stride_we, stride_wo, stride_wi, False, MODE, EVEN_K, IN_RUNS, BM, BN, BK,
            )  # fmt: skip
            if LOW_RANK:
                acc = multiply_low_rank(
                    acc, q_ptr, n, end, l_ptr, e, f, f < F, R, stride_le, stride_lo, stride_li, BR
                )
        weight_n = tl.load(weights_ptr + row).to(tl.float32)[:, None]
        # Process columns in chunks: whole gate, up and gradient tiles would spill registers. Load h
        # one chunk ahead, since a load cannot move above the stores of the previous chunk.
        partial = tl.zeros((BM,), dtype=tl.float32)
        first = column_tile * CHUNKS
        gate, up = load_h(h_ptr, first, n, end, F, GATED, INTERLEAVED, BM, BN // CHUNKS)
        for chunk in tl.static_range(CHUNKS):
            gate_now, up_now = gate, up
            if chunk + 1 < CHUNKS:
                gate, up = load_h(
                    h_ptr, first + chunk + 1, n, end, F, GATED, INTERLEAVED, BM, BN // CHUNKS
                )
            partial += emit(
                column_chunk(acc, chunk, CHUNKS, BM, BN), gate_now, up_now, first + chunk,
                weight_n, n, end,
                F, dh_ptr, wa_ptr, KIND, GATED, INTERLEAVED, ALPHA, LIMIT, CLAMPED, FAST,
                DH, WA, PARTIAL, BM, BN // CHUNKS,
            )  # fmt: skip
        if PARTIAL:
            tl.store(partial_ptr + n.to(tl.int64) * columns + column_tile, partial, mask=n < end)


_launch = Launcher(_dh_kernel)


@triton.jit
def load_h(
    h_ptr, column_chunk, n, end, F,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Load gate and up for BC columns of a; without a gate, h twice."""
    n64 = n.to(tl.int64)[:, None]
    if INTERLEAVED:
        column, exists = pair_columns(column_chunk, F, 2 * BC, GATED, INTERLEAVED)
        stored = (n < end)[:, None] & exists[None, :]
        h = tl.load(h_ptr + n64 * (2 * F) + column[None, :], mask=stored, other=0.0)
        gate, up = split_pair(h, BM, BC, INTERLEAVED)
    else:
        f = column_chunk * BC + tl.arange(0, BC)
        stored = (n < end)[:, None] & (f < F)[None, :]
        at_gate = h_ptr + n64 * (2 * F if GATED else F) + f[None, :]
        gate = tl.load(at_gate, mask=stored, other=0.0)
        up = gate
        if GATED:
            up = tl.load(at_gate + F, mask=stored, other=0.0)
    return gate, up


@triton.jit
def emit(
    acc, gate, up, column_chunk, weight_n, n, end, F, dh_ptr, wa_ptr,
    KIND: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, CLAMPED: tl.constexpr, FAST: tl.constexpr,
    DH: tl.constexpr, WA: tl.constexpr, PARTIAL: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write dh and w·a for BC columns of a; return the row sums of da' · a."""
    f = column_chunk * BC + tl.arange(0, BC)
    stored = (n < end)[:, None] & (f < F)[None, :]
    n64 = n.to(tl.int64)[:, None]
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    up = up.to(tl.float32)
    partial = tl.zeros((BM,), dtype=tl.float32)
    if WA or PARTIAL:
        a = glu_forward(gate, up, KIND, GATED, ALPHA, LIMIT, CLAMPED, FAST)
        a = rounded(a, dtype, FAST)
        if WA:
            tl.store(wa_ptr + n64 * F + f[None, :], (weight_n * a).to(dtype), mask=stored)
        if PARTIAL:
            partial = tl.sum(acc * a, axis=1)
    if DH:
        dgate, dup = glu_backward(
            gate, up, acc * weight_n, KIND, GATED, ALPHA, LIMIT, CLAMPED, FAST
        )
        if INTERLEAVED:
            column, exists = pair_columns(column_chunk, F, 2 * BC, GATED, INTERLEAVED)
            both = join_pair(dgate.to(dtype), dup.to(dtype), BM, BC, INTERLEAVED)
            pair_stored = (n < end)[:, None] & exists[None, :]
            tl.store(dh_ptr + n64 * (2 * F) + column[None, :], both, mask=pair_stored)
        else:
            at_gate = dh_ptr + n64 * (2 * F if GATED else F) + f[None, :]
            tl.store(at_gate, dgate.to(dtype), mask=stored)
            if GATED:
                tl.store(at_gate + F, dup.to(dtype), mask=stored)
    return partial
