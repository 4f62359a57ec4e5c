"""Qwen-MoE and its relatives: softmax over all experts, top-k, optional renormalisation."""

from typing import Any

from moe_patch.families.logits import linear
from moe_patch.ops.routing import softmax_topk
from moe_patch.runtime.spec import Const, FamilySpec, Source


def qwen_like(
    prefix: str,
    module: str,
    model_type: str | None = None,
    *,
    renormalize: Source = "norm_topk_prob",
    shared: bool = False,
    **more: Any,
) -> FamilySpec:
    """Return the entry of a family of renamed copies of Qwen3-MoE or, if ``shared``, Qwen2-MoE.

    Args:
        prefix: prefix of the class names.
        module: transformers model folder.
        model_type: model type of the config that the blocks read; by default the folder's name.
        renormalize: attribute that says whether to renormalise, or Const.
        shared: the block adds a shared expert times the sigmoid of its own gate.
        more: further fields of the entry.
    """
    return FamilySpec(
        model_types=(model_type or module,),
        module=module,
        block=f"{prefix}SparseMoeBlock",
        router=f"{prefix}TopKRouter",
        experts=f"{prefix}Experts",
        logits=linear,
        routing=softmax_topk,
        params={"top_k": "top_k", "renormalize": renormalize},
        weights_dtype="logits",
        shared="shared_expert" if shared else None,
        shared_gate="shared_expert_gate" if shared else None,
        **more,
    )


FAMILIES = (
    qwen_like("Qwen2Moe", "qwen2_moe", shared=True),
    qwen_like("Qwen3Moe", "qwen3_moe"),
    qwen_like("Qwen3Next", "qwen3_next", shared=True),
    qwen_like(
        "Qwen3_5Moe", "qwen3_5_moe", "qwen3_5_moe_text", renormalize=Const(True), shared=True
    ),
    qwen_like("Qwen3VLMoeText", "qwen3_vl_moe", "qwen3_vl_moe_text", renormalize=Const(True)),
    qwen_like("Qwen3OmniMoeThinkerText", "qwen3_omni_moe", "qwen3_omni_moe_text"),
    qwen_like(
        "Qwen3OmniMoeTalkerText", "qwen3_omni_moe", "qwen3_omni_moe_talker_text", shared=True
    ),
    qwen_like("Qwen4ExpText", "qwen4_exp", "qwen4_exp_text", shared=True),
    qwen_like("Olmoe", "olmoe"),
    qwen_like("FlexOlmo", "flex_olmo"),
    qwen_like("Mellum", "mellum"),
)
