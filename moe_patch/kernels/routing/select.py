"""Device functions that choose the best K columns of each row, exactly by (value, lower column).

A tile is [B, W, L]: B rows, with column w * L + l at (w, l). The launcher chooses L and B so that a
warp's threads cover [B, L] and W stays inside a thread. A thread then holds many columns of a row,
and most of a row maximum needs no shuffle.

Selection runs K rounds over *packed* int32 keys: the value's key in the high bits, the inverted
column in the low bits. So all keys of a row differ, the lower column wins a tie, and a round takes
one subtraction and one maximum per column.

There are three packings. The last two can be too coarse; affected rows are detected and selected
again by :func:`select_exactly`.

- short: 16-bit values, packed whole.
- monotone: 16-bit logits, also as a substitute for their fp32 scores. The score is a monotone
  function of the logit, but two logits may have the same score, and then the lower column must win.
  Rows with NaN are selected again too.
- truncated: fp32 values without their lowest bits.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from moe_patch.kernels.routing.math import NO_KEY, key_of, rounded, short_key_of, value_of

# Bits of an fp32 number that a 16-bit float uses, without the sign. As a float this is a NaN.
LOGIT_BITS = tl.constexpr(0x7FFFE000)


class Tile(NamedTuple):
    """Shape [rows, chunks, chunk] of a tile, called [B, W, L] in kernels; powers of two."""

    rows: int
    chunks: int
    chunk: int


def tile_of(columns: int, tokens: int, itemsize: int, columns_per_thread: int) -> Tile:
    """Return the tile of a one-warp program over rows of ``columns`` logits (a power of two).

    Each thread loads 16 bytes of one row at a time, so L / vector threads share a row.
    """
    vector = 16 // itemsize
    chunk = min(columns, max(vector, columns * vector // columns_per_thread))
    rows = min(max(1, 32 * vector // chunk), triton.next_power_of_2(max(tokens, 1)))
    return Tile(rows, columns // chunk, chunk)


@triton.jit
def row_max(x_BWL):
    return tl.max(tl.max(x_BWL, axis=1), axis=1)


@triton.jit
def row_min(x_BWL):
    return tl.min(tl.min(x_BWL, axis=1), axis=1)


@triton.jit
def row_sum(x_BWL):
    return tl.sum(tl.sum(x_BWL, axis=1), axis=1)


@triton.jit
def pack_short(x_BWL, exists_WL, c_WL, C: tl.constexpr, DTYPE: tl.constexpr):
    """Pack fp32 values that are exact in the 16-bit DTYPE."""
    key_BWL = tl.where(exists_WL, short_key_of(x_BWL, DTYPE), -0x7FFF)
    return key_BWL * C + (C - 1 - c_WL)


@triton.jit
def pack_logits(x_BWL, c_WL, C: tl.constexpr, POSITIVE_NAN: tl.constexpr):
    """Pack 16-bit logits given as fp32, with few instructions.

    At least 13 low bits of such values are zero; the column is stored there. NaN becomes the
    largest key, without a column.
    """
    # Adding 0 turns -0 into +0 and, on some devices, gives all NaNs the same bits.
    bits_BWL = (x_BWL + 0.0).to(tl.int32, bitcast=True)
    if not POSITIVE_NAN:
        bits_BWL = tl.where(x_BWL == x_BWL, bits_BWL, LOGIT_BITS)
    return (bits_BWL ^ ((bits_BWL >> 31) & LOGIT_BITS)) | (c_WL ^ (C - 1))


@triton.jit
def logit_of(packed, C: tl.constexpr):
    """Recover the logits from keys of :func:`pack_logits`."""
    return ((packed ^ ((packed >> 31) & LOGIT_BITS)) & -C).to(tl.float32, bitcast=True)


@triton.jit
def pack_truncated(key_BWL, c_WL, C: tl.constexpr):
    """Pack int32 keys, which lose 1 + log2(C) bits."""
    return ((key_BWL >> 1) & -C) | (C - 1 - c_WL)


@triton.jit
def next_below(packed_BWL, last_B):
    """Return the largest key below ``last_B`` in each row.

    After subtracting ``last_B``, smaller keys wrap around to the upper end of uint32, in order. All
    other keys are small. So the maximum is the nearest smaller key.
    """
    gap_BWL = (packed_BWL - last_B[:, None, None]).to(tl.uint32, bitcast=True)
    return last_B + row_max(gap_BWL).to(tl.int32, bitcast=True)


@triton.jit
def select_packed(
    packed_BWL, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, CLOSE: tl.constexpr
):  # fmt: skip
    """Return the K largest packed keys [B, KP] of each row in descending order, and ``close_B``.

    With CLOSE, ``close_B`` is true if any two adjacent keys of the best K + 1 differ only in the
    column.
    """
    k_K = tl.arange(0, KP)
    last_B = row_max(packed_BWL)
    best_BK = tl.zeros((packed_BWL.shape[0], KP), dtype=tl.int32)
    close_B = last_B != last_B
    for k in tl.static_range(K):
        best_BK = tl.where((k_K == k)[None, :], last_B[:, None], best_BK)
        if CLOSE or k < K - 1:
            after_B = next_below(packed_BWL, last_B)
            if CLOSE:
                close_B = close_B | ((after_B ^ last_B) & -C == 0)
            last_B = after_B
    return best_BK, close_B


@triton.jit
def select_exactly(key_BWL, c_WL, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr):
    """Return the columns [B, KP] of the K largest keys; equal keys in order of their column."""
    k_K = tl.arange(0, KP)
    cols_BK = tl.zeros((key_BWL.shape[0], KP), dtype=tl.int32)
    for k in tl.range(K):
        top_B = row_max(key_BWL)
        col_B = row_min(tl.where(key_BWL == top_B[:, None, None], c_WL, C))
        key_BWL = tl.where(c_WL == col_B[:, None, None], NO_KEY, key_BWL)
        cols_BK = tl.where((k_K == k)[None, :], col_B[:, None], cols_BK)
    return cols_BK


@triton.jit
def limit_groups(
    key_BWL, fill_key, GROUPS: tl.constexpr, GROUPS_P2: tl.constexpr, SIZE_P2: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Replace the keys outside each row's best groups by ``fill_key``.

    Group g is the SIZE_P2 columns from g * SIZE_P2 on, padded with NO_KEY. With L columns per chunk
    that is SIZE_P2 // L chunks, or one of L // SIZE_P2 parts of a chunk.
    """
    B: tl.constexpr = key_BWL.shape[0]
    L: tl.constexpr = key_BWL.shape[2]
    PARTS: tl.constexpr = L // SIZE_P2 if L > SIZE_P2 else 1
    CHUNKS: tl.constexpr = SIZE_P2 // L if SIZE_P2 > L else 1
    g_WP = (
        tl.arange(0, GROUPS_P2 // PARTS)[None, :, None] * PARTS + tl.arange(0, PARTS)[None, None, :]
    )
    key = tl.reshape(key_BWL, (B, GROUPS_P2 // PARTS, CHUNKS, PARTS, L // PARTS))
    group_BWP = tl.max(tl.max(key, axis=2), axis=3)
    if TOP2:
        is_best = key == group_BWP[:, :, None, :, None]
        twice_BWP = tl.sum(tl.sum(is_best.to(tl.int32), axis=2), axis=3) > 1
        below_BWP = tl.max(tl.max(tl.where(is_best, NO_KEY, key), axis=2), axis=3)
        second_BWP = tl.where(twice_BWP, group_BWP, below_BWP)
        group_BWP = key_of(rounded(value_of(group_BWP) + value_of(second_BWP), DTYPE))
    group_BWP = tl.where(g_WP < GROUPS, group_BWP, NO_KEY)
    keep_BWP = (group_BWP == NO_KEY) & (group_BWP != NO_KEY)
    for _ in tl.static_range(TOP_GROUPS):
        top_B = row_max(group_BWP)
        g_B = row_min(tl.where(group_BWP == top_B[:, None, None], g_WP, GROUPS_P2))
        chosen_BWP = g_WP == g_B[:, None, None]
        keep_BWP = keep_BWP | chosen_BWP
        group_BWP = tl.where(chosen_BWP, NO_KEY, group_BWP)
    limited = tl.where(keep_BWP[:, :, None, :, None] | (key == NO_KEY), key, fill_key)
    return tl.reshape(limited, key_BWL.shape)
