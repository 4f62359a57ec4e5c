"""DeepSeek-V4: scores by sqrt(softplus), a correction bias for the choice; first layers hash.

On a hash layer a frozen table maps the token id to its experts; the gate only weights them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_patch.families.logits import linear
from moe_patch.families.score_fn import score_name, scored_topk
from moe_patch.ops.routing import score
from moe_patch.runtime.module_patch import ModulePatch, bound
from moe_patch.runtime.spec import Const, FamilySpec, GluRule

EPS = 1e-20


@bound
def hash_router_forward(
    router: Any, patch: ModulePatch, hidden_states: Tensor, input_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, weights and ids of the experts that the table lists for each token id."""
    logits_TE = linear(router, hidden_states)
    ids_TK = router.tid2eid[input_ids.reshape(-1)].long()
    weights_TK = score(logits_TE, score_name(router.score_fn)).gather(1, ids_TK)
    weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + EPS)
    return logits_TE, weights_TK * router.routed_scaling_factor, ids_TK


def with_token_ids(block: Any, hidden: Tensor) -> Tensor:
    """Call the block alone; a hash layer also gets one token id per hidden state."""
    if not block.is_hash:
        return block(hidden)
    tokens = hidden.shape[0] * hidden.shape[1]
    return block(hidden, torch.arange(tokens, device=hidden.device) % block.gate.tid2eid.shape[0])


TOP_K = FamilySpec(
    model_types=("deepseek_v4",),
    module="deepseek_v4",
    block="DeepseekV4SparseMoeBlock",
    router="DeepseekV4TopKRouter",
    experts="DeepseekV4Experts",
    logits=linear,
    routing=scored_topk,
    params={
        "top_k": "top_k",
        "score_fn": "score_fn",
        "eps": Const(EPS),
        "scale": "routed_scaling_factor",
    },
    bias="e_score_correction_bias",
    router_input_3d=True,
    glu=GluRule("act_fn", limit="limit"),
    shared_by_block="shared_experts",
    check_call=with_token_ids,
)

HASH = FamilySpec(
    model_types=("deepseek_v4",),
    module="deepseek_v4",
    router="DeepseekV4HashRouter",
    router_forward=hash_router_forward,
)

FAMILIES = (TOP_K, HASH)
