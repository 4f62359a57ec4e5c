"""Device functions that choose the best K columns of each row, exactly by (value, lower column).

Two ways, both K rounds of one row maximum:
    short   values of 16 bits: key and inverted column share one int32, so a round is a subtraction
            and a maximum per column.
    long    fp32 values: a maximum over keys, then a minimum over the columns that attain it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_patch.kernels.routing_math import (
    NO_KEY,
    key_of,
    rounded,
    score_of,
    short_key_of,
    short_value_of,
    value_of,
)


@triton.jit
def packed_keys(x_BC, exists_C, col_C, C: tl.constexpr, DTYPE: tl.constexpr):
    """Distinct int32 keys of 16-bit values: the value's key above the inverted column."""
    key_BC = short_key_of(x_BC, DTYPE)
    key_BC = tl.where(exists_C[None, :], key_BC, -0x7FFF)
    return key_BC * C + (C - 1 - col_C)[None, :]


@triton.jit
def next_below(packed_BC, last_B):
    """The largest key below ``last_B`` in each row.

    Keys span less than 31 bits, so those below wrap around to the upper half of uint32 and the
    nearest of them is the maximum there.
    """
    gap_BC = (packed_BC - last_B[:, None]).to(tl.uint32, bitcast=True)
    return last_B + tl.max(gap_BC, axis=1).to(tl.int32, bitcast=True)


@triton.jit
def select_short(packed_BC, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr):
    """Columns [B, KP] of the K largest packed keys, in order."""
    k_K = tl.arange(0, KP)
    cols_BK = tl.zeros((packed_BC.shape[0], KP), dtype=tl.int32)
    last_B = tl.max(packed_BC, axis=1)
    for k in tl.static_range(K):
        if k > 0:
            last_B = next_below(packed_BC, last_B)
        col_B = C - 1 - (last_B & (C - 1))
        cols_BK = tl.where((k_K == k)[None, :], col_B[:, None], cols_BK)
    return cols_BK


@triton.jit
def select_monotone(
    packed_BC, row_max_B, row_inv_B, columns,
    C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    SCORE: tl.constexpr, DTYPE: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """:func:`select_short` of the logits, standing in for their fp32 scores.

    A score never falls where its logit rises, but two logits may share one score, and then the lower
    column must win. ``bad_B`` marks the rows in which that could matter: two neighbours among the
    best K + 1 differ as logits and not as scores, or the row holds a NaN.
    """
    k_K = tl.arange(0, KP)
    cols_BK = tl.zeros((packed_BC.shape[0], KP), dtype=tl.int32)
    score_BK = tl.zeros((packed_BC.shape[0], KP), dtype=tl.float32)
    last_B = tl.max(packed_BC, axis=1)
    bad_B = row_inv_B != row_inv_B
    key_B = (last_B - (last_B & (C - 1))) // C
    score_B = row_max_B
    for k in tl.static_range(K + 1):
        before_B = key_B
        before_score_B = score_B
        if k > 0:
            last_B = next_below(packed_BC, last_B)
        key_B = (last_B - (last_B & (C - 1))) // C
        score_B = score_of(short_value_of(key_B, DTYPE), row_max_B, row_inv_B, SCORE, tl.float32)
        if CHECK and k > 0:
            bad_B = bad_B | ((key_B != before_B) & (score_B == before_score_B) & (k < columns))
        if k < K:
            col_B = C - 1 - (last_B & (C - 1))
            cols_BK = tl.where((k_K == k)[None, :], col_B[:, None], cols_BK)
            score_BK = tl.where((k_K == k)[None, :], score_B[:, None], score_BK)
    return cols_BK, score_BK, bad_B


@triton.jit
def select_long(key_BC, col_C, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr):
    """Columns [B, KP] of the K largest keys, equal keys in order of their column."""
    k_K = tl.arange(0, KP)
    cols_BK = tl.zeros((key_BC.shape[0], KP), dtype=tl.int32)
    for k in tl.range(K):
        top_B = tl.max(key_BC, axis=1)
        col_B = tl.min(tl.where(key_BC == top_B[:, None], col_C[None, :], C), axis=1)
        key_BC = tl.where(col_C[None, :] == col_B[:, None], NO_KEY, key_BC)
        cols_BK = tl.where((k_K == k)[None, :], col_B[:, None], cols_BK)
    return cols_BK


@triton.jit
def limit_groups(
    key_BC, fill_key, BLOCK: tl.constexpr, GROUPS: tl.constexpr, GROUPS_P2: tl.constexpr,
    SIZE_P2: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Replace the keys outside each row's best groups by ``fill_key``.

    Columns are laid out group by group, each group padded to SIZE_P2 columns with NO_KEY.
    """
    key_BGS = tl.reshape(key_BC, (BLOCK, GROUPS_P2, SIZE_P2))
    best_BG = tl.max(key_BGS, axis=2)
    group_BG = best_BG
    if TOP2:
        is_best_BGS = key_BGS == best_BG[:, :, None]
        below_BG = tl.max(tl.where(is_best_BGS, NO_KEY, key_BGS), axis=2)
        twice_BG = tl.sum(is_best_BGS.to(tl.int32), axis=2) > 1
        second_BG = tl.where(twice_BG, best_BG, below_BG)
        group_BG = key_of(rounded(value_of(best_BG) + value_of(second_BG), DTYPE))
    g_G = tl.arange(0, GROUPS_P2)
    group_BG = tl.where((g_G < GROUPS)[None, :], group_BG, NO_KEY)
    keep_BG = tl.zeros((BLOCK, GROUPS_P2), dtype=tl.int1)
    for _ in tl.static_range(TOP_GROUPS):
        top_B = tl.max(group_BG, axis=1)
        g_B = tl.min(tl.where(group_BG == top_B[:, None], g_G[None, :], GROUPS_P2), axis=1)
        chosen_BG = g_G[None, :] == g_B[:, None]
        keep_BG = keep_BG | chosen_BG
        group_BG = tl.where(chosen_BG, NO_KEY, group_BG)
    limited_BGS = tl.where(keep_BG[:, :, None] | (key_BGS == NO_KEY), key_BGS, fill_key)
    return tl.reshape(limited_BGS, (BLOCK, GROUPS_P2 * SIZE_P2))
