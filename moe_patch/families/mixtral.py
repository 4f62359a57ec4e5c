"""Mixtral: softmax over all experts, top-k, always renormalised, weights kept in fp32."""

from moe_patch.families.logits import linear
from moe_patch.families.spec import Const, FamilySpec
from moe_patch.routing import softmax_topk

MIXTRAL = FamilySpec(
    model_types=("mixtral",),
    module="mixtral",
    block="MixtralSparseMoeBlock",
    router="MixtralTopKRouter",
    experts="MixtralExperts",
    logits=linear,
    routing=softmax_topk,
    params={"top_k": "top_k", "renormalize": Const(True)},
)

FAMILIES = (MIXTRAL,)
