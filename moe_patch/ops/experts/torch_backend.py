"""The experts on the torch backend: forward and backward; saves only x, h, the plan and LoRA's u.

Algorithm, names and signatures are those of the Triton kernels (kernels/experts/experts.py). Rows
are in plan order; t is the token of row n and e its expert:

    forward     h = W13 x + b13        a = act(h)        y = W2 a + b2        out_t = sum_k w y
    backward    da' = W2ᵀ dout_t       dw = <da', a> + <dout_t, b2>           da = w da'
                dh = act'(h) da        dW2 = sum dout_t ⊗ w a                 dW13 = sum dh ⊗ x_t
                dx_t = sum_k W13ᵀ dh   db2 = sum w dout_t                     db13 = sum dh
    LoRA        W -> W + s B A in every product above, except in the gradient of W; then
                u13 = A13 x_t          dB13 = s sum dh ⊗ u13                  dA13 = s sum p ⊗ x_t
                u2 = A2 a              dB2 = s sum dout_t ⊗ (w u2)            dA2 = s sum w q ⊗ a
                p = B13ᵀ dh            q = B2ᵀ dout_t

The gathered x, a and y are not saved: backward recomputes a from h, and never needs y.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_patch.ops.experts.activations import gated_activation, gated_activation_backward
from moe_patch.ops.experts.definition import build_plan
from moe_patch.ops.experts.grouped import Groups
from moe_patch.ops.experts.rows import (
    expert_rows,
    gather_sum,
    row_norm,
    row_weights,
    rows_to_slots,
    token_rows,
    tokens_of,
)
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
) -> ExpertsForward:
    """Compute the weighted sum of each token's experts.

    Args:
        x_TD: hidden states; x, the weights and the factors share one floating dtype.
        ids_TK: integer expert ids; an id outside [0, E) is an empty slot.
        weights_TK: routing weights, any floating dtype.
        w, glu: weights and activation of the experts.
        lora13, lora2: low-rank factors of the up and the down projection.
        save_h, save_u13, save_u2: return h and the inputs of the factors B (if there are factors)
            for backward, which otherwise recomputes them.
        norms: also return the norm of every expert's output row.

    Returns:
        ExpertsForward; out_TD in the dtype of x, accumulated in fp32 (fp64 for fp64).
    """
    plan = build_plan(ids_TK, w.w13_EHD.shape[0])
    groups, x_ND = Groups(plan, x_TD), token_rows(x_TD, plan)
    low13, low2 = None, None
    if lora13 is not None:
        low13 = groups.linear(x_ND, lora13.A_ERI), lora13
    h_NH = groups.linear(x_ND, w.w13_EHD, w.b13_EH, low13)
    a_NF = gated_activation(h_NH, glu)
    if lora2 is not None:
        low2 = groups.linear(a_NF, lora2.A_ERI), lora2
    y_ND = groups.linear(a_NF, w.w2_EDF, w.b2_ED, low2)
    out_TD = gather_sum(y_ND, plan.slot_of_TK, weights_TK).to(x_TD.dtype)
    # A new empty tensor for each: outputs of an operator must not alias.
    kept = Kept(
        h_NH if save_h else x_TD.new_empty(0),
        low13[0] if save_u13 and low13 is not None else x_TD.new_empty(0),
        low2[0] if save_u2 and low2 is not None else x_TD.new_empty(0),
    )
    act_norm_TK = rows_to_slots(row_norm(y_ND), plan) if norms else x_TD.new_empty(0)
    return ExpertsForward(out_TD, plan, kept, act_norm_TK)


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
) -> ExpertsBackward:
    """Compute the gradients listed in ``needs``.

    Args:
        dout_TD: gradient of out_TD.
        x_TD, weights_TK, w, glu, lora13, lora2: as in forward.
        plan, kept: results of forward; empty tensors are recomputed.
        needs: gradients to return.
        overwrite_h: allow backward to overwrite h; ignored on this backend.

    Returns:
        ExpertsBackward; each gradient in the dtype and layout of its input.
    """
    rows = _backward_rows(dout_TD, x_TD, weights_TK, w, glu, lora13, lora2, plan, kept)
    grads = _base_grads(rows, w, needs)
    if needs.weights:
        grads["weights"] = _routing_weight_grad(rows, w, plan).to(weights_TK.dtype)
    if needs.x:
        p_NR = None if lora13 is None else rows.p_NR
        dx_ND, _ = rows.groups.linear_transposed(rows.dh_NH, w.w13_EHD, lora13, p_NR)
        grads["x"] = gather_sum(dx_ND, plan.slot_of_TK, None).to(x_TD.dtype)
    if lora13 is not None:
        grads |= _lora13_grads(rows, lora13, needs)
    if lora2 is not None:
        grads |= _lora2_grads(rows, lora2, needs)
    if needs.norms:
        grads |= _grad_norms(rows, w, lora13, lora2, plan)
    return ExpertsBackward(**grads)


class _Rows(NamedTuple):
    """Operands of backward, gathered or recomputed in plan order.

    ``da_NF`` is W2ᵀ dout, not yet multiplied by the routing weight ``w_N1``. ``p_NR``, ``q_NR``,
    ``u13_NR`` and ``u2_NR`` are empty without LoRA on their projection. The last two are also empty
    if forward did not save them.
    """

    groups: Groups
    x_ND: Tensor
    dout_ND: Tensor
    w_N1: Tensor
    a_NF: Tensor
    da_NF: Tensor
    dh_NH: Tensor
    p_NR: Tensor
    q_NR: Tensor
    u13_NR: Tensor
    u2_NR: Tensor

    def weighted(self, rows: Tensor) -> Tensor:
        return (self.w_N1 * rows).to(self.x_ND.dtype)

    def inputs_of_B13(self, lora13: Lora) -> Tensor:
        return self.u13_NR if self.u13_NR.numel() else self.groups.linear(self.x_ND, lora13.A_ERI)

    def inputs_of_B2(self, lora2: Lora) -> Tensor:
        return self.u2_NR if self.u2_NR.numel() else self.groups.linear(self.a_NF, lora2.A_ERI)


def _backward_rows(
    dout_TD: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    w: ExpertWeights,
    glu: Glu,
    lora13: Lora | None,
    lora2: Lora | None,
    plan: Plan,
    kept: Kept,
) -> _Rows:
    groups = Groups(plan, x_TD)
    empty = x_TD.new_empty(0)
    # Divide once for both gathers: on a CPU, integer division takes as long as copying the rows.
    token_N = tokens_of(plan)
    x_ND = x_TD.index_select(0, token_N)
    h_NH, u13_NR, u2_NR = kept
    if h_NH.numel() == 0:
        low13 = None
        if lora13 is not None:
            u13_NR = groups.linear(x_ND, lora13.A_ERI)
            low13 = u13_NR, lora13
        h_NH = groups.linear(x_ND, w.w13_EHD, w.b13_EH, low13)
    dout_ND = dout_TD.to(x_TD.dtype).index_select(0, token_N)
    w_N1 = row_weights(weights_TK, plan).unsqueeze(1)
    da_NF, q_NR = groups.linear_transposed(dout_ND, w.w2_EDF, lora2)
    a_NF, dh_NH = gated_activation_backward(h_NH, da_NF, w_N1, glu)
    p_NR = empty if lora13 is None else groups.linear(dh_NH, lora13.B_EOR.transpose(1, 2))
    q_NR = empty if q_NR is None else q_NR
    return _Rows(groups, x_ND, dout_ND, w_N1, a_NF, da_NF, dh_NH, p_NR, q_NR, u13_NR, u2_NR)


def _routing_weight_grad(rows: _Rows, w: ExpertWeights, plan: Plan) -> Tensor:
    wide = rows.w_N1.dtype
    dw_N = (rows.da_NF.to(wide) * rows.a_NF.to(wide)).sum(-1)
    if w.b2_ED is not None:
        dw_N = dw_N + (rows.dout_ND.to(wide) * expert_rows(w.b2_ED, plan).to(wide)).sum(-1)
    return rows_to_slots(dw_N, plan)


def _base_grads(rows: _Rows, w: ExpertWeights, needs: ExpertsNeeds) -> dict[str, Tensor]:
    grads = {}
    groups = rows.groups
    if needs.w2:
        grads["w2"] = groups.outer_sum(rows.dout_ND, rows.weighted(rows.a_NF), w.w2_EDF)
    if needs.b2 and w.b2_ED is not None:
        grads["b2"] = groups.row_sum(rows.weighted(rows.dout_ND), w.b2_ED)
    if needs.w13:
        grads["w13"] = groups.outer_sum(rows.dh_NH, rows.x_ND, w.w13_EHD)
    if needs.b13 and w.b13_EH is not None:
        grads["b13"] = groups.row_sum(rows.dh_NH, w.b13_EH)
    return grads


def _lora13_grads(rows: _Rows, lora: Lora, needs: ExpertsNeeds) -> dict[str, Tensor]:
    grads = {}
    groups = rows.groups
    if needs.lora13_A:
        grads["lora13_A"] = groups.outer_sum(rows.p_NR, rows.x_ND, lora.A_ERI).mul_(lora.scaling)
    if needs.lora13_B:
        u_NR = rows.inputs_of_B13(lora)
        grads["lora13_B"] = groups.outer_sum(rows.dh_NH, u_NR, lora.B_EOR).mul_(lora.scaling)
    return grads


def _lora2_grads(rows: _Rows, lora: Lora, needs: ExpertsNeeds) -> dict[str, Tensor]:
    grads = {}
    groups = rows.groups
    if needs.lora2_A:
        wq_NR = rows.weighted(rows.q_NR)
        grads["lora2_A"] = groups.outer_sum(wq_NR, rows.a_NF, lora.A_ERI).mul_(lora.scaling)
    if needs.lora2_B:
        wu_NR = rows.weighted(rows.inputs_of_B2(lora))
        grads["lora2_B"] = groups.outer_sum(rows.dout_ND, wu_NR, lora.B_EOR).mul_(lora.scaling)
    return grads


def _grad_norms(
    rows: _Rows, w: ExpertWeights, lora13: Lora | None, lora2: Lora | None, plan: Plan
) -> dict[str, Tensor]:
    """Compute row norms without a second backward, from the identity ||u ⊗ v|| = ||u|| ||v||."""
    w_N = rows.w_N1.squeeze(1).abs()
    x_N, a_N, dh_N = row_norm(rows.x_ND), row_norm(rows.a_NF), row_norm(rows.dh_NH)
    dy_N = w_N * row_norm(rows.dout_ND)
    params_N = (dy_N * a_N).square() + (dh_N * x_N).square()
    if w.b13_EH is not None:
        params_N = params_N + dh_N.square()
    if w.b2_ED is not None:
        params_N = params_N + dy_N.square()
    norms = {
        "grad_norm_out_TK": rows_to_slots(dy_N, plan),
        "grad_norm_params_TK": rows_to_slots(params_N.sqrt(), plan),
    }
    if lora13 is None and lora2 is None:
        return norms
    lora_N = torch.zeros_like(params_N)
    if lora13 is not None:
        by_a, by_b = row_norm(rows.p_NR) * x_N, dh_N * row_norm(rows.inputs_of_B13(lora13))
        lora_N += (by_a.square() + by_b.square()) * lora13.scaling**2
    if lora2 is not None:
        by_a, by_b = w_N * row_norm(rows.q_NR) * a_N, dy_N * row_norm(rows.inputs_of_B2(lora2))
        lora_N += (by_a.square() + by_b.square()) * lora2.scaling**2
    norms["grad_norm_lora_TK"] = rows_to_slots(lora_N.sqrt(), plan)
    return norms
