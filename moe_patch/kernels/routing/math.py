"""Device functions of the routing kernels: rounding, order-preserving keys, scores, weights.

A *key* is an integer that orders like the value it encodes: NaN above everything (as in
torch.sort), -0 equal to +0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TRITON_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# Key of columns that do not exist or are already chosen; it is below the key of -inf.
NO_KEY = tl.constexpr(-0x7FFFFFFF)
NAN_KEY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Round fp32 x to DTYPE and convert back."""
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def key_of(x):
    """Return the int32 key of an fp32 value."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return tl.where(x == x, key, NAN_KEY)


@triton.jit
def value_of(key):
    """Invert :func:`key_of`; -0 becomes +0."""
    bits = tl.where(key < 0, (-key) | -0x80000000, key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def short_key_of(x, DTYPE: tl.constexpr):
    """Return the key of fp32 x that is exact in 16-bit DTYPE: int32, magnitude at most 0x7FFF."""
    bits = x.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
    key = tl.where(bits < 0, -(bits & 0x7FFF), bits)
    return tl.where(x == x, key, 0x7FFF)


@triton.jit
def short_value_of(key, DTYPE: tl.constexpr):
    """Invert :func:`short_key_of`; returns fp32."""
    bits = tl.where(key < 0, (-key) | 0x8000, key)
    return bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), accurate also for tiny exp(x); x itself above 20, as in torch."""
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u
    log1p = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.where(x > 20.0, x, tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + log1p)


@triton.jit
def score_of(x, row_max, row_inv, SCORE: tl.constexpr, DTYPE: tl.constexpr):
    """Return scores of logits x in DTYPE; softmax uses the row's maximum and 1 / sum of exp."""
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
    """Return ds/dx of the elementwise scores; s is the unrounded score of x."""
    if SCORE == "sigmoid":
        # sigmoid(-x) instead of 1 - s, which loses precision as s approaches 1.
        return s * tl.sigmoid(-x)
    elif SCORE == "sqrtsoftplus":
        # As x goes to -inf the slope tends to exp(x / 2) / 2. It underflows together with s.
        return tl.where(s > 0.0, tl.sigmoid(x) / (2.0 * tl.where(s > 0.0, s, 1.0)), 0.0)
    else:
        return x * 0.0 + 1.0


@triton.jit
def sum_pairs(x_BK):
    """Sum each row, a power of two of columns: neighbours, then pairs of neighbours, and so on.

    ``tl.sum`` would sum in an order that depends on the layout which the compiler chose.
    """
    B: tl.constexpr = x_BK.shape[0]
    K: tl.constexpr = x_BK.shape[1]
    if K == 1:
        total_B = tl.reshape(x_BK, (B,))
    else:
        total_B = sum_pairs(tl.sum(tl.reshape(x_BK, (B, K // 2, 2)), axis=2))
    return total_B


@triton.jit
def row_softmax(x_BK, used_BK, DTYPE: tl.constexpr):
    """Compute softmax over the used columns of each row, 0 elsewhere; NaN in a row propagates."""
    top_B = tl.max(tl.where(used_BK, x_BK, float("-inf")), axis=1)
    p_BK = tl.where(used_BK, tl.exp(x_BK - top_B[:, None]), 0.0)
    return rounded(p_BK / sum_pairs(p_BK)[:, None], DTYPE)


@triton.jit
def weights_of(
    v_BK, used_BK, eps, scale, RENORMALIZE: tl.constexpr, CLAMP: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Compute weights of chosen scores v: renormalise and scale, rounding each step like torch."""
    w_BK = tl.where(used_BK, v_BK, 0.0)
    if RENORMALIZE:
        total_B = rounded(sum_pairs(w_BK), DTYPE)
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
    """Compute the gradient of the chosen scores v from the gradient of the weights."""
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
