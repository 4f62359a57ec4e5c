"""DeepSeek-V3 and its many copies: sigmoid scores; a correction bias and groups for the choice."""

from typing import Any

from moe_patch.families.block_choice import in_both_forms
from moe_patch.families.logits import linear_fp32
from moe_patch.ops.routing import sigmoid_topk
from moe_patch.runtime.spec import Const, FamilySpec, GluRule

PARAMS = {
    "top_k": "top_k",
    "groups": "num_group",
    "top_groups": "topk_group",
    "renormalize": "norm_topk_prob",
    "eps": Const(1e-20),
    "scale": "routed_scaling_factor",
}


def deepseek_v3_like(prefix: str, module: str, *model_types: str, **more: Any) -> FamilySpec:
    """Return the entry of a family whose classes are renamed copies of DeepSeek-V3's.

    Args:
        prefix: prefix of the class names.
        module: transformers model folder.
        model_types: model types of the configs that the blocks read; by default the folder's name.
        more: fields that differ from DeepSeek-V3's.
    """
    fields: dict[str, Any] = {
        "block": f"{prefix}MoE",
        "router": f"{prefix}TopkRouter",
        "experts": f"{prefix}Experts",
        "logits": linear_fp32,
        "routing": sigmoid_topk,
        "params": PARAMS,
        "bias": "e_score_correction_bias",
        "shared": "shared_experts",
        "router_input_3d": True,
    }
    return FamilySpec(model_types=model_types or (module,), module=module, **{**fields, **more})


def since_before_513(prefix: str, *names: str, naive: bool = True, **more: Any) -> Any:
    """Return both entries of a family older than 5.13; see :func:`deepseek_v3_like`.

    Args:
        prefix: prefix of the class names.
        names: the model folder, and the model types.
        naive: the experts' class had another name before 5.13.
        more: fields that differ from DeepSeek-V3's.
    """
    spec = deepseek_v3_like(prefix, *names, **more)
    return in_both_forms(spec, f"{prefix}NaiveMoe" if naive else None, groups="n_group")


_CLAMPED_SILU = GluRule("silu", limit="swiglu_limit")

FAMILIES = (
    *since_before_513("DeepseekV3", "deepseek_v3", "deepseek_v3", "sarvam_mla"),
    *since_before_513("DeepseekV32", "deepseek_v32"),
    # The block normalises the sum of routed and shared output.
    deepseek_v3_like("AXK1", "axk1", shared=None, shared_by_block="shared_experts"),
    deepseek_v3_like("AXK2", "axk2", params={**PARAMS, "group_fill": Const(0.0)}),
    deepseek_v3_like("BailingHybrid", "bailing_hybrid"),
    # The block scales the routed output. Its fp32 gate needs no field: every Glu kind uses fp32.
    deepseek_v3_like(
        "Beam",
        "beam",
        router="BeamTopKRouter",
        params={name: source for name, source in PARAMS.items() if name != "scale"},
        glu=GluRule("act_fn"),
        shared=None,
    ),
    *since_before_513("Dots1", "dots1"),
    deepseek_v3_like("Dots3NoteText", "dots3_note", "dots3_note_text", experts="Dots3NoteExperts"),
    *since_before_513("ExaoneMoe", "exaone_moe", block="ExaoneMoeSparseMoEBlock", naive=False),
    *since_before_513("Glm4Moe", "glm4_moe", "glm4_moe", "sarvam_moe"),
    *since_before_513("Glm4MoeLite", "glm4_moe_lite"),
    *since_before_513("Glm4vMoeText", "glm4v_moe", "glm4v_moe_text"),
    *since_before_513("GlmMoeDsa", "glm_moe_dsa"),
    deepseek_v3_like("Glm5NextText", "glm5_next", "glm5_next_text", glu=_CLAMPED_SILU),
    deepseek_v3_like("HYV4", "hy_v4", glu=_CLAMPED_SILU),
    deepseek_v3_like("HYV4VL", "hy_v4_vl", "hy_v4_vl_text", glu=_CLAMPED_SILU),
    deepseek_v3_like("KimiLinear", "kimi_linear"),
    deepseek_v3_like("MiMoV2Flash", "mimo_v2_flash", shared=None),
    # In the block, projections to and from a latent space surround the experts.
    *since_before_513(
        "NemotronH", "nemotron_h", naive=False, shared=None, shared_by_block="shared_experts"
    ),
    *since_before_513("SolarOpen", "solar_open"),
)
