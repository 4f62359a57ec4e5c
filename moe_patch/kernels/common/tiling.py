"""What the grouped GEMM kernels share: finding their tile, the sum over depth, the weight operand.

A weight operand is either pointers with strides, which take any storage, or a tensor descriptor
over storage whose last axis is contiguous and 16-byte aligned (MODE, below).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from moe_patch.kernels.common.launcher import Box
from moe_patch.kernels.common.tiles import Tile

# How a weight reaches a kernel: pointers; a descriptor with the summed axis last ([.., out, in]);
# a descriptor with the output axis last ([.., in, out]).
POINTERS, DEPTH_LAST, COLUMNS_LAST = 0, 1, 2
# Depth that fp32 operands sum in one run before it joins the total: rounding errors grow with the
# length of a run, and 16-bit operands' own rounding hides it.
RUN = tl.constexpr(128)


@triton.jit
def locate_tile(tile, row_tiles, columns, GROUP: tl.constexpr):
    """(row tile, column tile) of a tile: GROUP row tiles share one pass over the columns."""
    first = tile // (GROUP * columns) * GROUP
    height = min(row_tiles - first, GROUP)
    local = tile - first * columns
    return first + local % height, local // height


@triton.jit
def rows_of_tile(tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP: tl.constexpr):
    """(expert, its tile's first slot, the expert's end, column tile) of a tile."""
    row_tile, column_tile = locate_tile(tile, row_tiles, columns, GROUP)
    e = tl.load(table_ptr + 1 + row_tile)
    start = tl.load(table_ptr + 1 + M + row_tile)
    return e, start, tl.load(offsets_ptr + e + 1), column_tile


@triton.jit
def _step(
    acc, left, left_row, start, w, e, first, column, exists, depth, k0,
    stride_we, stride_wo, stride_wi,
    DESCRIBED: tl.constexpr, MODE: tl.constexpr, EVEN_K: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """acc plus the product of one step along the depth: see :func:`multiply`."""
    k = k0 + tl.arange(0, BK)
    if DESCRIBED:
        # Rows past the expert's end are its neighbour's: computed, never stored.
        x = left.load([start, k0])
    elif EVEN_K:
        x = tl.load(left_row + k[None, :])
    else:
        x = tl.load(left_row + k[None, :], mask=(k < depth)[None, :], other=0.0)
    if MODE == 0:
        here = weight_pointers(w + e.to(tl.int64) * stride_we, stride_wo, stride_wi, column, k)
        weight = tl.load(here, mask=(k < depth)[:, None] & exists[None, :], other=0.0)
    elif MODE == 1:
        weight = tl.reshape(w.load([e, 0, first, k0]), (BN, BK)).T
    else:
        weight = tl.reshape(w.load([e, k0, 0, first]), (BK, BN))
    return tl.dot(x, weight, acc, input_precision="ieee")


@triton.jit
def multiply(
    left, left_row, start, w, e, first, column, exists, depth, stride_we, stride_wo, stride_wi,
    DESCRIBED: tl.constexpr, MODE: tl.constexpr, EVEN_K: tl.constexpr, IN_RUNS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """[BM, BN] in fp32: rows times the columns of one expert's weight, over the whole depth.

    Rows come from a descriptor ``left`` at ``start`` (DESCRIBED) or from the pointers ``left_row``;
    columns from pointers at ``column`` where it ``exists``, or from a descriptor at ``first``
    (MODE).
    """
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    if IN_RUNS:
        for k1 in range(0, depth, RUN):
            part = tl.zeros((BM, BN), dtype=tl.float32)
            for k0 in range(k1, min(k1 + RUN, depth), BK):
                part = _step(
                    part, left, left_row, start, w, e, first, column, exists, depth, k0,
                    stride_we, stride_wo, stride_wi, DESCRIBED, MODE, EVEN_K, BN, BK,
                )  # fmt: skip
            acc += part
    else:
        for k0 in range(0, depth, BK):
            acc = _step(
                acc, left, left_row, start, w, e, first, column, exists, depth, k0,
                stride_we, stride_wo, stride_wi, DESCRIBED, MODE, EVEN_K, BN, BK,
            )  # fmt: skip
    return acc


@triton.jit
def multiply_low_rank(
    acc, u_ptr, n, end, factor_ptr, e, column, exists, R, stride_e, stride_o, stride_r,
    BR: tl.constexpr,
):  # fmt: skip
    """acc plus the product of the rows' R inputs, u_NR, and one expert's factor."""
    n64 = n.to(tl.int64)[:, None]
    factor_e = factor_ptr + e.to(tl.int64) * stride_e
    for r0 in range(0, R, BR):
        r = r0 + tl.arange(0, BR)
        present = (n < end)[:, None] & (r < R)[None, :]
        u = tl.load(u_ptr + n64 * R + r[None, :], mask=present, other=0.0)
        here = weight_pointers(factor_e, stride_o, stride_r, column, r)
        factor = tl.load(here, mask=(r < R)[:, None] & exists[None, :], other=0.0)
        acc = tl.dot(u, factor, acc, input_precision="ieee")
    return acc


@triton.jit
def pair_columns(
    column_tile, F, BN: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """The columns of h that belong to one tile of a, and which of them exist.

    Gate and up columns travel together: the first half of the tile gate and the second up, or
    alternating when interleaved. :func:`split_pair` separates them.
    """
    j = tl.arange(0, BN)
    if GATED and not INTERLEAVED:
        f = column_tile * (BN // 2) + j % (BN // 2)
        return (j // (BN // 2)) * F + f, f < F
    column = column_tile * BN + j
    return column, column < (2 * F if GATED else F)


@triton.jit
def split_pair(h, BM: tl.constexpr, BF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Gate and up, [BM, BF] each, of a tile whose columns came from :func:`pair_columns`."""
    if INTERLEAVED:
        gate, up = tl.split(tl.reshape(h, (BM, BF, 2)))
    else:
        gate, up = tl.split(tl.permute(tl.reshape(h, (BM, 2, BF)), (0, 2, 1)))
    return gate, up


@triton.jit
def join_pair(gate, up, BM: tl.constexpr, BF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The inverse of :func:`split_pair`."""
    both = tl.join(gate, up)
    if not INTERLEAVED:
        both = tl.permute(both, (0, 2, 1))
    return tl.reshape(both, (BM, 2 * BF))


@triton.jit
def column_chunk(
    tile, chunk: tl.constexpr, CHUNKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Columns [chunk, chunk + 1) * BN / CHUNKS of a [BM, BN] tile; CHUNKS is 1, 2 or 4."""
    if CHUNKS == 1:
        part = tile
    else:
        low, high = split_pair(tile, BM, BN // 2, False)
        part = low if chunk < CHUNKS // 2 else high
        if CHUNKS == 4:
            first, second = split_pair(part, BM, BN // 4, False)
            part = first if chunk % 2 == 0 else second
    return part


@triton.jit
def weight_pointers(w, stride_out, stride_in, column, k):
    """Pointers to the [k, column] tile of one expert's weight [out, in]."""
    return w + k[:, None] * stride_in + column[None, :] * stride_out


def weight_operand(w_EOI: Tensor, tile: Tile, halves: int = 1) -> tuple[Any, int]:
    """The weight as the kernels take it: ``(pointers or descriptor, MODE)``.

    Args:
        w_EOI: [E, out, in] with any strides.
        tile: its n and k are the box of a descriptor.
        halves: 2 when a box takes half of its columns from each half of ``out`` (gate and up).
    """
    E, O, I = w_EOI.shape
    stride_e, stride_o, stride_i = w_EOI.stride()
    if not tile.descriptors or w_EOI.data_ptr() % 16 != 0:
        return w_EOI, POINTERS
    part = O // halves
    if stride_i == 1 and _aligned(w_EOI, stride_e, stride_o, part * stride_o):
        shape, block = (E, halves, part, I), (1, halves, tile.n // halves, tile.k)
        strides = stride_e, part * stride_o, stride_o, 1
        return Box(w_EOI, shape, strides, block), DEPTH_LAST
    if stride_o == 1 and _aligned(w_EOI, stride_e, stride_i, part if halves > 1 else 0):
        shape, block = (E, I, halves, part), (1, tile.k, halves, tile.n // halves)
        strides = stride_e, stride_i, part if halves > 1 else stride_i, 1
        return Box(w_EOI, shape, strides, block), COLUMNS_LAST
    return w_EOI, POINTERS


def row_operand(rows_NI: Tensor, tile: Tile) -> tuple[Any, bool]:
    """Contiguous rows as ``(pointers or descriptor, is it a descriptor)``, in boxes of m x k."""
    if (
        not tile.descriptors
        or rows_NI.data_ptr() % 16 != 0
        or not _aligned(rows_NI, rows_NI.stride(0))
    ):
        return rows_NI, False
    return Box(rows_NI, rows_NI.shape, rows_NI.stride(), (tile.m, tile.k)), True


def _aligned(tensor: Tensor, *strides: int) -> bool:
    units = 16 // tensor.element_size()
    for stride in strides:  # noqa: SIM110 (all() over a generator takes three times as long)
        if stride % units:
            return False
    return True
