"""What the auxiliary router losses need of one layer's logits, in one pass each way.

Forward: per expert, how often it is among a row's best K and the sum of its softmax probabilities;
and the sum of squared log-sum-exps. Programs write partial sums, which the caller adds in a fixed
order: no atomics, the same bits every time. Backward: each program writes its rows whole.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_patch.kernels.device import on_device_of
from moe_patch.kernels.routing_math import NO_KEY, TRITON_DTYPE, key_of, rounded
from moe_patch.kernels.routing_select import next_below, packed_keys

# Programs of the forward pass. Fixed, so that the order of summation does not depend on the device.
PROGRAMS = 1024
ROW_ELEMENTS = 512


class RouterSums(NamedTuple):
    """Sums over the rows of one layer, fp32, rows weighted by the mask.

    Attributes:
        tokens_E: rows that have the expert among their best K.
        probabilities_E: softmax probabilities, rounded to the logits' dtype before they are summed.
        z: squared log-sum-exps, shape [].
    """

    tokens_E: Tensor
    probabilities_E: Tensor
    z: Tensor


def router_sums(logits_TE: Tensor, mask_T: Tensor | None, top_k: int) -> RouterSums:
    """One layer's sums, without an intermediate of the logits' size.

    Args:
        logits_TE: fp32, bf16 or fp16, any strides.
        mask_T: fp32 weight of each row, or None for one.
        top_k: experts that count as chosen, equal probabilities going to the lower id.
    """
    T, E = logits_TE.shape
    columns = triton.next_power_of_2(E)
    block = max(1, ROW_ELEMENTS // columns)
    programs = min(triton.cdiv(T, block), PROGRAMS)
    part = torch.empty(programs, 2 * E + 1, dtype=torch.float32, device=logits_TE.device)
    if T > 0:
        with on_device_of(logits_TE):
            _sums_kernel[(programs,)](
                logits_TE, logits_TE if mask_T is None else mask_T.contiguous(), part,
                T, *logits_TE.stride(), programs,
                E=E, C=columns, K=top_k, BLOCK=block, MASKED=mask_T is not None,
                DTYPE=TRITON_DTYPE[logits_TE.dtype], num_warps=1,
            )  # fmt: skip
    total = part.sum(dim=0)
    return RouterSums(total[:E], total[E : 2 * E], total[2 * E])


def router_sums_backward(
    dprobabilities_E: Tensor, dz: Tensor, logits_TE: Tensor, mask_T: Tensor | None
) -> Tensor:
    """Gradient to the logits, contiguous, in their dtype.

    Args:
        dprobabilities_E: fp32 gradient to the probability sums.
        dz: fp32 gradient to the sum of squared log-sum-exps, shape [].
        logits_TE, mask_T: as in the forward pass.
    """
    T, E = logits_TE.shape
    dlogits_TE = torch.empty(T, E, dtype=logits_TE.dtype, device=logits_TE.device)
    if T == 0:
        return dlogits_TE
    columns = triton.next_power_of_2(E)
    block = max(1, ROW_ELEMENTS // columns)
    with on_device_of(logits_TE):
        _sums_backward_kernel[(triton.cdiv(T, block),)](
            dprobabilities_E.contiguous(), dz, logits_TE,
            logits_TE if mask_T is None else mask_T.contiguous(), dlogits_TE,
            T, *logits_TE.stride(),
            E=E, C=columns, BLOCK=block, MASKED=mask_T is not None, num_warps=1,
        )  # fmt: skip
    return dlogits_TE


@triton.jit
def _chosen(s_BC, c_C, E: tl.constexpr, C: tl.constexpr, K: tl.constexpr, DTYPE: tl.constexpr):
    """Whether each column is among the best K of its row, ties to the lower column."""
    exists_C = c_C < E
    if DTYPE == tl.float32:
        key_BC = tl.where(exists_C[None, :], key_of(s_BC), NO_KEY)
        chosen_BC = (key_BC == NO_KEY) & (key_BC != NO_KEY)
        for _ in tl.range(K):
            top_B = tl.max(key_BC, axis=1)
            col_B = tl.min(tl.where(key_BC == top_B[:, None], c_C[None, :], C), axis=1)
            best_BC = c_C[None, :] == col_B[:, None]
            chosen_BC = chosen_BC | best_BC
            key_BC = tl.where(best_BC, NO_KEY, key_BC)
        return chosen_BC
    else:
        packed_BC = packed_keys(s_BC, exists_C, c_C, C, DTYPE)
        last_B = tl.max(packed_BC, axis=1)
        for _ in tl.static_range(K - 1):
            last_B = next_below(packed_BC, last_B)
        return packed_BC >= last_B[:, None]


@triton.jit
def _sums_kernel(
    logits_ptr, mask_ptr, part_ptr, T, stride_t, stride_e, programs,
    E: tl.constexpr, C: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Grid (programs,): program p takes the row blocks p, p + programs, ... and writes row p."""
    c_C = tl.arange(0, C)
    tokens_BC = tl.zeros((BLOCK, C), dtype=tl.float32)
    sum_BC = tl.zeros((BLOCK, C), dtype=tl.float32)
    z_B = tl.zeros((BLOCK,), dtype=tl.float32)
    start = tl.program_id(0) * BLOCK
    while start < T:
        t_B = start + tl.arange(0, BLOCK)
        weight_B = (t_B < T).to(tl.float32)
        if MASKED:
            weight_B = tl.load(mask_ptr + t_B, mask=t_B < T, other=0.0)
        row_B = logits_ptr + tl.minimum(t_B, T - 1).to(tl.int64) * stride_t
        x_BC = tl.load(
            row_B[:, None] + (c_C.to(tl.int64) * stride_e)[None, :],
            mask=(c_C < E)[None, :], other=float("-inf"),
        ).to(tl.float32)  # fmt: skip
        max_B = tl.max(x_BC, axis=1)
        p_BC = tl.exp(x_BC - max_B[:, None])
        total_B = tl.sum(p_BC, axis=1)
        s_BC = rounded(p_BC * (1.0 / total_B)[:, None], DTYPE)
        lse_B = max_B + tl.log(total_B)
        tokens_BC += tl.where(_chosen(s_BC, c_C, E, C, K, DTYPE), weight_B[:, None], 0.0)
        sum_BC += tl.where((t_B < T)[:, None], s_BC * weight_B[:, None], 0.0)
        z_B += tl.where(t_B < T, lse_B * lse_B * weight_B, 0.0)
        start += programs * BLOCK
    here = part_ptr + tl.program_id(0) * (2 * E + 1)
    tl.store(here + c_C, tl.sum(tokens_BC, axis=0), mask=c_C < E)
    tl.store(here + E + c_C, tl.sum(sum_BC, axis=0), mask=c_C < E)
    tl.store(here + 2 * E, tl.sum(z_B, axis=0))


@triton.jit
def _sums_backward_kernel(
    dsum_ptr, dz_ptr, logits_ptr, mask_ptr, dlogits_ptr, T, stride_t, stride_e,
    E: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(T, BLOCK),): d = mask * s * (g - <g, s> + 2 * lse * dz)."""
    c_C = tl.arange(0, C)
    t_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row_B = logits_ptr + tl.minimum(t_B, T - 1).to(tl.int64) * stride_t
    x_BC = tl.load(
        row_B[:, None] + (c_C.to(tl.int64) * stride_e)[None, :],
        mask=(c_C < E)[None, :], other=float("-inf"),
    ).to(tl.float32)  # fmt: skip
    max_B = tl.max(x_BC, axis=1)
    p_BC = tl.exp(x_BC - max_B[:, None])
    total_B = tl.sum(p_BC, axis=1)
    s_BC = p_BC * (1.0 / total_B)[:, None]
    g_C = tl.load(dsum_ptr + c_C, mask=c_C < E, other=0.0)
    dz = tl.load(dz_ptr)
    dot_B = tl.sum(s_BC * g_C[None, :], axis=1)
    dx_BC = s_BC * (g_C[None, :] - (dot_B - 2.0 * dz * (max_B + tl.log(total_B)))[:, None])
    if MASKED:
        dx_BC *= tl.load(mask_ptr + t_B, mask=t_B < T, other=0.0)[:, None]
    tl.store(
        dlogits_ptr + t_B.to(tl.int64)[:, None] * E + c_C[None, :], dx_BC,
        mask=(t_B < T)[:, None] & (c_C < E)[None, :],
    )  # fmt: skip
