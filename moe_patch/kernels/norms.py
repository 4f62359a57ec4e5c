"""Per-row norms of an experts call: a few reductions over what the call computed anyway."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_patch.kernels.call import Call
from moe_patch.kernels.dh import HiddenGradients
from moe_patch.types import Plan


class Intermediate(NamedTuple):
    """What the gradients are made of; None or empty where nothing needs it."""

    hidden: HiddenGradients
    q_NR: Tensor | None
    p_NR: Tensor | None
    u13_NR: Tensor | None
    wu2_NR: Tensor | None


def gradient_norms(
    call: Call, dout_TD: Tensor, weights_TK: Tensor, mid: Intermediate
) -> dict[str, Tensor | None]:
    """Row norms by the outer-product identity ||u ⊗ v|| = ||u|| ||v|| (no second backward)."""
    valid_TK = call.plan.slot_of_TK >= 0
    x_T1, dout_T1 = row_norm(call.x_TD).unsqueeze(1), row_norm(dout_TD).unsqueeze(1)
    dh_TK, wa_TK = (to_TK(row_norm(rows), call.plan) for rows in mid.hidden[:2])
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
        p_TK, u_TK = (to_TK(row_norm(rows), call.plan) for rows in (mid.p_NR, mid.u13_NR))
        lora_TK += torch.where(valid_TK, (p_TK * x_T1).square() + (dh_TK * u_TK).square(), 0.0)
    if mid.q_NR is not None and mid.wu2_NR is not None:
        q_TK, u_TK = (to_TK(row_norm(rows), call.plan) for rows in (mid.q_NR, mid.wu2_NR))
        lora_TK += torch.where(valid_TK, (q_TK * wa_TK).square() + (dout_T1 * u_TK).square(), 0.0)
    norms["grad_norm_lora_TK"] = lora_TK.sqrt()
    return norms


def row_norm(rows: Tensor) -> Tensor:
    """fp32 norm of each row."""
    return torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)


def to_TK(values_N: Tensor, plan: Plan) -> Tensor:
    """Per-row values from plan order to [T, K], 0 in empty slots."""
    slot_TK = plan.slot_of_TK
    picked = values_N.index_select(0, slot_TK.reshape(-1).clamp(min=0)).view(slot_TK.shape)
    return torch.where(slot_TK >= 0, picked, 0.0)
