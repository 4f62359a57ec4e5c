"""Device functions of the grouped GEMM kernels: locate a tile, multiply over the depth.

A weight operand (MODE, below) is either pointers with strides, for any storage, or a tensor
descriptor. A descriptor needs storage whose last axis is contiguous and aligned to 16 bytes.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from moe_patch.kernels.common.launcher import Box
from moe_patch.kernels.common.tiles import Tile

# Form of a weight operand: pointers, a descriptor with the summed axis last ([.., out, in]), or a
# descriptor with the output axis last ([.., in, out]).
POINTERS, DEPTH_LAST, COLUMNS_LAST = 0, 1, 2
# Depth over which fp32 operands are summed before the partial sum is added to the total. Rounding
# errors grow with this length. For 16-bit operands their own rounding error dominates.
RUN = tl.constexpr(128)


@triton.jit
def locate_tile(tile, row_tiles, columns, GROUP: tl.constexpr):
    """Return (row tile, column tile) of a tile; GROUP row tiles share a pass over the columns."""
    first = tile // (GROUP * columns) * GROUP
    height = min(row_tiles - first, GROUP)
    local = tile - first * columns
    return first + local % height, local // height


@triton.jit
def rows_of_tile(tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP: tl.constexpr):
    """Return (expert, first slot of the tile, end of the expert's slots, column tile)."""
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
    """Add the product of one step along the depth to acc; see :func:`multiply`."""
    k = k0 + tl.arange(0, BK)
    if DESCRIBED:
        # Rows past the expert's end belong to the next expert; their results are never stored.
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
    """Multiply rows by columns of one expert's weight over the whole depth; [BM, BN] in fp32.

    Rows are loaded by the descriptor ``left`` at ``start`` (DESCRIBED) or by the pointers
    ``left_row``. Columns are loaded by pointers at ``column`` where it ``exists``, or by a
    descriptor at ``first`` (MODE).
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
    """Add the low-rank product to acc: rows of u_NR times one expert's factor."""
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
    """Return the columns of h for one tile of a, and a mask of those that exist.

    A tile holds gate and up columns: gate in the first half and up in the second, or alternating if
    INTERLEAVED. :func:`split_pair` separates them.
    """
    j = tl.arange(0, BN)
    if GATED and not INTERLEAVED:
        f = column_tile * (BN // 2) + j % (BN // 2)
        return (j // (BN // 2)) * F + f, f < F
    column = column_tile * BN + j
    return column, column < (2 * F if GATED else F)


@triton.jit
def split_pair(h, BM: tl.constexpr, BF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Split a tile with the columns of :func:`pair_columns` into gate and up, [BM, BF] each."""
    if INTERLEAVED:
        gate, up = tl.split(tl.reshape(h, (BM, BF, 2)))
    else:
        gate, up = tl.split(tl.permute(tl.reshape(h, (BM, 2, BF)), (0, 2, 1)))
    return gate, up


@triton.jit
def join_pair(gate, up, BM: tl.constexpr, BF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Invert :func:`split_pair`."""
    both = tl.join(gate, up)
    if not INTERLEAVED:
        both = tl.permute(both, (0, 2, 1))
    return tl.reshape(both, (BM, 2 * BF))


@triton.jit
def column_chunk(
    tile, chunk: tl.constexpr, CHUNKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Return columns [chunk, chunk + 1) * BN / CHUNKS of a [BM, BN] tile; CHUNKS is 1, 2 or 4."""
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
    """Return pointers to the [k, column] tile of one expert's weight [out, in]."""
    return w + k[:, None] * stride_in + column[None, :] * stride_out


def weight_operand(w_EOI: Tensor, tile: Tile, halves: int = 1) -> tuple[Any, int]:
    """Return the weight operand of a kernel, ``(pointers or descriptor, MODE)``.

    Args:
        w_EOI: [E, out, in] with any strides.
        tile: its n and k are the block shape of a descriptor.
        halves: 2 if a block takes half of its columns from each half of ``out`` (gate and up).
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
    """Return the operand of contiguous rows, ``(pointers or descriptor, is a descriptor)``."""
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
