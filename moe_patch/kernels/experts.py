"""The experts on the Triton backend: forward and backward, saving x, h and the plan only.

Same names, signatures and meaning as ``moe_patch.experts_torch``, whose docstring has the formulas.
The kernels, and what passes between them, rows in plan order:

    plan.py    ids_TK                        -> row_of_N, slot_of_TK, offsets_S, tile tables
    up.py      x_TD, W13                     -> h_NH (kept), a_NF
    rows.py    a_NF, W2                      -> y_ND
    reduce.py  y_ND, weights_TK              -> out_TD
    dh.py      dout_TD, W2, h_NH             -> dh_NH, wa_NF, partial sums of the routing gradient
    dw.py      dout_TD, wa_NF and dh_NH, x_TD -> dW2, dW13
    rows.py    dh_NH, W13                    -> dx_ND, summed per token by reduce.py

LoRA adds thin products: u = s A x before up and down, q = s B2ᵀ dout before dh, p = s B13ᵀ dh
before dx. Each then extends the sum of the product it belongs to, so that no merged weight is
formed. The scaling is inside u, q and p, which makes the factors' gradients plain outer sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from moe_patch.kernels.device import device_of, on_device_of
from moe_patch.kernels.dh import HiddenGradients, hidden_gradients
from moe_patch.kernels.dw import outer_sum
from moe_patch.kernels.launch import RowTiles, depth_block
from moe_patch.kernels.plan import build_plan
from moe_patch.kernels.reduce import combine, expert_sum, routing_gradient
from moe_patch.kernels.rows import grouped_linear
from moe_patch.kernels.tiles import Tile, pick_tile, rows_bucket
from moe_patch.kernels.up import up
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
        x_TD: hidden states, bf16, fp16 or fp32; x, the weights and the factors share the dtype.
        ids_TK: integer expert ids; outside [0, E) is an empty slot.
        weights_TK: routing weights, any floating dtype.
        w, glu: the experts' weights and activation.
        lora13, lora2: low-rank factors of the up and the down projection.
        save_h: return h for backward; without it backward recomputes h.
        norms: also return the norm of every expert's output row.

    Returns:
        ExpertsForward; out_TD in the dtype of x, accumulated in fp32.
    """
    plan = build_plan(ids_TK, w.w13_EHD.shape[0])
    empty = x_TD.new_empty(0)
    if ids_TK.numel() == 0:
        norm_TK = (
            torch.zeros(ids_TK.shape, dtype=torch.float32, device=x_TD.device) if norms else empty
        )
        h_NH = x_TD.new_empty(0, w.w13_EHD.shape[1]) if save_h else empty
        return ExpertsForward(torch.zeros_like(x_TD), plan, h_NH, norm_TK)
    with on_device_of(x_TD):
        call = _Call(plan, _unit_stride(x_TD), w, glu, lora13, lora2)
        h_NH, a_NF = call.up(save_h=save_h, save_a=True)
        y_ND = call.down(a_NF)
        out_TD = combine(y_ND, plan, weights_TK.contiguous())
        norm_TK = _to_TK(_row_norm(y_ND), plan) if norms else empty
    return ExpertsForward(out_TD, plan, h_NH, norm_TK)


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
    if plan.row_of_N.numel() == 0:
        return _zero_gradients(x_TD, weights_TK, w, lora13, lora2, needs)
    with on_device_of(x_TD):
        call = _Call(plan, _unit_stride(x_TD), w, glu, lora13, lora2)
        return _backward(
            call, _unit_stride(dout_TD.to(x_TD.dtype)), weights_TK.contiguous(), h_NH, needs
        )


class _Call:
    """The operands of one call and the products that both directions use."""

    def __init__(
        self,
        plan: Plan,
        x_TD: Tensor,
        w: ExpertWeights,
        glu: Glu,
        lora13: Lora | None,
        lora2: Lora | None,
    ) -> None:
        self.plan, self.x_TD, self.w, self.glu = plan, x_TD, w, glu
        self.lora13, self.lora2 = lora13, lora2
        self.tiles = RowTiles(plan)
        self.device = device_of(x_TD)
        self.bucket = rows_bucket(self.tiles.count, self.tiles.num_experts)

    def tile(self, op: str) -> Tile:
        capability, shared_memory = self.device.capability, self.device.shared_memory
        return pick_tile(op, self.bucket, self.x_TD.dtype, capability, shared_memory)

    def up(self, *, save_h: bool, save_a: bool) -> tuple[Tensor, Tensor]:
        low_rank = None
        if self.lora13 is not None:
            low_rank = self.rank_inputs(self.x_TD, self.lora13, gather=True), self.lora13.B_EOR
        tile = self.tile("up")
        rows = self.tiles.rows(tile.m)
        w13, b13 = self.w.w13_EHD, self.w.b13_EH
        return up(
            self.x_TD,
            rows,
            w13,
            b13,
            self.glu,
            tile,
            low_rank=low_rank,
            save_h=save_h,
            save_a=save_a,
        )

    def down(self, a_NF: Tensor) -> Tensor:
        low_rank = None
        if self.lora2 is not None:
            low_rank = self.rank_inputs(a_NF, self.lora2), self.lora2.B_EOR
        tile = self.tile("down")
        rows = self.tiles.rows(tile.m)
        return grouped_linear(a_NF, rows, self.w.w2_EDF, self.w.b2_ED, tile, low_rank=low_rank)

    def input_gradient(self, dh_NH: Tensor, p_NR: Tensor | None) -> Tensor:
        low_rank = None
        if self.lora13 is not None and p_NR is not None:
            low_rank = p_NR, self.lora13.A_ERI.transpose(1, 2)
        tile = self.tile("dx")
        rows, w_EDH = self.tiles.rows(tile.m), self.w.w13_EHD.transpose(1, 2)
        dx_ND = grouped_linear(dh_NH, rows, w_EDH, None, tile, low_rank=low_rank)
        return combine(dx_ND, self.plan, None)

    def rank_inputs(self, source: Tensor, lora: Lora, *, gather: bool = False) -> Tensor:
        """u = s A_e in_n, [N, R]: what the B factor multiplies."""
        return self._thin(source, lora.A_ERI, lora.scaling, gather)

    def rank_gradients(self, source: Tensor, lora: Lora, *, gather: bool = False) -> Tensor:
        """s B_eᵀ dout_n, [N, R]: what the A factor passes on to its input."""
        return self._thin(source, lora.B_EOR.transpose(1, 2), lora.scaling, gather)

    def _thin(self, source: Tensor, w_ERI: Tensor, alpha: float, gather: bool) -> Tensor:
        tile = self.tile("thin")
        tile = replace(tile, n=depth_block(w_ERI.shape[1]))
        rows = self.tiles.rows(tile.m)
        return grouped_linear(source, rows, w_ERI, None, tile, gather=gather, alpha=alpha)

    def outer_A(
        self, rank_NR: Tensor, right: Tensor, like_ERI: Tensor, *, gather: bool = False
    ) -> Tensor:
        """Gradient of an A factor."""
        tile = replace(self.tile("thin_dw"), m=depth_block(rank_NR.shape[1]))
        return outer_sum(rank_NR, right, self.plan, like_ERI, tile, gather_right=gather)

    def outer_B(
        self, left: Tensor, rank_NR: Tensor, like_EOR: Tensor, *, gather: bool = False
    ) -> Tensor:
        """Gradient of a B factor."""
        tile = self.tile("thin_dw")
        tile = replace(tile, m=tile.n, n=depth_block(rank_NR.shape[1]))
        return outer_sum(left, rank_NR, self.plan, like_EOR, tile, gather_left=gather)


class _Intermediate(NamedTuple):
    """What the gradients are made of; None or empty where nothing needs it."""

    hidden: HiddenGradients
    q_NR: Tensor | None
    p_NR: Tensor | None
    u13_NR: Tensor | None
    wu2_NR: Tensor | None


def _intermediate(
    call: _Call, dout_TD: Tensor, weights_TK: Tensor, h_NH: Tensor, needs: ExpertsNeeds
) -> _Intermediate:
    lora13, lora2 = call.lora13, call.lora2
    need_dh = needs.x or needs.w13 or needs.b13 or needs.lora13_A or needs.lora13_B or needs.norms
    need_wa = needs.w2 or needs.lora2_A or needs.lora2_B or needs.norms
    hidden, q_NR, p_NR, u13_NR, wu2_NR = HiddenGradients(h_NH, h_NH, h_NH), None, None, None, None
    if lora2 is not None and (need_dh or needs.weights or needs.lora2_A):
        q_NR = call.rank_gradients(dout_TD, lora2, gather=True)
    if need_dh or need_wa or needs.weights:
        if h_NH.numel() == 0:
            h_NH, _ = call.up(save_h=True, save_a=False)
        tile = call.tile("dh")
        hidden = hidden_gradients(
            dout_TD, call.tiles.rows(tile.m), call.w.w2_EDF, weights_TK, h_NH, call.glu, tile,
            low_rank=None if lora2 is None or q_NR is None else (q_NR, lora2.A_ERI),
            dh=need_dh, wa=need_wa, partial=needs.weights,
        )  # fmt: skip
    if lora13 is not None and (needs.x or needs.lora13_A or needs.norms):
        p_NR = call.rank_gradients(hidden.dh_NH, lora13)
    if lora13 is not None and (needs.lora13_B or needs.norms):
        u13_NR = call.rank_inputs(call.x_TD, lora13, gather=True)
    if lora2 is not None and (needs.lora2_B or needs.norms):
        wu2_NR = call.rank_inputs(hidden.wa_NF, lora2)
    return _Intermediate(hidden, q_NR, p_NR, u13_NR, wu2_NR)


def _backward(
    call: _Call, dout_TD: Tensor, weights_TK: Tensor, h_NH: Tensor, needs: ExpertsNeeds
) -> ExpertsBackward:
    w, lora13, lora2, plan = call.w, call.lora13, call.lora2, call.plan
    mid = _intermediate(call, dout_TD, weights_TK, h_NH, needs)
    dh_NH, wa_NF, partial_NC = mid.hidden
    grads: dict[str, Tensor | None] = {}
    if needs.weights:
        rows = call.tiles.rows(call.tile("dh").m)
        grads["weights"] = routing_gradient(partial_NC, rows, weights_TK, dout_TD, w.b2_ED)
    if needs.w2:
        grads["w2"] = outer_sum(dout_TD, wa_NF, plan, w.w2_EDF, call.tile("dw2"), gather_left=True)
    if needs.b2 and w.b2_ED is not None:
        grads["b2"] = expert_sum(dout_TD, plan, w.b2_ED, gather=True, weights_TK=weights_TK)
    if needs.w13:
        tile = call.tile("dw13")
        grads["w13"] = outer_sum(dh_NH, call.x_TD, plan, w.w13_EHD, tile, gather_right=True)
    if needs.b13 and w.b13_EH is not None:
        grads["b13"] = expert_sum(dh_NH, plan, w.b13_EH)
    if needs.x:
        grads["x"] = call.input_gradient(dh_NH, mid.p_NR)
    if lora13 is not None and needs.lora13_A:
        grads["lora13_A"] = call.outer_A(mid.p_NR, call.x_TD, lora13.A_ERI, gather=True)
    if lora13 is not None and needs.lora13_B:
        grads["lora13_B"] = call.outer_B(dh_NH, mid.u13_NR, lora13.B_EOR)
    if lora2 is not None and needs.lora2_A:
        grads["lora2_A"] = call.outer_A(mid.q_NR, wa_NF, lora2.A_ERI)
    if lora2 is not None and needs.lora2_B:
        grads["lora2_B"] = call.outer_B(dout_TD, mid.wu2_NR, lora2.B_EOR, gather=True)
    if needs.norms:
        grads |= _gradient_norms(call, dout_TD, weights_TK, mid)
    return ExpertsBackward(**grads)


def _gradient_norms(
    call: _Call, dout_TD: Tensor, weights_TK: Tensor, mid: _Intermediate
) -> dict[str, Tensor | None]:
    """Row norms by the outer-product identity ||u ⊗ v|| = ||u|| ||v|| (no second backward)."""
    valid_TK = call.plan.slot_of_TK >= 0
    x_T1, dout_T1 = _row_norm(call.x_TD).unsqueeze(1), _row_norm(dout_TD).unsqueeze(1)
    dh_TK, wa_TK = (_to_TK(_row_norm(rows), call.plan) for rows in mid.hidden[:2])
    dy_TK = torch.where(valid_TK, weights_TK.float().abs() * dout_T1, 0.0)
    # In an empty slot dh and wa are 0, but 0 times the norm of a NaN row would be NaN.
    square_TK = torch.where(valid_TK, (dout_T1 * wa_TK).square() + (dh_TK * x_T1).square(), 0.0)
    if call.w.b13_EH is not None:
        square_TK = square_TK + dh_TK.square()
    if call.w.b2_ED is not None:
        square_TK = square_TK + dy_TK.square()
    norms: dict[str, Tensor | None] = {
        "grad_norm_out_TK": dy_TK,
        "grad_norm_params_TK": square_TK.sqrt(),
    }
    if call.lora13 is None and call.lora2 is None:
        return norms
    lora_TK = torch.zeros_like(square_TK)
    if mid.p_NR is not None and mid.u13_NR is not None:
        p_TK, u_TK = (_to_TK(_row_norm(rows), call.plan) for rows in (mid.p_NR, mid.u13_NR))
        lora_TK += torch.where(valid_TK, (p_TK * x_T1).square() + (dh_TK * u_TK).square(), 0.0)
    if mid.q_NR is not None and mid.wu2_NR is not None:
        q_TK, u_TK = (_to_TK(_row_norm(rows), call.plan) for rows in (mid.q_NR, mid.wu2_NR))
        lora_TK += torch.where(valid_TK, (q_TK * wa_TK).square() + (dout_T1 * u_TK).square(), 0.0)
    norms["grad_norm_lora_TK"] = lora_TK.sqrt()
    return norms


def _zero_gradients(
    x_TD: Tensor,
    weights_TK: Tensor,
    w: ExpertWeights,
    lora13: Lora | None,
    lora2: Lora | None,
    needs: ExpertsNeeds,
) -> ExpertsBackward:
    """The gradients of a call without rows."""
    inputs: dict[str, Tensor | None] = {
        "x": x_TD, "weights": weights_TK, "w13": w.w13_EHD, "w2": w.w2_EDF, "b13": w.b13_EH, "b2":
        w.b2_ED,
        "lora13_A": lora13 and lora13.A_ERI, "lora13_B": lora13 and lora13.B_EOR,
        "lora2_A": lora2 and lora2.A_ERI, "lora2_B": lora2 and lora2.B_EOR,
    }  # fmt: skip
    wanted = needs._asdict()
    grads = {
        name: torch.zeros_like(tensor)
        for name, tensor in inputs.items()
        if wanted[name] and tensor is not None
    }
    if needs.norms:
        zero_TK = torch.zeros(weights_TK.shape, dtype=torch.float32, device=x_TD.device)
        grads |= {"grad_norm_out_TK": zero_TK, "grad_norm_params_TK": zero_TK.clone()}
        if lora13 is not None or lora2 is not None:
            grads["grad_norm_lora_TK"] = zero_TK.clone()
    return ExpertsBackward(**grads)


def _unit_stride(rows: Tensor) -> Tensor:
    """The kernels step through a row one element at a time."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _row_norm(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)


def _to_TK(values_N: Tensor, plan: Plan) -> Tensor:
    """Per-row values from plan order to [T, K], 0 in empty slots."""
    slot_TK = plan.slot_of_TK
    picked = values_N.index_select(0, slot_TK.reshape(-1).clamp(min=0)).view(slot_TK.shape)
    return torch.where(slot_TK >= 0, picked, 0.0)
