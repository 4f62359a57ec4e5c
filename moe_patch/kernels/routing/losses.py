"""Sums for the auxiliary router losses over one layer's logits, in one pass each way.

Forward computes, for each expert, how often it is among a row's best K and the sum of its softmax
probabilities. It also computes the sum of squared log-sum-exps. Programs write partial sums, which
the caller adds in a fixed order, so results are reproducible bit for bit. In backward, each program
writes whole rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_patch.kernels.common.cache import compiling
from moe_patch.kernels.common.device import on_device_of
from moe_patch.kernels.routing.math import NO_KEY, TRITON_DTYPE, key_of, rounded
from moe_patch.kernels.routing.select import (
    next_below,
    pack_short,
    row_max,
    row_min,
    row_sum,
    tile_of,
)

# Programs of the forward pass; fixed, so that the summation order does not depend on the device.
PROGRAMS = 2048
# Columns of a row per thread.
COLUMNS = 16


class RouterSums(NamedTuple):
    """Sums over the rows of one layer, fp32, rows weighted by the mask.

    Attributes:
        tokens_E: number of rows with the expert among their best K.
        probabilities_E: sum of softmax probabilities, each rounded to the logits' dtype first.
        z: sum of squared log-sum-exps, shape [].
    """

    tokens_E: Tensor
    probabilities_E: Tensor
    z: Tensor


def router_sums(logits_TE: Tensor, mask_T: Tensor | None, top_k: int) -> RouterSums:
    """Compute the sums of one layer, without an intermediate of the logits' size.

    Args:
        logits_TE: router logits, fp32, bf16 or fp16, any strides.
        mask_T: fp32 weight of each row; None means 1 for all rows.
        top_k: number of chosen experts; among equal probabilities the lower id wins.
    """
    T, E = logits_TE.shape
    tile = tile_of(triton.next_power_of_2(E), T, logits_TE.dtype.itemsize, COLUMNS)
    programs = min(triton.cdiv(T, tile.rows), PROGRAMS)
    part = torch.empty(programs, 2 * E + 1, dtype=torch.float32, device=logits_TE.device)
    if T > 0:
        with on_device_of(logits_TE):
            compiling(
                _sums_kernel[(programs,)],
                logits_TE, logits_TE if mask_T is None else mask_T.contiguous(), part,
                T, *logits_TE.stride(), programs,
                E=E, K=top_k, B=tile.rows, W=tile.chunks, L=tile.chunk,
                MASKED=mask_T is not None,
                DTYPE=TRITON_DTYPE[logits_TE.dtype], num_warps=1,
            )  # fmt: skip
    total = part.sum(dim=0)
    return RouterSums(total[:E], total[E : 2 * E], total[2 * E])


def router_sums_backward(
    dprobabilities_E: Tensor, dz: Tensor, logits_TE: Tensor, mask_T: Tensor | None
) -> Tensor:
    """Compute the gradient of the logits, contiguous, in their dtype.

    Args:
        dprobabilities_E: fp32 gradient of the probability sums.
        dz: fp32 gradient of the sum of squared log-sum-exps, shape [].
        logits_TE, mask_T: as in the forward pass.
    """
    T, E = logits_TE.shape
    dlogits_TE = torch.empty(T, E, dtype=logits_TE.dtype, device=logits_TE.device)
    if T == 0:
        return dlogits_TE
    tile = tile_of(triton.next_power_of_2(E), T, logits_TE.dtype.itemsize, COLUMNS)
    with on_device_of(logits_TE):
        compiling(
            _sums_backward_kernel[(triton.cdiv(T, tile.rows),)],
            dprobabilities_E.contiguous(), dz, logits_TE,
            logits_TE if mask_T is None else mask_T.contiguous(), dlogits_TE,
            T, *logits_TE.stride(),
            E=E, B=tile.rows, W=tile.chunks, L=tile.chunk, MASKED=mask_T is not None, num_warps=1,
        )  # fmt: skip
    return dlogits_TE


@triton.jit
def _softmax_tile(
    logits_ptr, t_B, T, stride_t, stride_e, E: tl.constexpr, W: tl.constexpr, L: tl.constexpr
):
    """Return columns, softmax and log-sum-exp of rows t_B; rows past the end repeat the last."""
    c_WL = tl.arange(0, W)[None, :, None] * L + tl.arange(0, L)[None, None, :]
    row_B = logits_ptr + tl.minimum(t_B, T - 1).to(tl.int64) * stride_t
    x_BWL = tl.load(
        row_B[:, None, None] + c_WL.to(tl.int64) * stride_e, mask=c_WL < E, other=float("-inf")
    ).to(tl.float32)
    max_B = row_max(x_BWL)
    p_BWL = tl.exp(x_BWL - max_B[:, None, None])
    total_B = row_sum(p_BWL)
    return c_WL, p_BWL * (1.0 / total_B)[:, None, None], max_B + tl.log(total_B)


@triton.jit
def _chosen(s_BWL, c_WL, E: tl.constexpr, C: tl.constexpr, K: tl.constexpr, DTYPE: tl.constexpr):
    """Return whether each column is among the best K of its row; ties go to the lower column."""
    if tl.float32 == DTYPE:
        key_BWL = tl.where(c_WL < E, key_of(s_BWL), NO_KEY)
        chosen_BWL = (key_BWL == NO_KEY) & (key_BWL != NO_KEY)
        for _ in tl.range(K):
            top_B = row_max(key_BWL)
            col_B = row_min(tl.where(key_BWL == top_B[:, None, None], c_WL, C))
            best_BWL = c_WL == col_B[:, None, None]
            chosen_BWL = chosen_BWL | best_BWL
            key_BWL = tl.where(best_BWL, NO_KEY, key_BWL)
        return chosen_BWL
    else:
        packed_BWL = pack_short(s_BWL, c_WL < E, c_WL, C, DTYPE)
        last_B = row_max(packed_BWL)
        for _ in tl.static_range(K - 1):
            last_B = next_below(packed_BWL, last_B)
        return packed_BWL >= last_B[:, None, None]


@triton.jit
def _sums_kernel(
    logits_ptr, mask_ptr, part_ptr, T, stride_t, stride_e, programs,
    E: tl.constexpr, K: tl.constexpr, B: tl.constexpr, W: tl.constexpr, L: tl.constexpr,
    MASKED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Grid (programs,): program p sums row blocks p, p + programs, ... and writes row p."""
    tokens_BWL = tl.zeros((B, W, L), dtype=tl.float32)
    sum_BWL = tl.zeros((B, W, L), dtype=tl.float32)
    z_B = tl.zeros((B,), dtype=tl.float32)
    start = tl.program_id(0) * B
    while start < T:
        t_B = start + tl.arange(0, B)
        c_WL, s_BWL, lse_B = _softmax_tile(logits_ptr, t_B, T, stride_t, stride_e, E, W, L)
        s_BWL = rounded(s_BWL, DTYPE)
        weight_B = (t_B < T).to(tl.float32)
        if MASKED:
            weight_B = tl.load(mask_ptr + t_B, mask=t_B < T, other=0.0)
        chosen_BWL = _chosen(s_BWL, c_WL, E, W * L, K, DTYPE)
        tokens_BWL += tl.where(chosen_BWL, weight_B[:, None, None], 0.0)
        sum_BWL += tl.where((t_B < T)[:, None, None], s_BWL * weight_B[:, None, None], 0.0)
        z_B += tl.where(t_B < T, lse_B * lse_B * weight_B, 0.0)
        start += programs * B
    c_WL = tl.arange(0, W)[:, None] * L + tl.arange(0, L)[None, :]
    here = part_ptr + tl.program_id(0) * (2 * E + 1)
    tl.store(here + c_WL, tl.sum(tokens_BWL, axis=0), mask=c_WL < E)
    tl.store(here + E + c_WL, tl.sum(sum_BWL, axis=0), mask=c_WL < E)
    tl.store(here + 2 * E, tl.sum(z_B, axis=0))


@triton.jit
def _sums_backward_kernel(
    dsum_ptr, dz_ptr, logits_ptr, mask_ptr, dlogits_ptr, T, stride_t, stride_e,
    E: tl.constexpr, B: tl.constexpr, W: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(T, B),): d = mask * s * (g - <g, s> + 2 * lse * dz)."""
    t_B = tl.program_id(0) * B + tl.arange(0, B)
    c_WL, s_BWL, lse_B = _softmax_tile(logits_ptr, t_B, T, stride_t, stride_e, E, W, L)
    g_WL = tl.load(dsum_ptr + c_WL, mask=c_WL < E, other=0.0)
    shift_B = row_sum(s_BWL * g_WL) - 2.0 * tl.load(dz_ptr) * lse_B
    dx_BWL = s_BWL * (g_WL - shift_B[:, None, None])
    if MASKED:
        dx_BWL *= tl.load(mask_ptr + t_B, mask=t_B < T, other=0.0)[:, None, None]
    tl.store(
        dlogits_ptr + t_B.to(tl.int64)[:, None, None] * E + c_WL, dx_BWL,
        mask=(t_B < T)[:, None, None] & (c_WL < E),
    )  # fmt: skip
