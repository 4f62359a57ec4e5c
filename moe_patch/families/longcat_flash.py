"""LongCat-Flash: softmax scores with a correction bias; some experts are the identity.

Ids from the number of routed experts upwards name experts without weights, which return their
input. The experts operator treats these ids as empty slots; their share w * x is added here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_patch.ops.routing import softmax_topk
from moe_patch.runtime.forward import experts_forward
from moe_patch.runtime.module_patch import ModulePatch, bound
from moe_patch.runtime.spec import FamilySpec, Layout


def classifier_fp32(router: Any, hidden: Tensor) -> Tensor:
    """Return W x in fp32, W from the router's Linear, whose bias the model never uses."""
    hidden_TD = hidden.reshape(-1, hidden.shape[-1])
    return torch.nn.functional.linear(hidden_TD.float(), router.classifier.weight.float())


@bound
def experts_with_identity(
    experts: Any, patch: ModulePatch, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Return the routed experts' output plus x times the weights of the identity experts."""
    out_TD = experts_forward(experts, hidden_TD, ids_TK, weights_TK)
    identity_TK = (ids_TK >= experts.num_routed_experts) & (ids_TK < experts.total_experts)
    share_T1 = weights_TK.masked_fill(~identity_TK, 0.0).sum(dim=-1, keepdim=True)
    return (out_TD + share_T1 * hidden_TD).to(hidden_TD.dtype)


LONGCAT_FLASH = FamilySpec(
    model_types=("longcat_flash",),
    module="longcat_flash",
    since="5.19",
    block="LongcatFlashMoE",
    router="LongcatFlashTopkRouter",
    experts="LongcatFlashExperts",
    logits=classifier_fp32,
    routing=softmax_topk,
    params={"top_k": "top_k", "scale": "routed_scaling_factor"},
    bias="e_score_correction_bias",
    router_attr="router",
    router_input_3d=True,
    router_reads_weight=True,
    layout=Layout(),
    experts_forward=experts_with_identity,
)

FAMILIES = (LONGCAT_FLASH,)
