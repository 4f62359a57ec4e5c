"""Doge: product-key routing over very many experts, each one vector in and one vector out.

An expert is a row of two embedding tables, so expert products are gathered dot products. The whole
block is bound, because it has no router class and no experts module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_patch.config import PatchConfig
from moe_patch.ops.product_key import product_key_topk
from moe_patch.runtime.module_patch import ModulePatch, bound
from moe_patch.runtime.spec import FamilySpec
from moe_patch.types import Routing


@bound
def product_key_block(
    block: Any, patch: ModulePatch, hidden_states: Tensor, **_: Any
) -> tuple[Tensor, Tensor]:
    """Return dense MLP plus retrieved experts, and the two rows of key logits, [2, T, P].

    out_t = mlp(x_t) + sum_k act(d_k . x_t) * w_tk * u_k over the rows d, u of the chosen experts.
    """
    x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
    # Rows of the two axes come from different tokens; transformers splits the logits in this way.
    logits_2TP = block.router_gate(hidden_states).view(2, x_TD.shape[0], block.num_keys)
    routing = choose(block, logits_2TP, patch.config)
    ids_TK = routing.ids_TK.clamp(min=0)
    down_TKD, up_TKD = block.down_embed(ids_TK), block.up_embed(ids_TK)
    a_TK = (down_TKD @ x_TD.unsqueeze(-1)).squeeze(-1)
    a_TK = block.act_fn(a_TK) * routing.weights_TK
    retrieved_TD = (a_TK.unsqueeze(1) @ up_TKD).squeeze(1)
    gated = block.act_fn(block.gate_proj(hidden_states)) * block.up_proj(hidden_states)
    return block.down_proj(gated) + retrieved_TD.view(hidden_states.shape), logits_2TP


def choose(block: Any, logits_2TP: Tensor, config: PatchConfig) -> Routing:
    """Choose the best pairs of keys; ``ties="torch"`` takes torch.topk's choice among all pairs."""
    if config.ties == "lower":
        return product_key_topk(
            logits_2TP[0],
            logits_2TP[1],
            block.top_k,
            renormalize=block.norm_topk_prob,
            backend=config.backend,
        )
    P = logits_2TP.shape[2]
    (x_TP, y_TP), (ix_TP, iy_TP) = logits_2TP.topk(P, dim=-1)
    sum_TE = (x_TP.unsqueeze(2) + y_TP.unsqueeze(1)).flatten(1)
    id_TE = (ix_TP.unsqueeze(2) * P + iy_TP.unsqueeze(1)).flatten(1)
    best_TK, place_TK = sum_TE.topk(block.top_k, dim=-1)
    weights_TK = torch.softmax(best_TK, dim=-1)
    if block.norm_topk_prob:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return Routing(id_TE.gather(1, place_TK), weights_TK, logits_2TP)


def values_where_no_backward(block: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Call the block; transformers' has no backward if it renormalises in place."""
    with torch.set_grad_enabled(not block.norm_topk_prob):
        return block(hidden)


DOGE = FamilySpec(
    model_types=("doge",),
    module="doge",
    block="DogeCDMoE",
    router_attr="router_gate",
    block_forward=product_key_block,
    check_call=values_where_no_backward,
)

FAMILIES = (DOGE,)
