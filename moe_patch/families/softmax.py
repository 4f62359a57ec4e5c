"""Softmax over all experts, then top-k: families that differ from Qwen in a detail or two."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from moe_patch.families.block_choice import RELEASE, in_both_forms
from moe_patch.families.logits import linear, linear_fp32, linear_fp32_no_autocast
from moe_patch.ops.routing import softmax_topk
from moe_patch.runtime.spec import Const, FamilySpec


def _hunyuan_logits(router: nn.Module, hidden: Tensor) -> Tensor:
    x_TD = hidden.reshape(-1, hidden.shape[-1])
    return router.wg(x_TD.float() if router.wg.weight.dtype == torch.float32 else x_TD)


JAMBA = FamilySpec(
    model_types=("jamba",),
    module="jamba",
    block="JambaSparseMoeBlock",
    router="JambaTopKRouter",
    experts="JambaExperts",
    router_attr="router",
    logits=linear,
    routing=softmax_topk,
    params={"top_k": "top_k"},
    weights_dtype="hidden",
    since="5.21",
)

HUNYUAN = FamilySpec(
    model_types=("hunyuan_v1_moe",),
    module="hunyuan_v1_moe",
    block="HunYuanMoEV1Moe",
    router="HunYuanMoEV1Gate",
    experts="HunYuanMoEV1Experts",
    logits=_hunyuan_logits,
    routing=softmax_topk,
    params={"top_k": "top_k", "renormalize": Const(True)},
    weights_dtype="logits",
    shared="shared_mlp",
)

LARA_MINI = FamilySpec(
    model_types=("lara_mini",),
    module="lara_mini",
    block="LaraMiniSparseMoeBlock",
    router="LaraMiniTopKRouter",
    experts="LaraMiniExperts",
    logits=linear_fp32,
    routing=softmax_topk,
    params={"top_k": "top_k", "renormalize": "norm_topk_prob"},
    weights_dtype="hidden",
    shared="shared_expert",
)


def ernie_like(
    prefix: str, router_prefix: str, module: str, model_type: str
) -> tuple[FamilySpec, FamilySpec]:
    """Return ERNIE-4.5's entries: correction bias on the softmax, weights' sum clamped from below.

    The shared expert is optional and added by transformers' own code. In the VL model it sits on
    the block around the text and vision blocks. Before 5.13 the router gave ids before weights.
    """
    spec = FamilySpec(
        model_types=(model_type,),
        module=module,
        block=f"{prefix}SparseMoeBlock",
        router=f"{router_prefix}TopKRouter",
        experts=f"{router_prefix}Experts",
        logits=linear_fp32_no_autocast,
        routing=softmax_topk,
        params={
            "top_k": "top_k",
            "renormalize": Const(True),
            "eps": "norm_min",
            "clamp_eps": Const(True),
        },
        bias="moe_statics.e_score_correction_bias",
        weights_dtype="hidden",
        shared_by_block="shared_experts",
    )
    return replace(spec, since=RELEASE), replace(spec, ids_first=True, until=RELEASE)


FAMILIES = (
    JAMBA,
    *in_both_forms(HUNYUAN),
    LARA_MINI,
    *ernie_like("Ernie4_5_Moe", "Ernie4_5_Moe", "ernie4_5_moe", "ernie4_5_moe"),
    *ernie_like("Ernie4_5_VLMoe", "Ernie4_5_VLMoeMoe", "ernie4_5_vl_moe", "ernie4_5_vl_moe_text"),
)
