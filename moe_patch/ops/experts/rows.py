"""Convert between tokens and rows in plan order, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_patch.types import Plan


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_norm(rows: Tensor) -> Tensor:
    """Return the norm of each row, fp32 (fp64 for fp64)."""
    return torch.linalg.vector_norm(rows, dim=-1, dtype=_wide(rows.dtype))


def tokens_of(plan: Plan) -> Tensor:
    """Return the token index of each row in plan order, [N]; arbitrary past the last valid row."""
    return plan.row_of_N.clamp(min=0) // plan.slot_of_TK.shape[1]


def token_rows(x_TD: Tensor, plan: Plan) -> Tensor:
    """Gather x into plan order, [N, D]; arbitrary past the last valid row."""
    return x_TD.index_select(0, tokens_of(plan))


def expert_rows(b_EO: Tensor, plan: Plan) -> Tensor:
    """Gather b of each row's expert in plan order, [N, O]; arbitrary past the last valid row."""
    E, N = b_EO.shape[0], plan.row_of_N.shape[0]
    slots = torch.arange(N, device=b_EO.device, dtype=torch.int32)
    expert_N = torch.searchsorted(plan.offsets_S[1:].contiguous(), slots, right=True)
    return b_EO.index_select(0, expert_N.clamp(max=E - 1))


def row_weights(weights_TK: Tensor, plan: Plan) -> Tensor:
    """Gather routing weights in plan order, fp32 (fp64 for fp64); 0 past the last valid row."""
    flat = weights_TK.to(_wide(weights_TK.dtype)).reshape(-1)
    picked_N = flat.index_select(0, plan.row_of_N.clamp(min=0).long())
    return torch.where(plan.row_of_N >= 0, picked_N, 0.0)


def rows_to_slots(values_N: Tensor, plan: Plan) -> Tensor:
    """Scatter values from plan order to [T, K]; 0 for empty slots."""
    slot = plan.slot_of_TK
    picked = values_N.index_select(0, slot.reshape(-1).clamp(min=0)).view(slot.shape)
    return torch.where(slot >= 0, picked, 0.0)


def gather_sum(rows_ND: Tensor, slot_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Sum w_tk rows[slot_tk] over k in ascending order, in fp32 (fp64 for fp64)."""
    wide = _wide(rows_ND.dtype)
    out_TD = torch.zeros(slot_TK.shape[0], rows_ND.shape[1], dtype=wide, device=rows_ND.device)
    empty_TK = slot_TK < 0
    # `bool()` synchronises on a GPU and is free on a CPU.
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
