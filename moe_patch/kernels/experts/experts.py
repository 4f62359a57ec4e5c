"""The experts on the Triton backend: forward and backward; saves x, h, the plan and u.

Names, signatures and meaning are those of ``moe_patch.ops.experts.torch_backend``, whose docstring
has the formulas. The kernels with their inputs and outputs, rows in plan order:

    plan/      ids_TK                        -> row_of_N, slot_of_TK, offsets_S, tile tables
    up.py      x_TD, W13                     -> h_NH (saved), a_NF
    linear.py  a_NF, W2                      -> y_ND
    reduce.py  y_ND, weights_TK              -> out_TD
    dh.py      dout_TD, W2, h_NH             -> dh_NH, wa_NF, partial sums of the routing gradient
    dw.py      dout_TD, wa_NF and dh_NH, x_TD -> dW2, dW13
    linear.py  dh_NH, W13                    -> dx_ND, summed per token by reduce.py

LoRA adds thin products, each of which is then added inside the main product, so that no merged
weight is formed:

    u = s A x         before up and before down (saved)
    q = s B2ᵀ dout    before dh
    p = s B13ᵀ dh     before dx

All three include the scaling, so the gradients of the factors are plain outer sums. The pass that
computes q and p also computes the gradients of the factors B (factors.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_patch.kernels.common.activation import activation
from moe_patch.kernels.common.device import on_device_of
from moe_patch.kernels.common.repeat import repeated
from moe_patch.kernels.experts.call import Call, align_rows
from moe_patch.kernels.experts.dh import HiddenGradients
from moe_patch.kernels.experts.dw import outer_sum, wide_sum
from moe_patch.kernels.experts.factors import weighted
from moe_patch.kernels.experts.norms import Intermediate, combine_with_norms, gradient_norms
from moe_patch.kernels.experts.reduce import combine, expert_sum, routing_gradient
from moe_patch.kernels.experts.steps import Steps, steps_of, zero_gradients
from moe_patch.kernels.plan.plan import build_plan
from moe_patch.kernels.plan.row_tiles import RowTiles
from moe_patch.types import (
    ExpertsBackward,
    ExpertsForward,
    ExpertsNeeds,
    ExpertWeights,
    Glu,
    Kept,
    Lora,
    Plan,
)

__all__ = ["build_plan", "experts_backward", "experts_forward"]


@repeated
def experts_forward(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w: ExpertWeights,
    glu: Glu,
    lora13: Lora | None = None,
    lora2: Lora | None = None,
    *,
    save_h: bool = True,
    save_u13: bool = False,
    save_u2: bool = False,
    norms: bool = False,
    batch_invariant: bool = False,
) -> ExpertsForward:
    """Compute the weighted sum of each token's experts.

    Args:
        x_TD: hidden states, bf16, fp16 or fp32; x, the weights and the factors share the dtype.
        ids_TK: integer expert ids; an id outside [0, E) is an empty slot.
        weights_TK: routing weights, any floating dtype.
        w, glu: weights and activation of the experts.
        lora13, lora2: low-rank factors of the up and the down projection.
        save_h, save_u13, save_u2: return h and the inputs of the factors B (if there are factors)
            for backward, which otherwise recomputes them.
        norms: also return the norm of every expert's output row.
        batch_invariant: use the same tiles for any number of rows, so that a token's result does
            not depend on other tokens.

    Returns:
        ExpertsForward; out_TD in the dtype of x, accumulated in fp32.
    """
    tiles = align_rows(ids_TK, w.w13_EHD.shape[0], x_TD, batch_invariant)
    save_u13, save_u2 = save_u13 and lora13 is not None, save_u2 and lora2 is not None
    if ids_TK.numel() == 0:
        norm_TK = weights_TK.new_zeros(ids_TK.shape, dtype=torch.float32)
        kept = Kept(
            x_TD.new_empty((0, w.w13_EHD.shape[1]) if save_h else 0),
            x_TD.new_empty((0, lora13.A_ERI.shape[1]) if save_u13 else 0),
            x_TD.new_empty((0, lora2.A_ERI.shape[1]) if save_u2 else 0),
        )
        out_TD = x_TD.new_zeros(x_TD.shape)
        return ExpertsForward(out_TD, tiles.plan, kept, norm_TK if norms else x_TD.new_empty(0))
    with on_device_of(x_TD):
        call = Call(tiles, unit_stride(x_TD), w, glu, lora13, lora2, batch_invariant)
        u13_NR = call.inputs_of_B13()
        h_NH, a_NF = call.up(u13_NR, save_h=save_h, save_a=True)
        nothing = x_TD.new_empty(0) if save_h else h_NH
        u2_NR = call.inputs_of_B2(a_NF)
        y_ND = call.down(a_NF, u2_NR)
        if norms:
            out_TD, norm_TK = combine_with_norms(y_ND, call.plan, weights_TK.contiguous())
        else:
            out_TD, norm_TK = combine(y_ND, call.plan, weights_TK.contiguous()), nothing
    kept = Kept(h_NH, u13_NR if save_u13 else nothing, u2_NR if save_u2 else nothing)
    return ExpertsForward(out_TD, tiles.plan, kept, norm_TK)


@repeated
def experts_backward(
    dout_TD: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    w: ExpertWeights,
    glu: Glu,
    lora13: Lora | None,
    lora2: Lora | None,
    plan: Plan,
    kept: Kept,
    needs: ExpertsNeeds,
    *,
    overwrite_h: bool = False,
    batch_invariant: bool = False,
) -> ExpertsBackward:
    """Compute the gradients listed in ``needs``.

    Args:
        dout_TD: gradient of out_TD.
        x_TD, weights_TK, w, glu, lora13, lora2: as in forward.
        plan, kept: results of forward; empty tensors are recomputed.
        needs: gradients to return.
        overwrite_h: allow dh to be written over the saved h.
        batch_invariant: as in forward; applies to the gradients of x and of the routing weights.

    Returns:
        ExpertsBackward; each gradient in the dtype and layout of its input.
    """
    if plan.row_of_N.numel() == 0:
        return zero_gradients(x_TD, weights_TK, w, lora13, lora2, needs)
    with on_device_of(x_TD):
        call = Call(RowTiles(plan), unit_stride(x_TD), w, glu, lora13, lora2, batch_invariant)
        if dout_TD.dtype != x_TD.dtype:
            dout_TD = dout_TD.to(x_TD.dtype)
        dout_TD, weights_TK = unit_stride(dout_TD), weights_TK.contiguous()
        # A recomputed h is not shared, so backward may overwrite it.
        overwrite_h |= kept.h_NH.numel() == 0
        # Keep no reference to the intermediate tensors here, so that gradients can free them.
        return gradients(
            call, dout_TD, weights_TK,
            intermediate(call, dout_TD, weights_TK, kept, needs, steps_of(needs), overwrite_h),
            needs,
        )  # fmt: skip


def _completed(
    call: Call, kept: Kept, steps: Steps
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (h_NH, u13_NR, u2_NR), as saved by forward or recomputed if needed."""
    h_NH, u13_NR, u2_NR = [None if rows.numel() == 0 else rows for rows in kept]
    u2 = steps.u2 and call.lora2 is not None and u2_NR is None
    h = (steps.h or u2) and h_NH is None
    if u13_NR is None and (steps.u13 or h):
        u13_NR = call.inputs_of_B13()
    if h:
        h_NH, a_NF = call.up(u13_NR, save_h=True, save_a=u2)
    elif u2:
        a_NF = activation(h_NH, call.glu)
    if u2:
        u2_NR = call.inputs_of_B2(a_NF)
    return h_NH, u13_NR, u2_NR


def intermediate(
    call: Call,
    dout_TD: Tensor,
    weights_TK: Tensor,
    kept: Kept,
    needs: ExpertsNeeds,
    steps: Steps,
    overwrite_h: bool,
    wa_NF: Tensor | None = None,
) -> Intermediate:
    """Compute what several gradients need, and the gradients of the factors B.

    ``wa_NF``, if given, gets w a.
    """
    h_NH, u13_NR, u2_NR = _completed(call, kept, steps)
    wu2_NR, q_NR, p_NR, grad13_EOR, grad2_EOR = (None,) * 5
    lora13, lora2 = call.lora13, call.lora2
    if lora2 is not None and steps.u2:
        wu2_NR, u2_NR = weighted(u2_NR, call.plan, weights_TK), None
    if lora2 is not None and (steps.q or needs.lora2_B):
        summed_NR = wu2_NR if needs.lora2_B else None
        q_NR, grad2_EOR = call.factor_B_backward(
            dout_TD, lora2, summed_NR, passed=steps.q, gather=True
        )
    hidden = HiddenGradients(*(kept.h_NH,) * 3)
    if steps.h:
        low_rank = None if q_NR is None else (q_NR, lora2.A_ERI)
        hidden = call.hidden_gradients(
            dout_TD, weights_TK, h_NH, low_rank, dh=steps.dh, wa=steps.wa, partial=needs.weights,
            overwrite_h=overwrite_h, wa_NF=wa_NF,
        )  # fmt: skip
    if lora13 is not None and (steps.p or needs.lora13_B):
        summed_NR = u13_NR if needs.lora13_B else None
        p_NR, grad13_EOR = call.factor_B_backward(hidden.dh_NH, lora13, summed_NR, passed=steps.p)
    return Intermediate(hidden, q_NR, p_NR, u13_NR, wu2_NR, grad13_EOR, grad2_EOR)


def gradients(
    call: Call,
    dout_TD: Tensor,
    weights_TK: Tensor,
    mid: Intermediate,
    needs: ExpertsNeeds,
    dx_TD: Tensor | None = None,
) -> ExpertsBackward:
    """Compute the gradients listed in ``needs``; ``dx_TD``, if given, gets that of x."""
    grads = _down_gradients(call, dout_TD, weights_TK, mid, needs)
    if needs.norms:
        grads |= gradient_norms(call, dout_TD, weights_TK, mid)
    dh_NH, p_NR, grads["lora13_B"] = mid.hidden.dh_NH, mid.p_NR, mid.grad13_EOR
    # Free w·a before allocating dx, to lower peak memory.
    del mid
    return ExpertsBackward(**grads, **_up_gradients(call, dh_NH, p_NR, needs, dx_TD))


def _down_gradients(
    call: Call, dout_TD: Tensor, weights_TK: Tensor, mid: Intermediate, needs: ExpertsNeeds
) -> dict[str, Tensor | None]:
    """Compute the gradients of the routing weights and the down projection, from dout and w·a."""
    w, lora2, plan = call.w, call.lora2, call.plan
    wa_NF = mid.hidden.wa_NF
    grads: dict[str, Tensor | None] = {}
    if needs.weights:
        rows = call.tiles.rows(call.tile("dh").m)
        grads["weights"] = routing_gradient(
            mid.hidden.partial_NC, rows, weights_TK, dout_TD, w.b2_ED
        )
    if needs.w2:
        sums, tile = wide_sum(call.sums, "w2", w.w2_EDF), call.tile("dw2")
        grads["w2"] = outer_sum(dout_TD, wa_NF, plan, w.w2_EDF, tile, gather_left=True, sums=sums)
    if needs.b2 and w.b2_ED is not None:
        grads["b2"] = expert_sum(dout_TD, plan, w.b2_ED, gather=True, weights_TK=weights_TK)
    if lora2 is not None and needs.lora2_A:
        grads["lora2_A"] = call.outer_A(mid.q_NR, wa_NF, lora2.A_ERI)
    grads["lora2_B"] = mid.grad2_EOR
    return grads


def _up_gradients(
    call: Call, dh_NH: Tensor, p_NR: Tensor | None, needs: ExpertsNeeds, dx_TD: Tensor | None
) -> dict[str, Tensor | None]:
    """Compute the gradients of the up projection and the hidden states, from dh."""
    w, lora13, plan = call.w, call.lora13, call.plan
    grads: dict[str, Tensor | None] = {}
    if needs.x:
        # Compute this first, so that its rows (N x D) are freed before the large dW13 is allocated.
        grads["x"] = call.input_gradient(dh_NH, p_NR, dx_TD)
    if needs.w13:
        sums, tile = wide_sum(call.sums, "w13", w.w13_EHD), call.tile("dw13")
        grads["w13"] = outer_sum(
            dh_NH, call.x_TD, plan, w.w13_EHD, tile, gather_right=True, sums=sums
        )
    if needs.b13 and w.b13_EH is not None:
        grads["b13"] = expert_sum(dh_NH, plan, w.b13_EH)
    if lora13 is not None and needs.lora13_A:
        grads["lora13_A"] = call.outer_A(p_NR, call.x_TD, lora13.A_ERI, gather=True)
    return grads


def unit_stride(rows: Tensor) -> Tensor:
    """Return rows whose last axis is contiguous, as the kernels require."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()
