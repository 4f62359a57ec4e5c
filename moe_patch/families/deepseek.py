"""DeepSeek-V3 and GLM-4.5: sigmoid scores, correction bias and group limits for the choice only."""

from moe_patch.families.logits import linear_fp32
from moe_patch.families.spec import Const, FamilySpec
from moe_patch.routing import sigmoid_topk

_PARAMS = {
    "top_k": "top_k",
    "groups": "num_group",
    "top_groups": "topk_group",
    "renormalize": "norm_topk_prob",
    "eps": Const(1e-20),
    "scale": "routed_scaling_factor",
}


def deepseek_v3_like(prefix: str, module: str, *model_types: str) -> FamilySpec:
    """A family whose classes are renamed copies of DeepSeek-V3's."""
    return FamilySpec(
        model_types=model_types,
        module=module,
        block=f"{prefix}MoE",
        router=f"{prefix}TopkRouter",
        experts=f"{prefix}Experts",
        logits=linear_fp32,
        routing=sigmoid_topk,
        params=_PARAMS,
        bias="e_score_correction_bias",
        shared="shared_experts",
        router_input_3d=True,
    )


FAMILIES = (
    deepseek_v3_like("DeepseekV3", "deepseek_v3", "deepseek_v3"),
    deepseek_v3_like("Glm4Moe", "glm4_moe", "glm4_moe"),
)
