"""Device functions the routing kernels share: rounding, order-preserving keys, scores, weights.

A *key* is an integer that orders like the value it stands for: NaN above everything (as in
torch.sort), -0 equal to +0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TRITON_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# Below the key of -inf: columns that do not exist and columns already chosen.
NO_KEY = tl.constexpr(-0x7FFFFFFF)
NAN_KEY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """What is left of fp32 x after a trip through DTYPE."""
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def key_of(x):
    """fp32 -> int32 key."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return tl.where(x == x, key, NAN_KEY)


@triton.jit
def value_of(key):
    """The inverse of :func:`key_of` (-0 comes back as +0)."""
    bits = tl.where(key < 0, (-key) | -0x80000000, key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def short_key_of(x, DTYPE: tl.constexpr):
    """fp32 x, exact in the 16-bit DTYPE -> its key in int32, at most 0x7FFF in magnitude."""
    bits = x.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
    key = tl.where(bits < 0, -(bits & 0x7FFF), bits)
    return tl.where(x == x, key, 0x7FFF)


@triton.jit
def short_value_of(key, DTYPE: tl.constexpr):
    """The inverse of :func:`short_key_of`, as fp32."""
    bits = tl.where(key < 0, (-key) | 0x8000, key)
    return bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), accurate where exp(x) vanishes beside 1; x itself above 20, as in torch."""
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u
    log1p = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.where(x > 20.0, x, tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + log1p)


@triton.jit
def score_of(x, row_max, row_inv, SCORE: tl.constexpr, DTYPE: tl.constexpr):
    """Scores of logits x in DTYPE; softmax takes the row's maximum and 1 / sum of exponentials."""
    if SCORE == "softmax":
        return rounded(tl.exp(x - row_max) * row_inv, DTYPE)
    elif SCORE == "sigmoid":
        return rounded(tl.sigmoid(x), DTYPE)
    elif SCORE == "sqrtsoftplus":
        return rounded(tl.sqrt(rounded(softplus(x), DTYPE)), DTYPE)
    else:
        return x


@triton.jit
def score_slope(x, s, SCORE: tl.constexpr):
    """ds/dx of the elementwise scores; s is the score of x, unrounded."""
    if SCORE == "sigmoid":
        # Not 1 - s, which cancels where s nears 1.
        return s * tl.sigmoid(-x)
    elif SCORE == "sqrtsoftplus":
        # exp(x / 2) / 2 is the limit; there both the slope and s underflow.
        return tl.where(s > 0.0, tl.sigmoid(x) / (2.0 * tl.where(s > 0.0, s, 1.0)), 0.0)
    else:
        return x * 0.0 + 1.0


@triton.jit
def row_softmax(x_BK, used_BK, DTYPE: tl.constexpr):
    """Softmax over the used columns of each row, 0 elsewhere; NaN in a used column spreads."""
    top_B = tl.max(tl.where(used_BK, x_BK, float("-inf")), axis=1)
    p_BK = tl.where(used_BK, tl.exp(x_BK - top_B[:, None]), 0.0)
    return rounded(p_BK / tl.sum(p_BK, axis=1)[:, None], DTYPE)


@triton.jit
def weights_of(
    v_BK, used_BK, eps, scale, RENORMALIZE: tl.constexpr, CLAMP: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Weights of chosen scores v: renormalised, scaled, each step rounded as torch rounds it."""
    w_BK = tl.where(used_BK, v_BK, 0.0)
    if RENORMALIZE:
        total_B = rounded(tl.sum(w_BK, axis=1), DTYPE)
        if CLAMP:
            total_B = tl.maximum(total_B, eps, propagate_nan=tl.PropagateNan.ALL)
        else:
            total_B = total_B + eps
        w_BK = rounded(w_BK / rounded(total_B, DTYPE)[:, None], DTYPE)
    return rounded(w_BK * scale, DTYPE)


@triton.jit
def weights_grad(
    dw_BK, v_BK, used_BK, eps, scale, RENORMALIZE: tl.constexpr, CLAMP: tl.constexpr
):  # fmt: skip
    """Gradient to the chosen scores v from the gradient to the weights."""
    dv_BK = tl.where(used_BK, dw_BK * scale, 0.0)
    if RENORMALIZE:
        v_BK = tl.where(used_BK, v_BK, 0.0)
        sum_B = tl.sum(v_BK, axis=1)
        dot_B = tl.sum(dv_BK * v_BK, axis=1)
        if CLAMP:
            total_B = tl.maximum(sum_B, eps, propagate_nan=tl.PropagateNan.ALL)
            dot_B = tl.where(sum_B >= eps, dot_B, 0.0)
        else:
            total_B = sum_B + eps
        dv_BK = (dv_BK - (dot_B / total_B)[:, None]) / total_B[:, None]
    return tl.where(used_BK, dv_BK, 0.0)
