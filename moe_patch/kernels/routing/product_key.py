"""Product-key top-k in Triton: two rows of P logits -> K of P*P expert ids, in one launch each way.

``moe_patch.ops.product_key.product_key_reference`` defines the result. Forward, for each token:

1. Find the best K of x and of y by a partial bitonic sort. A key holds the value above the inverted
   index.
2. Form the candidate pairs. With both lists sorted, pair (i, j) has (i + 1)(j + 1) - 1 other pairs
   at or above its sum. So the *values* of the best K sums come from the pairs with
   (i + 1)(j + 1) <= K, about K ln K of them.
3. Resolve ties. Rounding can make sums equal, so a pair outside the candidates may tie the K-th sum
   with a lower id. All pairs above the K-th sum are candidates, so only ties with it matter. If the
   first non-candidate of any i reaches that sum, search all K * K pairs with that sum for the
   lowest ids, one by one. The choice is therefore exact by (sum, id).

Backward adds a token's K terms to its rows of dx and dy, in order, and writes both rows whole.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_patch.kernels.common.cache import compiling
from moe_patch.kernels.common.device import on_device_of
from moe_patch.kernels.routing.math import (
    TRITON_DTYPE,
    key_of,
    rounded,
    row_softmax,
    short_key_of,
    short_value_of,
    value_of,
    weights_grad,
    weights_of,
)

# Keys of one axis per backward program; more would spill registers.
BACKWARD_COLUMNS = 256


def product_key_forward(
    x_TP: Tensor, y_TP: Tensor, top_k: int, *, softmax: bool = True, renormalize: bool = False
) -> tuple[Tensor, Tensor]:
    """Return ids_TK (int64; -1 for an empty slot) and weights_TK of the best ``top_k`` pairs.

    Args:
        x_TP, y_TP: logits of one dtype (fp32, bf16, fp16), any strides, P at most 1024.
        top_k: at most 64.
        softmax: weights are the softmax of the sums; otherwise the sums.
        renormalize: divide the weights by their sum.
    """
    T, P = x_TP.shape
    ids_TK = torch.empty(T, top_k, dtype=torch.int64, device=x_TP.device)
    weights_TK = torch.empty(T, top_k, dtype=x_TP.dtype, device=x_TP.device)
    if T == 0:
        return ids_TK, weights_TK
    kept = min(top_k, P)
    inner = _inner_pairs(top_k, kept)
    with on_device_of(x_TP):
        compiling(
            _forward_kernel[(T,)],
            x_TP, y_TP, ids_TK, weights_TK, *x_TP.stride(), *y_TP.stride(),
            P=P, LOG_P=_log2_up(P), K=top_k, LOG_K=_log2_up(top_k),
            KEPT=kept, LOG_KEPT=_log2_up(kept), INNER=inner, LOG_INNER=_log2_up(max(inner, top_k)),
            WIDE=x_TP.dtype == torch.float32, DTYPE=TRITON_DTYPE[x_TP.dtype],
            SOFTMAX=softmax, RENORMALIZE=renormalize, num_warps=4 if top_k > 32 or P > 512 else 1,
        )  # fmt: skip
    return ids_TK, weights_TK


def product_key_backward(
    dweights_TK: Tensor,
    x_TP: Tensor,
    y_TP: Tensor,
    ids_TK: Tensor,
    *,
    softmax: bool = True,
    renormalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (dx_TP, dy_TP), contiguous and fully written; computed in fp32 and rounded once.

    Args:
        dweights_TK: gradient of the weights.
        x_TP, y_TP, softmax, renormalize: as in the forward pass.
        ids_TK: ids from forward, any integer dtype; an id outside [0, P * P) is an empty slot.
    """
    T, P = x_TP.shape
    K = ids_TK.shape[1]
    dx_TP = torch.empty(T, P, dtype=x_TP.dtype, device=x_TP.device)
    dy_TP = torch.empty(T, P, dtype=y_TP.dtype, device=y_TP.device)
    if T == 0:
        return dx_TP, dy_TP
    columns = min(triton.next_power_of_2(P), BACKWARD_COLUMNS)
    # Use at least two rows: for one row the compiler goes through shared memory for each term.
    block = max(2, min(512 // columns, triton.next_power_of_2(T)))
    with on_device_of(x_TP):
        compiling(
            _backward_kernel[(triton.cdiv(T, block), triton.cdiv(P, columns))],
            dweights_TK, x_TP, y_TP, ids_TK, dx_TP, dy_TP, T,
            *dweights_TK.stride(), *x_TP.stride(), *y_TP.stride(), *ids_TK.stride(),
            P=P, C=columns, K=K, KP=triton.next_power_of_2(K), BLOCK=block,
            SOFTMAX=softmax, RENORMALIZE=renormalize, num_warps=1,
        )  # fmt: skip
    return dx_TP, dy_TP


def _log2_up(n: int) -> int:
    """Return log2(n), rounded up, at least 1: tl.topk needs two elements."""
    return max(1, (n - 1).bit_length())


def _inner_pairs(top_k: int, kept: int) -> int:
    return sum(min(top_k // (i + 1), kept) for i in range(kept))


@triton.jit
def _best_of_row(
    row_ptr, stride, P: tl.constexpr, LOG_P: tl.constexpr, LOG_KEPT: tl.constexpr,
    WIDE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return packed keys [2**LOG_KEPT] of a row's largest logits, descending.

    The low bits of a packed key hold the inverted index.
    """
    c_P = tl.arange(0, 1 << LOG_P)
    x_P = tl.load(row_ptr + c_P.to(tl.int64) * stride, mask=c_P < P, other=float("-inf"))
    x_P = x_P.to(tl.float32)
    # Columns that do not exist have the key of -inf and a higher index than all real columns.
    if WIDE:
        packed_P = (key_of(x_P).to(tl.int64) << LOG_P) + ((1 << LOG_P) - 1 - c_P)
    else:
        packed_P = (short_key_of(x_P, DTYPE) << LOG_P) + ((1 << LOG_P) - 1 - c_P)
    return tl.topk(packed_P, 1 << LOG_KEPT)


@triton.jit
def _unpack(packed, LOG_P: tl.constexpr, WIDE: tl.constexpr, DTYPE: tl.constexpr):
    """Return (value, index) of a packed key."""
    index = ((1 << LOG_P) - 1 - (packed & ((1 << LOG_P) - 1))).to(tl.int32)
    if WIDE:
        return value_of((packed >> LOG_P).to(tl.int32)), index
    else:
        return short_value_of(packed >> LOG_P, DTYPE), index


@triton.jit
def _sum_keys(x, y, exists, WIDE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the keys of the rounded sums; -0x7FFFFFFF or -0x7FFF where there is no candidate."""
    total = rounded(x + y, DTYPE)
    infinite = (x == float("-inf")) | (y == float("-inf")) | (total == float("-inf"))
    if WIDE:
        return tl.where(exists & (infinite == 0), key_of(total), -0x7FFFFFFF)
    else:
        return tl.where(exists & (infinite == 0), short_key_of(total, DTYPE), -0x7FFF)


@triton.jit
def _inner_pair(c, K: tl.constexpr, KEPT: tl.constexpr):
    """Return the c-th pair (i, j) with (i + 1)(j + 1) <= K; row i has K // (i + 1) of them."""
    # If all K rows exist, rows from K // 3 on have one or two pairs and need no search.
    SEARCHED: tl.constexpr = K // 3 if KEPT == K else KEPT - 1
    start = 0
    i = tl.zeros_like(c)
    first = tl.zeros_like(c)
    for r in tl.static_range(SEARCHED):
        start += min(K // (r + 1), KEPT)
        i = tl.where(c >= start, r + 1, i)
        first = tl.where(c >= start, start, first)
    j = c - first
    if KEPT == K:
        rest = c - start
        DOUBLES: tl.constexpr = K // 2 - K // 3
        tail_i = tl.where(rest < 2 * DOUBLES, SEARCHED + rest // 2, SEARCHED + rest - DOUBLES)
        tail_j = tl.where(rest < 2 * DOUBLES, rest % 2, 0)
        i = tl.where(rest >= 0, tail_i, i)
        j = tl.where(rest >= 0, tail_j, j)
    return i, j


@triton.jit
def _fill_ties(
    ids_K, x_k, ix_k, y_k, iy_k, tie, above,
    P: tl.constexpr, K: tl.constexpr, KEPT: tl.constexpr, LOG_K: tl.constexpr,
    WIDE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Fill ids from ``above`` on with the lowest ids of all pairs whose sum has the key ``tie``."""
    k_K = tl.arange(0, 1 << LOG_K)
    k_k = tl.arange(0, x_k.shape[0])
    exists_kk = (k_k < KEPT)[:, None] & (k_k < KEPT)[None, :]
    key_kk = _sum_keys(x_k[:, None], y_k[None, :], exists_kk, WIDE, DTYPE)
    id_kk = tl.where(key_kk == tie, ix_k[:, None] * P + iy_k[None, :], P * P)
    last = -1
    slot = above
    while slot < K:
        last = tl.min(tl.min(tl.where(id_kk > last, id_kk, P * P), axis=1), axis=0)
        ids_K = tl.where(k_K == slot, last, ids_K)
        slot += 1
    return ids_K


@triton.jit
def _forward_kernel(
    x_ptr, y_ptr, ids_ptr, weights_ptr, stride_xt, stride_xp, stride_yt, stride_yp,
    P: tl.constexpr, LOG_P: tl.constexpr, K: tl.constexpr, LOG_K: tl.constexpr,
    KEPT: tl.constexpr, LOG_KEPT: tl.constexpr, INNER: tl.constexpr, LOG_INNER: tl.constexpr,
    WIDE: tl.constexpr, DTYPE: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one token per program."""
    t = tl.program_id(0).to(tl.int64)
    best_x_k = _best_of_row(x_ptr + t * stride_xt, stride_xp, P, LOG_P, LOG_KEPT, WIDE, DTYPE)
    best_y_k = _best_of_row(y_ptr + t * stride_yt, stride_yp, P, LOG_P, LOG_KEPT, WIDE, DTYPE)

    c_C = tl.arange(0, 1 << LOG_INNER)
    i_C, j_C = _inner_pair(c_C, K, KEPT)
    exists_C = (c_C < INNER) & (i_C < KEPT) & (j_C < KEPT)
    x_C, ix_C = _unpack(tl.gather(best_x_k, tl.where(exists_C, i_C, 0), 0), LOG_P, WIDE, DTYPE)
    y_C, iy_C = _unpack(tl.gather(best_y_k, tl.where(exists_C, j_C, 0), 0), LOG_P, WIDE, DTYPE)
    key_C = _sum_keys(x_C, y_C, exists_C, WIDE, DTYPE)
    if WIDE or LOG_P > 8:
        key_C = key_C.to(tl.int64)
    PAIRS: tl.constexpr = (1 << (2 * LOG_P)) - 1
    packed_K = tl.topk((key_C << (2 * LOG_P)) + (PAIRS - ((ix_C << LOG_P) | iy_C)), 1 << LOG_K)

    k_K = tl.arange(0, 1 << LOG_K)
    key_K = (packed_K >> (2 * LOG_P)).to(tl.int32)
    pair_K = (PAIRS - (packed_K & PAIRS)).to(tl.int32)
    NONE: tl.constexpr = -0x7FFFFFFF if WIDE else -0x7FFF
    found_K = (key_K > NONE) & (k_K < K)
    ids_K = tl.where(found_K, (pair_K >> LOG_P) * P + (pair_K & ((1 << LOG_P) - 1)), -1)

    tie = tl.min(tl.where(k_K < K, key_K, 0x7FFFFFFF), axis=0)
    x_k, ix_k = _unpack(best_x_k, LOG_P, WIDE, DTYPE)
    y_k, iy_k = _unpack(best_y_k, LOG_P, WIDE, DTYPE)
    k_k = tl.arange(0, 1 << LOG_KEPT)
    edge_k = K // (k_k + 1)
    edge_exists_k = (k_k < KEPT) & (edge_k < KEPT)
    edge_y_k, _ = _unpack(
        tl.gather(best_y_k, tl.where(edge_exists_k, edge_k, 0), 0), LOG_P, WIDE, DTYPE
    )
    edge_key_k = _sum_keys(x_k, edge_y_k, edge_exists_k, WIDE, DTYPE)
    if (tl.max(edge_key_k, axis=0) == tie) & (tie > NONE):
        above = tl.sum((found_K & (key_K > tie)).to(tl.int32), axis=0)
        ids_K = _fill_ties(ids_K, x_k, ix_k, y_k, iy_k, tie, above, P, K, KEPT, LOG_K, WIDE, DTYPE)

    v_K = value_of(key_K) if WIDE else short_value_of(key_K, DTYPE)
    w_1K = v_K[None, :]
    if SOFTMAX:
        w_1K = row_softmax(w_1K, found_K[None, :], DTYPE)
    w_1K = weights_of(w_1K, found_K[None, :], 0.0, 1.0, RENORMALIZE, False, DTYPE)
    out_1K = t * K + k_K[None, :]
    tl.store(ids_ptr + out_1K, ids_K[None, :], mask=(k_K < K)[None, :])
    tl.store(weights_ptr + out_1K, tl.where(found_K[None, :], w_1K, 0.0), mask=(k_K < K)[None, :])


@triton.jit
def _backward_kernel(
    dweights_ptr, x_ptr, y_ptr, ids_ptr, dx_ptr, dy_ptr, T,
    stride_wt, stride_wk, stride_xt, stride_xp, stride_yt, stride_yp, stride_it, stride_ik,
    P: tl.constexpr, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
    SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(T, BLOCK), cdiv(P, C)): BLOCK tokens and C keys of each axis per program."""
    t_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside_B = t_B < T
    t_B1 = tl.minimum(t_B, T - 1).to(tl.int64)[:, None]
    k_K = tl.arange(0, KP)
    in_BK = (k_K < K)[None, :] & (t_B1 >= 0)
    ids_BK = tl.load(ids_ptr + t_B1 * stride_it + k_K[None, :] * stride_ik, mask=in_BK, other=-1)
    used_BK = (ids_BK >= 0) & (ids_BK < P * P)
    ids_BK = tl.where(used_BK, ids_BK, 0).to(tl.int32)
    ix_BK, iy_BK = ids_BK // P, ids_BK % P
    dw_BK = tl.load(
        dweights_ptr + t_B1 * stride_wt + k_K[None, :] * stride_wk, mask=used_BK, other=0.0
    ).to(tl.float32)
    dv_BK = dw_BK
    if SOFTMAX:
        x_BK = tl.load(x_ptr + t_B1 * stride_xt + ix_BK * stride_xp, mask=used_BK, other=0.0)
        y_BK = tl.load(y_ptr + t_B1 * stride_yt + iy_BK * stride_yp, mask=used_BK, other=0.0)
        v_BK = x_BK.to(tl.float32) + y_BK.to(tl.float32)
        p_BK = tl.where(used_BK, row_softmax(v_BK, used_BK, tl.float32), 0.0)
        dv_BK = weights_grad(dw_BK, p_BK, used_BK, 0.0, 1.0, RENORMALIZE, False)
        dv_BK = p_BK * (dv_BK - tl.sum(dv_BK * p_BK, axis=1)[:, None])
    c_C = tl.program_id(1) * C + tl.arange(0, C)
    dx_BC = tl.zeros((BLOCK, C), dtype=tl.float32)
    dy_BC = tl.zeros((BLOCK, C), dtype=tl.float32)
    for k in tl.static_range(K):
        at_k = (k_K == k)[None, :] & used_BK
        # Shift indices by one, because 0 means "none" in these sums.
        ix_B = tl.sum(tl.where(at_k, ix_BK + 1, 0), axis=1) - 1
        iy_B = tl.sum(tl.where(at_k, iy_BK + 1, 0), axis=1) - 1
        dv_B = tl.sum(tl.where(at_k, dv_BK, 0.0), axis=1)
        dx_BC += tl.where(c_C[None, :] == ix_B[:, None], dv_B[:, None], 0.0)
        dy_BC += tl.where(c_C[None, :] == iy_B[:, None], dv_B[:, None], 0.0)
    stored_BC = inside_B[:, None] & (c_C < P)[None, :]
    out_BC = t_B.to(tl.int64)[:, None] * P + c_C[None, :]
    tl.store(dx_ptr + out_BC, dx_BC, mask=stored_BC)
    tl.store(dy_ptr + out_BC, dy_BC, mask=stored_BC)
