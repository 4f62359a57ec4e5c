"""Qwen-MoE and OLMoE: softmax over all experts, top-k, optional renormalisation."""

from moe_patch.families.logits import linear
from moe_patch.families.spec import FamilySpec
from moe_patch.routing import softmax_topk

_QWEN_PARAMS = {"top_k": "top_k", "renormalize": "norm_topk_prob"}

QWEN2_MOE = FamilySpec(
    model_types=("qwen2_moe",),
    module="qwen2_moe",
    block="Qwen2MoeSparseMoeBlock",
    router="Qwen2MoeTopKRouter",
    experts="Qwen2MoeExperts",
    logits=linear,
    routing=softmax_topk,
    params=_QWEN_PARAMS,
    weights_dtype="logits",
    shared="shared_expert",
    shared_gate="shared_expert_gate",
)

QWEN3_MOE = FamilySpec(
    model_types=("qwen3_moe",),
    module="qwen3_moe",
    block="Qwen3MoeSparseMoeBlock",
    router="Qwen3MoeTopKRouter",
    experts="Qwen3MoeExperts",
    logits=linear,
    routing=softmax_topk,
    params=_QWEN_PARAMS,
    weights_dtype="logits",
)

OLMOE = FamilySpec(
    model_types=("olmoe",),
    module="olmoe",
    block="OlmoeSparseMoeBlock",
    router="OlmoeTopKRouter",
    experts="OlmoeExperts",
    logits=linear,
    routing=softmax_topk,
    params=_QWEN_PARAMS,
    weights_dtype="logits",
)

FAMILIES = (QWEN2_MOE, QWEN3_MOE, OLMOE)
