"""Routing in Triton: logits_TE -> ids_TK, weights_TK in one launch, and dlogits_TE in one launch.

The meaning is ``moe_patch.routing.route``, its order of ties and its rounding included. A program
owns whole rows: nothing is accumulated across programs except, on request, integer token counts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_patch.kernels.device import on_device_of
from moe_patch.kernels.routing_math import (
    NO_KEY,
    TRITON_DTYPE,
    key_of,
    rounded,
    row_softmax,
    score_of,
    score_slope,
    value_of,
    weights_grad,
    weights_of,
)
from moe_patch.kernels.routing_select import (
    limit_groups,
    pack_short,
    pack_truncated,
    row_max,
    row_sum,
    select_exactly,
    select_packed,
    tile_of,
)
from moe_patch.routing import RouteSpec

# Logits a backward program of one warp holds.
ROW_ELEMENTS = 512


class RouteForward(NamedTuple):
    """What one forward launch wrote.

    Attributes:
        ids_TK: expert ids in descending order of the choice score, of the integer dtype asked for.
        weights_TK: routing weights in the dtype the spec asks for.
        tokens_E: int32 rows per expert, or an empty tensor.
        lse_T: fp32 log-sum-exp of each row's logits, or an empty tensor.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    tokens_E: Tensor
    lse_T: Tensor


class Columns(NamedTuple):
    """How experts lie on the columns of a forward program's tile: group by group, padded.

    Attributes:
        groups, size: experts are groups * size; one group when there is no group limit.
        groups_p2, size_p2: the same padded to powers of two; groups_p2 * size_p2 columns.
    """

    groups: int
    size: int
    groups_p2: int
    size_p2: int


def score_dtype(logits_dtype: torch.dtype, spec: RouteSpec) -> torch.dtype:
    """The dtype in which scores are rounded."""
    return torch.float32 if spec.fp32 else logits_dtype


def columns_of(num_experts: int, spec: RouteSpec) -> Columns:
    """The columns a spec needs; a limit to all groups is none."""
    limited = spec.order == "score_topk" and spec.groups > 1 and spec.top_groups < spec.groups
    groups = spec.groups if limited else 1
    size = num_experts // groups
    return Columns(groups, size, triton.next_power_of_2(groups), triton.next_power_of_2(size))


def route_forward(
    logits_TE: Tensor,
    spec: RouteSpec,
    bias_E: Tensor | None = None,
    *,
    ids_dtype: torch.dtype = torch.int64,
    count_tokens: bool = False,
    with_lse: bool = False,
) -> RouteForward:
    """Choose and weight ``spec.top_k`` experts per row, in one launch.

    Args:
        logits_TE: fp32, bf16 or fp16, any strides, E at most 512.
        spec: the family's choices, with ties="lower".
        bias_E: correction bias of any of these dtypes, for the choice only.
        ids_dtype: int32 or int64.
        count_tokens: also count the rows per expert (exact: integer atomics; one more launch to
            clear the counts).
        with_lse: also return log(sum(exp(logits))) per row.
    """
    T, E = logits_TE.shape
    scores = score_dtype(logits_TE.dtype, spec)
    choice = scores if bias_E is None else torch.promote_types(scores, bias_E.dtype)
    columns = columns_of(E, spec)
    tile = tile_of(columns.groups_p2 * columns.size_p2, T, logits_TE.dtype.itemsize)
    new = logits_TE.new_empty
    ids_TK = new(T, spec.top_k, dtype=ids_dtype)
    weights_TK = new(T, spec.top_k, dtype=spec.weights_dtype or scores)
    tokens_E = logits_TE.new_zeros(E if count_tokens else 0, dtype=torch.int32)
    lse_T = new(T if with_lse else 0, dtype=torch.float32)
    if T == 0:
        return RouteForward(ids_TK, weights_TK, tokens_E, lse_T)
    by_logits = spec.order == "topk_score" or spec.bias_on == "logits"
    packing = _packing(logits_TE.dtype, choice, bias_E is not None or columns.groups > 1)
    # Renormalised softmax weights of chosen logits do not depend on the other logits' sum.
    sums_chosen = packing == "monotone" and not by_logits and spec.renormalize and spec.eps == 0.0
    needs_sum = spec.score == "softmax" and spec.order == "score_topk" and not sums_chosen
    with on_device_of(logits_TE):
        _forward_kernel[(triton.cdiv(T, tile.rows),)](
            logits_TE, logits_TE if bias_E is None else bias_E.contiguous(),
            ids_TK, weights_TK, tokens_E, lse_T,
            T, *logits_TE.stride(), spec.eps, spec.scale, spec.group_fill,
            E=E, K=spec.top_k, KP=triton.next_power_of_2(spec.top_k),
            B=tile.rows, W=tile.chunks, L=tile.chunk,
            GROUPS=columns.groups, SIZE=columns.size,
            GROUPS_P2=columns.groups_p2, SIZE_P2=columns.size_p2,
            TOP_GROUPS=spec.top_groups, TOP2=spec.group_score == "top2",
            SCORE=spec.score, TOPK_FIRST=spec.order == "topk_score", BY_LOGITS=by_logits,
            HAS_BIAS=bias_E is not None,
            PACKING=packing,
            SCORE_DTYPE=TRITON_DTYPE[scores], CHOICE_DTYPE=TRITON_DTYPE[choice],
            SUM=with_lse or needs_sum, RENORMALIZE=spec.renormalize, CLAMP=spec.clamp_eps, COUNT=count_tokens, LSE=with_lse,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return RouteForward(ids_TK, weights_TK, tokens_E, lse_T)


def route_backward(
    dweights_TK: Tensor, logits_TE: Tensor, ids_TK: Tensor, spec: RouteSpec
) -> Tensor:
    """Gradient to the logits, contiguous, in their dtype: each row written whole by its own program.

    Evaluated in fp32 from the logits and rounded once; the rounding of the forward pass counts as
    the identity, and the choice of ids carries no gradient.

    Args:
        dweights_TK: gradient to the routing weights, any floating dtype and strides.
        logits_TE: what the forward pass read.
        ids_TK: what it chose, any integer dtype; an id outside [0, E) is an empty slot.
        spec: the family's choices.
    """
    T, E = logits_TE.shape
    dlogits_TE = torch.empty(T, E, dtype=logits_TE.dtype, device=logits_TE.device)
    if T == 0:
        return dlogits_TE
    columns = triton.next_power_of_2(E)
    block = min(max(1, ROW_ELEMENTS // columns), triton.next_power_of_2(T))
    with on_device_of(logits_TE):
        _backward_kernel[(triton.cdiv(T, block),)](
            dweights_TK, logits_TE, ids_TK, dlogits_TE,
            T, *dweights_TK.stride(), *logits_TE.stride(), *ids_TK.stride(), spec.eps, spec.scale,
            E=E, K=spec.top_k, KP=triton.next_power_of_2(spec.top_k), BLOCK=block, C=columns,
            SCORE=spec.score, TOPK_FIRST=spec.order == "topk_score",
            RENORMALIZE=spec.renormalize, CLAMP=spec.clamp_eps, num_warps=1,
        )  # fmt: skip
    return dlogits_TE


def _packing(logits: torch.dtype, choice: torch.dtype, reordered: bool) -> str:
    if choice.itemsize == 2:
        return "short"
    return "monotone" if logits.itemsize == 2 and not reordered else "truncated"


@triton.jit
def _load_at(row_B, cols_BK, used_BK, stride):
    return tl.load(
        row_B[:, None] + cols_BK.to(tl.int64) * stride, mask=used_BK, other=0.0
    ).to(tl.float32)  # fmt: skip


@triton.jit
def _load_tile(row_B, e_WL, exists_WL, stride_e):
    return tl.load(
        row_B[:, None, None] + e_WL.to(tl.int64) * stride_e, mask=exists_WL, other=float("-inf")
    ).to(tl.float32)  # fmt: skip


@triton.jit
def _forward_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, tokens_ptr, lse_ptr,
    T, stride_t, stride_e, eps, scale, group_fill,
    E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    B: tl.constexpr, W: tl.constexpr, L: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, GROUPS_P2: tl.constexpr, SIZE_P2: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, SCORE: tl.constexpr, TOPK_FIRST: tl.constexpr,
    BY_LOGITS: tl.constexpr, HAS_BIAS: tl.constexpr, PACKING: tl.constexpr,
    SCORE_DTYPE: tl.constexpr, CHOICE_DTYPE: tl.constexpr, SUM: tl.constexpr,
    RENORMALIZE: tl.constexpr, CLAMP: tl.constexpr, COUNT: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(T, B),). The C columns of a tile hold the experts group by group, padded."""
    C: tl.constexpr = W * L
    t_B = tl.program_id(0) * B + tl.arange(0, B)
    inside_B = t_B < T
    # Rows past the end repeat the last one and are not stored.
    row_B = logits_ptr + tl.minimum(t_B, T - 1).to(tl.int64) * stride_t
    c_WL = tl.arange(0, W)[None, :, None] * L + tl.arange(0, L)[None, None, :]
    e_WL = c_WL if SIZE == SIZE_P2 else (c_WL // SIZE_P2) * SIZE + c_WL % SIZE_P2
    exists_WL = (c_WL % SIZE_P2 < SIZE) & (c_WL < GROUPS * SIZE_P2)
    x_BWL = _load_tile(row_B, e_WL, exists_WL, stride_e)

    max_B = tl.zeros((B,), dtype=tl.float32)
    inv_B = tl.zeros((B,), dtype=tl.float32)
    if SUM:
        max_B = row_max(x_BWL)
        sum_B = row_sum(tl.exp(x_BWL - max_B[:, None, None]))
        inv_B = 1.0 / sum_B
        if LSE:
            tl.store(lse_ptr + t_B, max_B + tl.log(sum_B), mask=inside_B)

    if PACKING == "monotone":
        packed_BWL = pack_short(x_BWL, exists_WL, c_WL, C, logits_ptr.dtype.element_ty)
    else:
        choice_BWL = x_BWL
        if not BY_LOGITS:
            choice_BWL = score_of(x_BWL, max_B[:, None, None], inv_B[:, None, None], SCORE, SCORE_DTYPE)
        if HAS_BIAS:
            bias_WL = tl.load(bias_ptr + e_WL, mask=exists_WL, other=0.0).to(tl.float32)
            choice_BWL = rounded(choice_BWL + bias_WL, CHOICE_DTYPE)
        key_BWL = tl.where(exists_WL, key_of(choice_BWL), NO_KEY)
        if GROUPS > 1:
            fill_key = key_of(rounded(tl.zeros((1, 1, 1, 1, 1), tl.float32) + group_fill, CHOICE_DTYPE))
            key_BWL = limit_groups(
                key_BWL, fill_key, GROUPS, GROUPS_P2, SIZE_P2, TOP_GROUPS, TOP2, CHOICE_DTYPE
            )
        if PACKING == "short":
            packed_BWL = pack_short(value_of(key_BWL), exists_WL, c_WL, C, CHOICE_DTYPE)
        else:
            packed_BWL = pack_truncated(key_BWL, c_WL, C)

    CHECK: tl.constexpr = PACKING == "truncated" or (PACKING == "monotone" and not BY_LOGITS)
    cols_BK, next_BK, bad_B = select_packed(packed_BWL, C, K, KP, CHECK)
    k_K = tl.arange(0, KP)
    used_BK = (k_K < K)[None, :] & (t_B >= 0)[:, None]
    ids_BK = cols_BK if SIZE == SIZE_P2 else (cols_BK // SIZE_P2) * SIZE + cols_BK % SIZE_P2
    v_BK = _load_at(row_B, ids_BK, used_BK, stride_e)
    if PACKING == "monotone" and CHECK:
        # Where all E experts are chosen the last has no successor; any column may stand in.
        next_v_BK = _load_at(row_B, tl.minimum(next_BK, E - 1), used_BK, stride_e)
        differ_BK = used_BK & (v_BK != next_v_BK)
        if not SUM and SCORE == "softmax":
            # A weight's denominator is then the sum over the chosen: any common factor will do.
            max_B = tl.max(tl.where(used_BK, v_BK, float("-inf")), axis=1)
            inv_B = tl.full((B,), 1.0, dtype=tl.float32)
        v_BK = score_of(v_BK, max_B[:, None], inv_B[:, None], SCORE, SCORE_DTYPE)
        next_v_BK = score_of(next_v_BK, max_B[:, None], inv_B[:, None], SCORE, SCORE_DTYPE)
        bad_BK = (differ_BK & (v_BK == next_v_BK)) | (used_BK & (v_BK != v_BK))
        bad_B = tl.max(bad_BK.to(tl.int32), axis=1) > 0
    elif not TOPK_FIRST:
        v_BK = score_of(v_BK, max_B[:, None], inv_B[:, None], SCORE, SCORE_DTYPE)
    if CHECK:
        if tl.max(bad_B.to(tl.int32), axis=0) > 0:
            if PACKING == "monotone":
                x_BWL = _load_tile(row_B, e_WL, exists_WL, stride_e)
                max_B = row_max(x_BWL)
                inv_B = 1.0 / row_sum(tl.exp(x_BWL - max_B[:, None, None]))
                s_BWL = score_of(x_BWL, max_B[:, None, None], inv_B[:, None, None], SCORE, SCORE_DTYPE)
                key_BWL = tl.where(exists_WL, key_of(s_BWL), NO_KEY)
            # Only the rows in question, so that a row's bits never depend on its neighbours.
            exact_BK = select_exactly(key_BWL, c_WL, C, K, KP)
            cols_BK = tl.where(bad_B[:, None], exact_BK, cols_BK)
            ids_BK = cols_BK if SIZE == SIZE_P2 else (cols_BK // SIZE_P2) * SIZE + cols_BK % SIZE_P2
            exact_v_BK = _load_at(row_B, ids_BK, used_BK, stride_e)
            if not TOPK_FIRST:
                exact_v_BK = score_of(exact_v_BK, max_B[:, None], inv_B[:, None], SCORE, SCORE_DTYPE)
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
    if COUNT:
        tl.atomic_add(tokens_ptr + ids_BK, 1, mask=stored_BK, sem="relaxed")


@triton.jit
def _backward_kernel(
    dweights_ptr, logits_ptr, ids_ptr, dlogits_ptr,
    T, stride_dw_t, stride_dw_k, stride_t, stride_e, stride_i_t, stride_i_k, eps, scale,
    E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
    SCORE: tl.constexpr, TOPK_FIRST: tl.constexpr, RENORMALIZE: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(T, BLOCK),). A row's gradient is the K chosen terms plus, for softmax, a dense one."""
    t_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
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
    x_BK = _load_at(row_B, ids_BK, used_BK, stride_e)
    e_C = tl.arange(0, C)

    dense: tl.constexpr = SCORE == "softmax" and not TOPK_FIRST
    max_B = tl.zeros((BLOCK,), dtype=tl.float32)
    inv_B = tl.zeros((BLOCK,), dtype=tl.float32)
    if dense:
        x_BC = tl.load(
            row_B[:, None] + (e_C.to(tl.int64) * stride_e)[None, :],
            mask=(e_C < E)[None, :], other=float("-inf"),
        ).to(tl.float32)  # fmt: skip
        max_B = tl.max(x_BC, axis=1)
        p_BC = tl.exp(x_BC - max_B[:, None])
        inv_B = 1.0 / tl.sum(p_BC, axis=1)
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

    dx_BC = tl.zeros((BLOCK, C), dtype=tl.float32)
    for k in tl.static_range(K):
        at_k = (k_K == k)[None, :]
        id_B = tl.sum(tl.where(at_k, tl.where(used_BK, ids_BK, -1), 0), axis=1)
        dx_B = tl.sum(tl.where(at_k, dx_BK, 0.0), axis=1)
        dx_BC += tl.where(e_C[None, :] == id_B[:, None], dx_B[:, None], 0.0)
    if dense:
        dx_BC = p_BC * inv_B[:, None] * (dx_BC - dot_B[:, None])
    tl.store(
        dlogits_ptr + t_B.to(tl.int64)[:, None] * E + e_C[None, :], dx_BC,
        mask=inside_B[:, None] & (e_C < E)[None, :],
    )  # fmt: skip
