"""Inkling: routed and shared experts share one normalisation, so the router weights both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_patch.families.logits import linear_fp32_no_autocast
from moe_patch.ops.routing import sigmoid_topk
from moe_patch.ops.routing_op import route_impl
from moe_patch.runtime.module_patch import ModulePatch, bound
from moe_patch.runtime.spec import Const, FamilySpec


@bound
def router_forward(
    router: Any, patch: ModulePatch, hidden_states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return routed logits, routing weights, ids, and the shared experts' weights.

    Experts are chosen by sigmoid(l) + bias among the routed ones. The weights are sigmoids divided
    by their sum over chosen and shared experts, times both scales; computed in log space.
    """
    shared = router.n_shared_experts
    logits = linear_fp32_no_autocast(router, hidden_states)
    routed_TE, shared_logits = logits[:, :-shared], logits[:, -shared:]
    ids_TK = patch.spec.choose(
        router,
        routed_TE,
        hidden_states,
        ties=patch.config.ties,
        impl=route_impl(patch.config.backend, patch.config.batch_invariant),
    ).ids_TK
    with torch.autocast(hidden_states.device.type, enabled=False):
        joint = torch.nn.functional.logsigmoid(
            torch.cat([routed_TE.gather(1, ids_TK), shared_logits], dim=-1)
        )
        weights = torch.softmax(joint, dim=-1) * router.route_scale * router.global_scale.float()
    weights = weights.to(hidden_states.dtype)
    K = ids_TK.shape[1]
    return routed_TE, weights[:, :K].contiguous(), ids_TK, weights[:, K:].contiguous()


INKLING = FamilySpec(
    model_types=("inkling_text",),
    module="inkling",
    block="InklingMoE",
    router="InklingTopkRouter",
    experts="InklingExperts",
    logits=linear_fp32_no_autocast,
    routing=sigmoid_topk,
    params={"top_k": "top_k", "renormalize": Const(False)},
    bias="e_score_correction_bias",
    router_forward=router_forward,
    router_input_3d=True,
    shared_by_block="shared_experts",
)

FAMILIES = (INKLING,)
