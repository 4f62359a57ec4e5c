"""Softmax scores with a group limit: DeepSeek-V2 (best score of a group) and Mistral (best two)."""

from moe_patch.families.block_choice import in_both_forms
from moe_patch.families.logits import linear, linear_fp32
from moe_patch.ops.routing import greedy_or_groups, softmax_topk
from moe_patch.runtime.spec import Const, FamilySpec


def deepseek_v2_like(prefix: str, module: str, model_type: str) -> FamilySpec:
    """Return the entry of a family whose classes are renamed copies of DeepSeek-V2's."""
    return FamilySpec(
        model_types=(model_type,),
        module=module,
        block=f"{prefix}Moe",
        router=f"{prefix}TopkRouter",
        experts=f"{prefix}Experts",
        logits=linear_fp32,
        routing=greedy_or_groups,
        params={
            "top_k": "top_k",
            "method": "topk_method",
            "groups": "num_group",
            "top_groups": "topk_group",
            "scale": "routed_scaling_factor",
        },
        shared="shared_experts",
        router_input_3d=True,
    )


_MISTRAL = {
    "top_k": "top_k",
    "groups": "num_group",
    "top_groups": "topk_group",
    "group_score": Const("top2"),
    "group_fill": Const(0.0),
    "eps": Const(1e-20),
    "scale": "routed_scaling_factor",
}

MISTRAL4 = FamilySpec(
    model_types=("mistral4",),
    module="mistral4",
    block="Mistral4MoE",
    router="Mistral4TopkRouter",
    experts="Mistral4Experts",
    logits=linear,
    routing=softmax_topk,
    params={**_MISTRAL, "renormalize": "norm_topk_prob", "fp32": Const(False)},
    shared="shared_experts",
    router_input_3d=True,
)

MISTRAL_LARGE4 = FamilySpec(
    model_types=("mistral_large4_text",),
    module="mistral_large4",
    block="MistralLarge4TextMoE",
    router="MistralLarge4TextTopkRouter",
    experts="MistralLarge4TextExperts",
    logits=linear_fp32,
    routing=softmax_topk,
    params={**_MISTRAL, "renormalize": Const(True)},
    shared="shared_experts",
    router_input_3d=True,
)

FAMILIES = (
    *in_both_forms(deepseek_v2_like("DeepseekV2", "deepseek_v2", "deepseek_v2")),
    *in_both_forms(deepseek_v2_like("DeepseekOcr2Text", "deepseek_ocr2", "deepseek_ocr2_text")),
    deepseek_v2_like("UnlimitedOcrText", "unlimited_ocr", "unlimited_ocr_text"),
    *in_both_forms(MISTRAL4, "Mistral4NaiveMoe", groups="n_group"),
    MISTRAL_LARGE4,
)
