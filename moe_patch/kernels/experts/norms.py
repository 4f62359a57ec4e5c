"""Per-row norms of an experts call, computed from its existing intermediates.

By the outer-product identity ||u ⊗ v|| = ||u|| ||v||, each norm is a product of row norms. A
recorded call therefore only reads the rows of y, dh and w·a once more, and launches one more kernel
in each direction:

    combine_with_norms  out_TD, bit for bit as reduce.combine, and ||y_tk||
    gradient_norms      for the output, the parameters and the low-rank factors
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_patch.kernels.common.launcher import Launcher
from moe_patch.kernels.experts.call import Call
from moe_patch.kernels.experts.dh import HiddenGradients
from moe_patch.types import Plan


class Intermediate(NamedTuple):
    """Intermediates of backward and gradients of the factors B; None or empty if not needed."""

    hidden: HiddenGradients
    q_NR: Tensor | None
    p_NR: Tensor | None
    u13_NR: Tensor | None
    wu2_NR: Tensor | None
    grad13_EOR: Tensor | None
    grad2_EOR: Tensor | None


def combine_with_norms(rows_ND: Tensor, plan: Plan, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of ``reduce.combine``, bit for bit, and each row's fp32 norm, [T, K].

    Args:
        rows_ND: contiguous, in plan order.
        plan: an empty slot (-1) adds nothing and has norm 0.
        weights_TK: contiguous routing weights.
    """
    T, K = plan.slot_of_TK.shape
    D = rows_ND.shape[1]
    out_TD = rows_ND.new_empty(T, D)
    norm_TK = torch.empty((T, K), dtype=torch.float32, device=rows_ND.device)
    block = min(triton.next_power_of_2(D), 2048)
    _launch_combine(
        (T,), (rows_ND, plan.slot_of_TK, weights_TK, out_TD, norm_TK), (), (D,),
        K=K, K_P2=triton.next_power_of_2(K), BLOCK=block, BD=min(block, 256),
        num_warps=8 if block >= 2048 else 4,
    )  # fmt: skip
    return out_TD, norm_TK


def gradient_norms(
    call: Call, dout_TD: Tensor, weights_TK: Tensor, mid: Intermediate
) -> dict[str, Tensor | None]:
    """Return row norms of the gradients, fp32 [T, K], by field name of ``ExpertsBackward``."""
    T, K = weights_TK.shape
    dh_NH, wa_NF = mid.hidden.dh_NH, mid.hidden.wa_NF
    out_TK, params_TK, lora_TK = torch.empty(
        (3, T, K), dtype=torch.float32, device=dout_TD.device
    ).unbind()
    low13, low2 = mid.p_NR is not None, mid.q_NR is not None
    p_NR, u13_NR = (mid.p_NR, mid.u13_NR) if low13 else (dh_NH, dh_NH)
    q_NR, wu2_NR = (mid.q_NR, mid.wu2_NR) if low2 else (dh_NH, dh_NH)
    _launch_gradients(
        (T,),
        (call.x_TD, dout_TD, dh_NH, wa_NF, p_NR, u13_NR, q_NR, wu2_NR, weights_TK,
         call.plan.slot_of_TK, out_TK, params_TK, lora_TK),
        (),
        (call.x_TD.shape[1], dh_NH.shape[1], wa_NF.shape[1], p_NR.shape[1], q_NR.shape[1],
         call.x_TD.stride(0), dout_TD.stride(0)),
        K=K, K_P2=triton.next_power_of_2(K), LOW13=low13, LOW2=low2,
        BIAS13=call.w.b13_EH is not None, BIAS2=call.w.b2_ED is not None, BD=256, num_warps=4,
    )  # fmt: skip
    return {
        "grad_norm_out_TK": out_TK,
        "grad_norm_params_TK": params_TK,
        "grad_norm_lora_TK": lora_TK if low13 or low2 else None,
    }


@triton.jit
def _squares(ptr, start, ok, width, BD: tl.constexpr):
    """Return the sum of squares of each row that begins at ``start``; 0 where not ``ok``."""
    acc = tl.zeros((start.shape[0], BD), dtype=tl.float32)
    for d0 in range(0, width, BD):
        d = d0 + tl.arange(0, BD)
        mask = ok[:, None] & (d < width)[None, :]
        value = tl.load(ptr + start[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        acc += value * value
    return tl.sum(acc, axis=1)


@triton.jit
def _combine_norms_kernel(
    rows_ptr, slot_ptr, weights_ptr, out_ptr, norm_ptr, D,
    K: tl.constexpr, K_P2: tl.constexpr, BLOCK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one token per program. The second read of its rows hits the cache."""
    t = tl.program_id(0).to(tl.int64)
    for d0 in range(0, D, BLOCK):
        d = d0 + tl.arange(0, BLOCK)
        acc = tl.zeros((BLOCK,), dtype=tl.float32)
        for k in tl.static_range(K):
            slot = tl.load(slot_ptr + t * K + k)
            width = tl.where(slot >= 0, D, 0)
            row = tl.load(rows_ptr + slot.to(tl.int64) * D + d, mask=d < width, other=0.0)
            weight = tl.load(weights_ptr + t * K + k, mask=slot >= 0, other=0.0).to(tl.float32)
            acc += weight * row.to(tl.float32)
        tl.store(out_ptr + t * D + d, acc.to(out_ptr.dtype.element_ty), mask=d < D)
    k = tl.arange(0, K_P2)
    slot = tl.load(slot_ptr + t * K + k, mask=k < K, other=-1).to(tl.int64)
    square = _squares(rows_ptr, slot * D, slot >= 0, D, BD)
    tl.store(norm_ptr + t * K + k, tl.sqrt(square), mask=k < K)


@triton.jit
def _gradient_norms_kernel(
    x_ptr, dout_ptr, dh_ptr, wa_ptr, p_ptr, u13_ptr, q_ptr, wu2_ptr,
    weights_ptr, slot_ptr, out_ptr, params_ptr, lora_ptr,
    D, H, F, R13, R2, stride_x, stride_dout,
    K: tl.constexpr, K_P2: tl.constexpr, LOW13: tl.constexpr, LOW2: tl.constexpr,
    BIAS13: tl.constexpr, BIAS2: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid (T,): the K rows of one token per program."""
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, K_P2)
    slot = tl.load(slot_ptr + t * K + k, mask=k < K, other=-1).to(tl.int64)
    ok = slot >= 0
    at = t * K + k
    zero = tl.zeros((1,), dtype=tl.int64)
    x = tl.sum(_squares(x_ptr, zero + t * stride_x, zero == 0, D, 4 * BD), axis=0)
    dout = tl.sum(_squares(dout_ptr, zero + t * stride_dout, zero == 0, D, 4 * BD), axis=0)
    dh = _squares(dh_ptr, slot * H, ok, H, BD)
    wa = _squares(wa_ptr, slot * F, ok, F, BD)
    weight = tl.load(weights_ptr + at, mask=ok, other=0.0).to(tl.float32)
    # For an empty slot all values but these two are 0. If the token's row has NaN, 0 times these
    # would be NaN.
    x = tl.where(ok, x, 0.0)
    dout = tl.where(ok, dout, 0.0)
    dy = weight * weight * dout
    params = dout * wa + dh * x
    if BIAS13:
        params += dh
    if BIAS2:
        params += dy
    tl.store(out_ptr + at, tl.sqrt(dy), mask=k < K)
    tl.store(params_ptr + at, tl.sqrt(params), mask=k < K)
    if LOW13 or LOW2:
        lora = tl.zeros((K_P2,), dtype=tl.float32)
        if LOW13:
            lora += _squares(p_ptr, slot * R13, ok, R13, 16) * x
            lora += _squares(u13_ptr, slot * R13, ok, R13, 16) * dh
        if LOW2:
            lora += _squares(q_ptr, slot * R2, ok, R2, 16) * wa
            lora += _squares(wu2_ptr, slot * R2, ok, R2, 16) * dout
        tl.store(lora_ptr + at, tl.sqrt(lora), mask=k < K)


_launch_combine = Launcher(_combine_norms_kernel)
_launch_gradients = Launcher(_gradient_norms_kernel)
