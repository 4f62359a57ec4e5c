"""The experts on the torch backend: forward and backward, saving x, h and the plan only.

Same algorithm, names and signatures as the Triton kernels (kernels/experts.py). With rows in plan
order, t = the token of row n and e its expert:

    forward     h = W13 x + b13        a = act(h)        y = W2 a + b2        out_t = sum_k w y
    backward    da' = W2ᵀ dout_t       dw = <da', a> + <dout_t, b2>           da = w da'
                dh = act'(h) da        dW2 = sum dout_t ⊗ w a                 dW13 = sum dh ⊗ x_t
                dx_t = sum_k W13ᵀ dh   db2 = sum w dout_t                     db13 = sum dh
    LoRA        W -> W + s B A in every product above, W's own gradient excepted; then
                q = B2ᵀ dout_t         dB2 = s sum w dout_t ⊗ (A2 a)          dA2 = s sum w q ⊗ a
                p = B13ᵀ dh            dB13 = s sum dh ⊗ (A13 x_t)            dA13 = s sum p ⊗ x_t

The gathered x, a and y are not kept: a is recomputed from h, and y is never needed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_patch.activations import gated_activation, gated_activation_backward
from moe_patch.definition import build_plan
from moe_patch.grouped import Groups
from moe_patch.types import (
    ExpertsBackward,
    ExpertsForward,
    ExpertsNeeds,
    ExpertWeights,
    Glu,
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
    norms: bool = False,
) -> ExpertsForward:
    """The weighted sum of each token's experts.

    Args:
        x_TD: hidden states; x, the weights and the factors share one floating dtype.
        ids_TK: integer expert ids; outside [0, E) is an empty slot.
        weights_TK: routing weights, any floating dtype.
        w, glu: the experts' weights and activation.
        lora13, lora2: low-rank factors of the up and the down projection.
        save_h: return h for backward; without it backward recomputes h.
        norms: also return the norm of every expert's output row.

    Returns:
        ExpertsForward; out_TD in the dtype of x, accumulated in fp32 (fp64 for fp64).
    """
    plan = build_plan(ids_TK, w.w13_EHD.shape[0])
    groups = Groups(plan, x_TD)
    h_NH = groups.linear(token_rows(x_TD, plan), w.w13_EHD, w.b13_EH, lora13)
    y_ND = groups.linear(gated_activation(h_NH, glu), w.w2_EDF, w.b2_ED, lora2)
    out_TD = gather_sum(y_ND, plan.slot_of_TK, weights_TK).to(x_TD.dtype)
    # One empty tensor each: an operator's outputs must not alias.
    act_norm_TK = rows_to_slots(_row_norm(y_ND), plan) if norms else x_TD.new_empty(0)
    return ExpertsForward(out_TD, plan, h_NH if save_h else x_TD.new_empty(0), act_norm_TK)


def experts_backward(
    dout_TD: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    w: ExpertWeights,
    glu: Glu,
    lora13: Lora | None,
    lora2: Lora | None,
    plan: Plan,
    h_NH: Tensor,
    needs: ExpertsNeeds,
) -> ExpertsBackward:
    """All gradients that ``needs`` asks for; nothing is computed for the others.

    Args:
        dout_TD: gradient of out_TD.
        x_TD, weights_TK, w, glu, lora13, lora2: as in forward.
        plan, h_NH: what forward returned; an empty h_NH is recomputed.
        needs: which gradients to return.

    Returns:
        ExpertsBackward; each gradient in the dtype and layout of its input.
    """
    rows = _backward_rows(dout_TD, x_TD, weights_TK, w, glu, lora13, lora2, plan, h_NH)
    grads = _base_grads(rows, w, needs)
    if needs.weights:
        grads["weights"] = _routing_weight_grad(rows, w, plan).to(weights_TK.dtype)
    if needs.x:
        dx_ND, _ = rows.groups.linear_transposed(rows.dh_NH, w.w13_EHD, lora13)
        grads["x"] = gather_sum(dx_ND, plan.slot_of_TK, None).to(x_TD.dtype)
    if lora13 is not None:
        grads |= _lora13_grads(rows, lora13, needs)
    if lora2 is not None:
        grads |= _lora2_grads(rows, lora2, needs)
    if needs.norms:
        grads |= _grad_norms(rows, w, lora13, lora2, plan)
    return ExpertsBackward(**grads)


class _Rows(NamedTuple):
    """Everything backward needs, gathered or recomputed in plan order.

    ``da_NF`` is W2ᵀ dout before the routing weight ``w_N1``; ``p_NR`` and ``q_NR`` are empty
    without the LoRA they belong to.
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

    def weighted(self, rows: Tensor) -> Tensor:
        return (self.w_N1 * rows).to(self.x_ND.dtype)


def _backward_rows(
    dout_TD: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    w: ExpertWeights,
    glu: Glu,
    lora13: Lora | None,
    lora2: Lora | None,
    plan: Plan,
    h_NH: Tensor,
) -> _Rows:
    groups = Groups(plan, x_TD)
    empty = x_TD.new_empty(0)
    x_ND = token_rows(x_TD, plan)
    if h_NH.numel() == 0:
        h_NH = groups.linear(x_ND, w.w13_EHD, w.b13_EH, lora13)
    dout_ND = token_rows(dout_TD.to(x_TD.dtype), plan)
    w_N1 = _row_weights(weights_TK, plan).unsqueeze(1)
    da_NF, q_NR = groups.linear_transposed(dout_ND, w.w2_EDF, lora2)
    a_NF, dh_NH = gated_activation_backward(h_NH, da_NF, w_N1, glu)
    p_NR = empty if lora13 is None else groups.linear(dh_NH, lora13.B_EOR.transpose(1, 2))
    q_NR = empty if q_NR is None else q_NR
    return _Rows(groups, x_ND, dout_ND, w_N1, a_NF, da_NF, dh_NH, p_NR, q_NR)


def _routing_weight_grad(rows: _Rows, w: ExpertWeights, plan: Plan) -> Tensor:
    wide = rows.w_N1.dtype
    dw_N = (rows.da_NF.to(wide) * rows.a_NF.to(wide)).sum(-1)
    if w.b2_ED is not None:
        dw_N = dw_N + (rows.dout_ND.to(wide) * _expert_rows(w.b2_ED, plan).to(wide)).sum(-1)
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
        u_NR = groups.linear(rows.x_ND, lora.A_ERI)
        grads["lora13_B"] = groups.outer_sum(rows.dh_NH, u_NR, lora.B_EOR).mul_(lora.scaling)
    return grads


def _lora2_grads(rows: _Rows, lora: Lora, needs: ExpertsNeeds) -> dict[str, Tensor]:
    grads = {}
    groups = rows.groups
    if needs.lora2_A:
        wq_NR = rows.weighted(rows.q_NR)
        grads["lora2_A"] = groups.outer_sum(wq_NR, rows.a_NF, lora.A_ERI).mul_(lora.scaling)
    if needs.lora2_B:
        u_NR = groups.linear(rows.weighted(rows.a_NF), lora.A_ERI)
        grads["lora2_B"] = groups.outer_sum(rows.dout_ND, u_NR, lora.B_EOR).mul_(lora.scaling)
    return grads


def _grad_norms(
    rows: _Rows, w: ExpertWeights, lora13: Lora | None, lora2: Lora | None, plan: Plan
) -> dict[str, Tensor]:
    """Row norms by the outer-product identity ||u ⊗ v|| = ||u|| ||v|| (no second backward)."""
    w_N = rows.w_N1.squeeze(1).abs()
    x_N, a_N, dh_N = _row_norm(rows.x_ND), _row_norm(rows.a_NF), _row_norm(rows.dh_NH)
    dy_N = w_N * _row_norm(rows.dout_ND)
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
        u_N = _row_norm(rows.groups.linear(rows.x_ND, lora13.A_ERI))
        by_a, by_b = _row_norm(rows.p_NR) * x_N, dh_N * u_N
        lora_N += (by_a.square() + by_b.square()) * lora13.scaling**2
    if lora2 is not None:
        u_N = _row_norm(rows.groups.linear(rows.a_NF, lora2.A_ERI))
        by_a, by_b = w_N * _row_norm(rows.q_NR) * a_N, dy_N * u_N
        lora_N += (by_a.square() + by_b.square()) * lora2.scaling**2
    norms["grad_norm_lora_TK"] = rows_to_slots(lora_N.sqrt(), plan)
    return norms


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _row_norm(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1, dtype=_wide(rows.dtype))


def token_rows(x_TD: Tensor, plan: Plan) -> Tensor:
    """Each row's token, in plan order [N, D]; rows past the last valid one are arbitrary."""
    K = plan.slot_of_TK.shape[1]
    return x_TD.index_select(0, plan.row_of_N.clamp(min=0) // K)


def _expert_rows(b_EO: Tensor, plan: Plan) -> Tensor:
    E, N = b_EO.shape[0], plan.row_of_N.shape[0]
    slots = torch.arange(N, device=b_EO.device, dtype=torch.int32)
    expert_N = torch.searchsorted(plan.offsets_S[1:].contiguous(), slots, right=True)
    return b_EO.index_select(0, expert_N.clamp(max=E - 1))


def _row_weights(weights_TK: Tensor, plan: Plan) -> Tensor:
    """Routing weights in plan order, fp32 (fp64 for fp64), 0 past the last valid row."""
    flat = weights_TK.to(_wide(weights_TK.dtype)).reshape(-1)
    picked_N = flat.index_select(0, plan.row_of_N.clamp(min=0).long())
    return torch.where(plan.row_of_N >= 0, picked_N, 0.0)


def rows_to_slots(values_N: Tensor, plan: Plan) -> Tensor:
    """Per-row values from plan order to [T, K], 0 in empty slots."""
    slot = plan.slot_of_TK
    picked = values_N.index_select(0, slot.reshape(-1).clamp(min=0)).view(slot.shape)
    return torch.where(slot >= 0, picked, 0.0)


def gather_sum(rows_ND: Tensor, slot_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """sum_k w_tk rows[slot_tk] in slot order, accumulated in fp32 (fp64 for fp64)."""
    wide = _wide(rows_ND.dtype)
    out_TD = torch.zeros(slot_TK.shape[0], rows_ND.shape[1], dtype=wide, device=rows_ND.device)
    empty_TK = slot_TK < 0
    # Asking is free on a CPU and a wait for the device elsewhere.
    masked = slot_TK.device.type != "cpu" or bool(empty_TK.any())
    for k in range(slot_TK.shape[1]):
        slot_T = slot_TK[:, k].clamp(min=0) if masked else slot_TK[:, k]
        picked_TD = rows_ND.index_select(0, slot_T).to(wide)
        if masked:
            picked_TD.masked_fill_(empty_TK[:, k, None], 0.0)
        if weights_TK is None:
            out_TD += picked_TD
            continue
        weight_T = weights_TK[:, k].to(wide)
        if masked:
            weight_T = torch.where(empty_TK[:, k], 0.0, weight_T)
        out_TD.addcmul_(picked_TD, weight_T.unsqueeze(1))
    return out_TD
