"""OpenAI's privacy filter: gpt_oss with concatenated gate and up, and fp32 throughout.

The router divides the weights by top_k, and the block multiplies its output by top_k.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_patch.ops.routing import RouteRule
from moe_patch.runtime.spec import FamilySpec, GluRule


def linear_bias_fp32(router: Any, hidden: Tensor) -> Tensor:
    """Return W x + b with everything upcast to fp32."""
    hidden_TD = hidden.reshape(-1, hidden.shape[-1])
    return torch.nn.functional.linear(hidden_TD.float(), router.weight.float(), router.bias.float())


def over_k(experts: int, *, top_k: int) -> dict[str, Any]:
    """Choose the best k logits; weights are a softmax over those k, divided by k."""
    return {"top_k": top_k, "order": "topk_score", "fp32": False, "scale": 1.0 / top_k}


OPENAI_PRIVACY_FILTER = FamilySpec(
    model_types=("openai_privacy_filter",),
    module="openai_privacy_filter",
    block="OpenAIPrivacyFilterMLP",
    router="OpenAIPrivacyFilterTopKRouter",
    experts="OpenAIPrivacyFilterExperts",
    logits=linear_bias_fp32,
    routing=RouteRule("topk_softmax_over_k", over_k),
    params={"top_k": "top_k"},
    router_attr="router",
    glu=GluRule("swiglu_oai", alpha="alpha", limit="limit"),
    experts_fp32=True,
)

FAMILIES = (OPENAI_PRIVACY_FILTER,)
