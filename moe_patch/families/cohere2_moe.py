"""Cohere2-MoE: choose the best logits; the config says if softmax or sigmoid weights them."""

from __future__ import annotations

from typing import Any

from moe_patch.errors import UnsupportedModelError
from moe_patch.families.logits import linear
from moe_patch.ops.routing import RouteRule
from moe_patch.runtime.spec import FamilySpec


def softmax_or_sigmoid(
    experts: int, *, top_k: int, selection: str, renormalize: bool
) -> dict[str, Any]:
    """Choose the best k logits; weight them by softmax in fp32, or by sigmoids.

    Raises:
        UnsupportedModelError: ``selection`` is neither "softmax" nor "sigmoid".
    """
    if selection not in ("softmax", "sigmoid"):
        raise UnsupportedModelError(
            f"Cohere2MoeTopKRouter.expert_selection_fn is {selection!r}; accepted: softmax, sigmoid"
        )
    return {
        "top_k": top_k, "score": selection, "order": "topk_score", "fp32": selection == "softmax",
        "renormalize": renormalize and selection == "sigmoid",
    }  # fmt: skip


COHERE2_MOE = FamilySpec(
    model_types=("cohere2_moe",),
    module="cohere2_moe",
    block="Cohere2MoeSparseMoeBlock",
    router="Cohere2MoeTopKRouter",
    experts="Cohere2MoeExperts",
    logits=linear,
    routing=RouteRule("topk_softmax_or_sigmoid", softmax_or_sigmoid),
    params={
        "top_k": "top_k",
        "selection": "expert_selection_fn",
        "renormalize": "norm_topk_prob",
    },
    weights_dtype="hidden",
    shared_by_block="shared_experts",
)

FAMILIES = (COHERE2_MOE,)
