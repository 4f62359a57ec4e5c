"""Weights of prescribed experts in Triton, in one launch; see ``ops.routing.weights_at``.

The kernel takes the steps that route_kernels.forward_kernel takes after its choice, over the same
tile. So the experts that forward_kernel chose get the weights that it computed, bit for bit.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_patch.kernels.common.device import cdiv, on_device_of
from moe_patch.kernels.common.launcher import Constants, Launcher
from moe_patch.kernels.routing.math import row_softmax, score_of, weights_of
from moe_patch.kernels.routing.route import forward_constants, rounded_up, score_dtype
from moe_patch.kernels.routing.route_kernels import load_at, load_tile, may_share_score
from moe_patch.kernels.routing.select import row_max, row_sum
from moe_patch.types import RouteSpec

# Constants of forward_kernel that only its choice needs.
_OF_THE_CHOICE = (
    "GROUPS_P2", "TOP_GROUPS", "TOP2", "HAS_BIAS", "CHOICE_DTYPE", "POSITIVE_NAN", "BY_LOGITS",
    "PACKING",
)  # fmt: skip


def weights_at(logits_TE: Tensor, ids_TK: Tensor, spec: RouteSpec, biased: bool) -> Tensor:
    """Compute the weights [T, K] of these experts, in the dtype of ``route_forward``.

    Args:
        logits_TE, spec: as for ``route_forward``.
        ids_TK: int32 or int64, any strides, K different experts per row.
        biased: whether ``route_forward`` gets a correction bias, which changes its roundings.
    """
    T, E = logits_TE.shape
    dtype = spec.weights_dtype or score_dtype(logits_TE.dtype, spec)
    weights_TK = logits_TE.new_empty(T, spec.top_k, dtype=dtype)
    if T > 0:
        made = _constants(spec, E, rounded_up(T), logits_TE.dtype, biased, logits_TE.is_cuda)
        with on_device_of(logits_TE):
            _launch(
                (cdiv(T, made["B"]),),
                (logits_TE, ids_TK, weights_TK),
                (T,),
                (*logits_TE.stride(), *ids_TK.stride(), float(spec.eps), float(spec.scale)),
                made,
            )
    return weights_TK


@functools.cache
def _constants(
    spec: RouteSpec, E: int, tokens: int, logits: torch.dtype, biased: bool, on_cuda: bool
) -> Constants:
    bias = torch.float32 if biased else None
    made = forward_constants(spec, E, tokens, logits, bias, on_cuda)
    kept = {name: value for name, value in made.items() if name not in _OF_THE_CHOICE}
    over_chosen = made["SCORE"] == "softmax" and not made["TOPK_FIRST"] and not made["SUM"]
    return Constants(**kept, OVER_CHOSEN=over_chosen)


@triton.jit(do_not_specialize=["T"])
def weights_at_kernel(
    logits_ptr, ids_ptr, weights_ptr,
    T, stride_t, stride_e, stride_i_t, stride_i_k, eps, scale,
    E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    B: tl.constexpr, W: tl.constexpr, L: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, SIZE_P2: tl.constexpr,
    SCORE: tl.constexpr, TOPK_FIRST: tl.constexpr, SCORE_DTYPE: tl.constexpr, SUM: tl.constexpr,
    OVER_CHOSEN: tl.constexpr, RENORMALIZE: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(T, B),). OVER_CHOSEN: a softmax whose sum over the other experts cancels."""
    MANTISSA: tl.constexpr = 7 if logits_ptr.dtype.element_ty == tl.bfloat16 else 10
    t_B = tl.program_id(0) * B + tl.arange(0, B)
    safe_B = tl.minimum(t_B, T - 1).to(tl.int64)
    row_B = logits_ptr + safe_B * stride_t
    k_K = tl.arange(0, KP)
    used_BK = k_K[None, :] + 0 * t_B[:, None] < K
    ids_BK = tl.load(
        ids_ptr + safe_B[:, None] * stride_i_t + k_K[None, :] * stride_i_k, mask=used_BK, other=0
    )
    x_BK = load_at(row_B, ids_BK, used_BK, stride_e)
    c_WL = tl.arange(0, W)[None, :, None] * L + tl.arange(0, L)[None, None, :]
    e_WL = c_WL if SIZE == SIZE_P2 else (c_WL // SIZE_P2) * SIZE + c_WL % SIZE_P2
    exists_WL = (c_WL % SIZE_P2 < SIZE) & (c_WL < GROUPS * SIZE_P2)

    max_B = tl.zeros((B,), dtype=tl.float32)
    inv_B = tl.zeros((B,), dtype=tl.float32)
    if SUM or OVER_CHOSEN:
        x_BWL = load_tile(row_B, e_WL, exists_WL, stride_e)
        max_B = row_max(x_BWL)
        inv_B = 1.0 / row_sum(tl.exp(x_BWL - max_B[:, None, None]))
    if TOPK_FIRST and SCORE == "softmax":
        v_BK = row_softmax(x_BK, used_BK, SCORE_DTYPE)
    else:
        v_BK = score_of(x_BK, max_B[:, None], inv_B[:, None], SCORE, SCORE_DTYPE)
    if OVER_CHOSEN:
        # forward_kernel leaves the sum over all experts to rows that it has to choose again.
        top_B = tl.max(tl.where(used_BK, x_BK, float("-inf")), axis=1)
        one_B = tl.full((B,), 1.0, dtype=tl.float32)
        over_BK = score_of(x_BK, top_B[:, None], one_B[:, None], SCORE, SCORE_DTYPE)
        unsure_BK = (over_BK != over_BK) | may_share_score(
            ids_BK, x_BK, over_BK, top_B[:, None], one_B[:, None], SCORE, SCORE_DTYPE, MANTISSA,
            W * L,
        )  # fmt: skip
        again_B = tl.max((used_BK & unsure_BK).to(tl.int32), axis=1) > 0
        # A NaN that no id names is in the sum over all experts.
        again_B = again_B | (inv_B != inv_B)
        v_BK = tl.where(again_B[:, None], v_BK, over_BK)
    w_BK = weights_of(v_BK, used_BK, eps, scale, RENORMALIZE, CLAMP, SCORE_DTYPE)
    tl.store(
        weights_ptr + t_B.to(tl.int64)[:, None] * K + k_K[None, :], w_BK,
        mask=used_BK & (t_B < T)[:, None],
    )  # fmt: skip


_launch = Launcher(weights_at_kernel)
