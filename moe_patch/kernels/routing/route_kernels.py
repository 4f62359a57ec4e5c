"""Forward and backward kernel of routing; route.py launches and describes them."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_patch.kernels.routing.math import (
    NO_KEY,
    key_of,
    rounded,
    row_softmax,
    score_of,
    score_slope,
    value_of,
    weights_grad,
    weights_of,
)
from moe_patch.kernels.routing.select import (
    limit_groups,
    logit_of,
    pack_logits,
    pack_short,
    pack_truncated,
    row_max,
    row_sum,
    select_exactly,
    select_packed,
)


@triton.jit
def load_at(row_B, cols_BK, used_BK, stride):
    return tl.load(
        row_B[:, None] + cols_BK.to(tl.int64) * stride, mask=used_BK, other=0.0
    ).to(tl.float32)  # fmt: skip


@triton.jit
def load_tile(row_B, e_WL, exists_WL, stride_e):
    return tl.load(
        row_B[:, None, None] + e_WL.to(tl.int64) * stride_e, mask=exists_WL, other=float("-inf")
    ).to(tl.float32)  # fmt: skip


@triton.jit
def may_share_score(
    packed, x, v, row_max, row_inv,
    SCORE: tl.constexpr, DTYPE: tl.constexpr, MANTISSA: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return whether the next smaller 16-bit logit may have the same score v as x; true for NaN."""
    if SCORE == "softmax":
        # Avoid a second exponential: the next logit is at least STEP * |x| below x. The scores
        # differ if that exceeds all rounding errors: of x - max, of its product with log2(e), of
        # the exponential and of the division.
        STEP: tl.constexpr = 2.0 ** -(MANTISSA + 1)
        roundings = (row_max - x) * 2.0**-22 + 2.0**-20
        return ((tl.abs(x) * STEP > roundings) & (v > 1e-34)) == 0
    else:
        below = logit_of(packed - (1 << (23 - MANTISSA)), C)
        return (score_of(below, row_max, row_inv, SCORE, DTYPE) == v) | (v != v)


@triton.jit(do_not_specialize=["T"])
def forward_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr,
    T, stride_t, stride_e, eps, scale, group_fill,
    E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    B: tl.constexpr, W: tl.constexpr, L: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, GROUPS_P2: tl.constexpr, SIZE_P2: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, SCORE: tl.constexpr, TOPK_FIRST: tl.constexpr,
    BY_LOGITS: tl.constexpr, HAS_BIAS: tl.constexpr, PACKING: tl.constexpr,
    SCORE_DTYPE: tl.constexpr, CHOICE_DTYPE: tl.constexpr, SUM: tl.constexpr,
    RENORMALIZE: tl.constexpr, CLAMP: tl.constexpr,
    POSITIVE_NAN: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(T, B),). The C columns of a tile are the experts, group by group, padded."""
    C: tl.constexpr = W * L
    MANTISSA: tl.constexpr = 7 if logits_ptr.dtype.element_ty == tl.bfloat16 else 10
    t_B = tl.program_id(0) * B + tl.arange(0, B)
    inside_B = t_B < T
    # Rows past the end repeat the last row and are not stored.
    row_B = logits_ptr + tl.minimum(t_B, T - 1).to(tl.int64) * stride_t
    c_WL = tl.arange(0, W)[None, :, None] * L + tl.arange(0, L)[None, None, :]
    e_WL = c_WL if SIZE == SIZE_P2 else (c_WL // SIZE_P2) * SIZE + c_WL % SIZE_P2
    exists_WL = (c_WL % SIZE_P2 < SIZE) & (c_WL < GROUPS * SIZE_P2)
    x_BWL = load_tile(row_B, e_WL, exists_WL, stride_e)

    max_B = tl.zeros((B,), dtype=tl.float32)
    inv_B = tl.zeros((B,), dtype=tl.float32)
    if SUM:
        max_B = row_max(x_BWL)
        inv_B = 1.0 / row_sum(tl.exp(x_BWL - max_B[:, None, None]))

    if PACKING == "monotone":
        packed_BWL = pack_logits(x_BWL, c_WL, C, POSITIVE_NAN)
    else:
        choice_BWL = x_BWL
        if not BY_LOGITS:
            choice_BWL = score_of(
                x_BWL, max_B[:, None, None], inv_B[:, None, None], SCORE, SCORE_DTYPE
            )
        if HAS_BIAS:
            bias_WL = tl.load(bias_ptr + e_WL, mask=exists_WL, other=0.0).to(tl.float32)
            choice_BWL = rounded(choice_BWL + bias_WL, CHOICE_DTYPE)
        key_BWL = tl.where(exists_WL, key_of(choice_BWL), NO_KEY)
        if GROUPS > 1:
            fill_key = key_of(
                rounded(tl.zeros((1, 1, 1, 1, 1), tl.float32) + group_fill, CHOICE_DTYPE)
            )
            key_BWL = limit_groups(
                key_BWL, fill_key, GROUPS, GROUPS_P2, SIZE_P2, TOP_GROUPS, TOP2, CHOICE_DTYPE
            )
        if PACKING == "short":
            packed_BWL = pack_short(value_of(key_BWL), exists_WL, c_WL, C, CHOICE_DTYPE)
        else:
            packed_BWL = pack_truncated(key_BWL, c_WL, C)

    BY_SCORES: tl.constexpr = PACKING == "monotone" and not BY_LOGITS
    CHECK: tl.constexpr = PACKING != "short"
    best_BK, bad_B = select_packed(packed_BWL, C, K, KP, PACKING == "truncated")
    k_K = tl.arange(0, KP)
    used_BK = k_K[None, :] + 0 * t_B[:, None] < K
    cols_BK = C - 1 - (best_BK & (C - 1))
    ids_BK = cols_BK if SIZE == SIZE_P2 else (cols_BK // SIZE_P2) * SIZE + cols_BK % SIZE_P2
    if PACKING == "monotone":
        x_BK = logit_of(best_BK, C)
    else:
        x_BK = load_at(row_B, ids_BK, used_BK, stride_e)
    if BY_SCORES and not SUM and SCORE == "softmax":
        # Weights are divided by the sum over the chosen here, so any common factor cancels.
        max_B = tl.max(tl.where(used_BK, x_BK, float("-inf")), axis=1)
        inv_B = tl.full((B,), 1.0, dtype=tl.float32)
    v_BK = x_BK
    if not TOPK_FIRST:
        v_BK = score_of(x_BK, max_B[:, None], inv_B[:, None], SCORE, SCORE_DTYPE)
    if PACKING == "monotone":
        unsure_BK = v_BK != v_BK
        if BY_SCORES:
            unsure_BK = may_share_score(
                best_BK, x_BK, v_BK, max_B[:, None], inv_B[:, None],
                SCORE, SCORE_DTYPE, MANTISSA, C,
            )  # fmt: skip
        bad_B = tl.max((used_BK & unsure_BK).to(tl.int32), axis=1) > 0
    if CHECK:  # noqa: SIM102
        # A compile-time condition and a run-time condition cannot be in one `if`.
        if tl.max(bad_B.to(tl.int32), axis=0) > 0:
            if PACKING == "monotone":
                x_BWL = load_tile(row_B, e_WL, exists_WL, stride_e)
                key_BWL = tl.where(exists_WL, key_of(x_BWL), NO_KEY)
            if BY_SCORES:
                max_B = row_max(x_BWL)
                inv_B = 1.0 / row_sum(tl.exp(x_BWL - max_B[:, None, None]))
                s_BWL = score_of(
                    x_BWL, max_B[:, None, None], inv_B[:, None, None], SCORE, SCORE_DTYPE
                )
                key_BWL = tl.where(exists_WL, key_of(s_BWL), NO_KEY)
            exact_BK = select_exactly(key_BWL, c_WL, C, K, KP)
            if SIZE != SIZE_P2:
                exact_BK = (exact_BK // SIZE_P2) * SIZE + exact_BK % SIZE_P2
            exact_v_BK = load_at(row_B, exact_BK, used_BK, stride_e)
            if not TOPK_FIRST:
                exact_v_BK = score_of(
                    exact_v_BK, max_B[:, None], inv_B[:, None], SCORE, SCORE_DTYPE
                )
            # Replace only the affected rows, so that a row's result never depends on other rows.
            ids_BK = tl.where(bad_B[:, None], exact_BK, ids_BK)
            v_BK = tl.where(bad_B[:, None], exact_v_BK, v_BK)

    if TOPK_FIRST:
        if SCORE == "softmax":
            v_BK = row_softmax(v_BK, used_BK, SCORE_DTYPE)
        else:
            v_BK = score_of(v_BK, max_B[:, None], inv_B[:, None], SCORE, SCORE_DTYPE)
    w_BK = weights_of(v_BK, used_BK, eps, scale, RENORMALIZE, CLAMP, SCORE_DTYPE)
    stored_BK = used_BK & inside_B[:, None]
    out_BK = t_B.to(tl.int64)[:, None] * K + k_K[None, :]
    tl.store(ids_ptr + out_BK, ids_BK, mask=stored_BK)
    tl.store(weights_ptr + out_BK, w_BK, mask=stored_BK)


@triton.jit(do_not_specialize=["T"])
def backward_kernel(
    dweights_ptr, logits_ptr, ids_ptr, dlogits_ptr,
    T, stride_dw_t, stride_dw_k, stride_t, stride_e, stride_i_t, stride_i_k, eps, scale,
    E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    B: tl.constexpr, W: tl.constexpr, L: tl.constexpr,
    SCORE: tl.constexpr, TOPK_FIRST: tl.constexpr, RENORMALIZE: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(T, B),). A row's gradient is its K chosen terms, and for softmax a dense term."""
    t_B = tl.program_id(0) * B + tl.arange(0, B)
    inside_B = t_B < T
    safe_B = tl.minimum(t_B, T - 1).to(tl.int64)
    k_K = tl.arange(0, KP)
    in_BK = (k_K < K)[None, :] & (t_B >= 0)[:, None]
    row_B = logits_ptr + safe_B * stride_t
    ids_BK = tl.load(
        ids_ptr + safe_B[:, None] * stride_i_t + k_K[None, :] * stride_i_k, mask=in_BK, other=-1
    ).to(tl.int32)
    used_BK = (ids_BK >= 0) & (ids_BK < E)
    dw_BK = tl.load(
        dweights_ptr + safe_B[:, None] * stride_dw_t + k_K[None, :] * stride_dw_k,
        mask=used_BK, other=0.0,
    ).to(tl.float32)  # fmt: skip
    x_BK = load_at(row_B, ids_BK, used_BK, stride_e)
    e_WL = tl.arange(0, W)[None, :, None] * L + tl.arange(0, L)[None, None, :]

    dense: tl.constexpr = SCORE == "softmax" and not TOPK_FIRST
    max_B = tl.zeros((B,), dtype=tl.float32)
    inv_B = tl.zeros((B,), dtype=tl.float32)
    if dense:
        x_BWL = load_tile(row_B, e_WL, e_WL < E, stride_e)
        max_B = row_max(x_BWL)
        p_BWL = tl.exp(x_BWL - max_B[:, None, None])
        inv_B = 1.0 / row_sum(p_BWL)
    if TOPK_FIRST and SCORE == "softmax":
        v_BK = row_softmax(x_BK, used_BK, tl.float32)
    else:
        v_BK = score_of(x_BK, max_B[:, None], inv_B[:, None], SCORE, tl.float32)

    dv_BK = weights_grad(dw_BK, v_BK, used_BK, eps, scale, RENORMALIZE, CLAMP)
    if SCORE == "softmax":
        dot_B = tl.sum(tl.where(used_BK, dv_BK * v_BK, 0.0), axis=1)
        dx_BK = dv_BK if dense else v_BK * (dv_BK - dot_B[:, None])
    else:
        dx_BK = dv_BK * score_slope(x_BK, v_BK, SCORE)

    ids_BK = tl.where(used_BK, ids_BK, -1)
    dx_BWL = tl.zeros((B, W, L), dtype=tl.float32)
    for k in tl.static_range(K):
        at_k = (k_K == k)[None, :]
        id_B = tl.sum(tl.where(at_k, ids_BK, 0), axis=1)
        dx_B = tl.sum(tl.where(at_k, dx_BK, 0.0), axis=1)
        dx_BWL = tl.where(e_WL == id_B[:, None, None], dx_B[:, None, None], dx_BWL)
    if dense:
        dx_BWL = p_BWL * inv_B[:, None, None] * (dx_BWL - dot_B[:, None, None])
    tl.store(
        dlogits_ptr + t_B.to(tl.int64)[:, None, None] * E + e_WL, dx_BWL,
        mask=inside_B[:, None, None] & (e_WL < E),
    )  # fmt: skip
