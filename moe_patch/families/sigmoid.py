"""Sigmoid scores without groups: MiniMax-M2 and M3, Flint, Kolibri, Laguna, LFM2, Hunyuan-V3."""

import torch
from torch import Tensor, nn

from moe_patch.families.logits import (
    linear,
    linear_fp32,
    linear_fp32_no_autocast,
    linear_then_fp32,
    linear_weight_dtype,
)
from moe_patch.ops.routing import sigmoid_topk
from moe_patch.runtime.spec import Arg, Const, FamilySpec, GluRule


def _laguna_logits(router: nn.Module, hidden: Tensor) -> Tensor:
    logits_TE = linear_then_fp32(router, hidden)
    cap = router.router_logit_softcapping
    return torch.tanh(logits_TE / cap) * cap if cap > 0.0 else logits_TE


def _kolibri_logits(router: nn.Module, hidden: Tensor) -> Tensor:
    # In inference transformers' GEMM writes fp32 directly; upcasting first would copy W.
    x_TD = hidden.reshape(-1, hidden.shape[-1])
    if x_TD.is_cuda and x_TD.dtype == router.weight.dtype and not torch.is_grad_enabled():
        return torch.mm(x_TD, router.weight.t(), out_dtype=torch.float32)
    return nn.functional.linear(x_TD.float(), router.weight.float())


MINIMAX_M2 = FamilySpec(
    model_types=("minimax_m2",),
    module="minimax_m2",
    block="MiniMaxM2SparseMoeBlock",
    router="MiniMaxM2TopKRouter",
    experts="MiniMaxM2Experts",
    logits=linear_weight_dtype,
    routing=sigmoid_topk,
    params={"top_k": "top_k", "renormalize": Const(True)},
    bias=Arg(1),
)

# The block scales the routed output before it adds the shared expert.
MINIMAX_M3 = FamilySpec(
    model_types=("minimax_m3_vl_text",),
    module="minimax_m3_vl",
    block="MiniMaxM3VLSparseMoeBlock",
    router="MiniMaxM3VLTopKRouter",
    experts="MiniMaxM3VLExperts",
    logits=linear_weight_dtype,
    routing=sigmoid_topk,
    params={"top_k": "top_k", "renormalize": Const(True)},
    bias="e_score_correction_bias",
    glu=GluRule("swiglu_oai", alpha="swiglu_alpha", limit="swiglu_limit"),
    shared_by_block="shared_experts",
)

FLINT = FamilySpec(
    model_types=("flint",),
    module="flint",
    block="FlintSparseMoeBlock",
    router="FlintTopKRouter",
    experts="FlintExperts",
    logits=linear_fp32_no_autocast,
    routing=sigmoid_topk,
    params={"top_k": "top_k", "renormalize": "norm_topk_prob"},
    shared="shared_expert",
)

KOLIBRI1 = FamilySpec(
    model_types=("kolibri1",),
    module="kolibri1",
    block="Kolibri1SparseMoeBlock",
    router="Kolibri1TopKRouter",
    experts="Kolibri1Experts",
    logits=_kolibri_logits,
    routing=sigmoid_topk,
    params={"top_k": "top_k", "renormalize": "norm_topk_prob", "bias_on": Const("logits")},
    bias="e_score_correction_bias",
    shared="shared_experts",
    router_input_3d=True,
)

# The block scales the routed output before it adds the shared expert.
LAGUNA = FamilySpec(
    model_types=("laguna",),
    module="laguna",
    block="LagunaSparseMoeBlock",
    router="LagunaTopKRouter",
    experts="LagunaExperts",
    logits=_laguna_logits,
    routing=sigmoid_topk,
    params={"top_k": "top_k", "renormalize": Const(True)},
    bias="e_score_correction_bias",
    weights_dtype="hidden",
    shared_by_block="shared_experts",
)

LFM2_MOE = FamilySpec(
    model_types=("lfm2_moe",),
    module="lfm2_moe",
    block="Lfm2MoeSparseMoeBlock",
    router="Lfm2MoeTopKRouter",
    experts="Lfm2MoeExperts",
    logits=linear,
    routing=sigmoid_topk,
    params={
        "top_k": "top_k",
        "renormalize": "norm_topk_prob",
        "eps": Const(1e-6),
        "scale": "routed_scaling_factor",
        "fp32": Const(False),
    },
    bias=Arg(1, when="use_expert_bias"),
    glu=GluRule("silu"),
    since="5.13",
)

# The block may add its shared expert in fp32.
HY_V3 = FamilySpec(
    model_types=("hy_v3",),
    module="hy_v3",
    block="HYV3MoE",
    router="HYV3TopKRouter",
    experts="HYV3Experts",
    logits=linear_fp32,
    routing=sigmoid_topk,
    params={
        "top_k": "top_k",
        "renormalize": Const(True),
        "eps": Const(1e-20),
        "scale": "router_scaling_factor",
    },
    bias=Arg(1),
    shared_by_block="shared_experts",
)

FAMILIES = (MINIMAX_M2, MINIMAX_M3, FLINT, KOLIBRI1, LAGUNA, LFM2_MOE, HY_V3)
