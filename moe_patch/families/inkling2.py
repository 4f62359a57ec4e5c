"""Inkling-2 and its looped form: fp32 scores by the configured function, soft-capped experts.

Their activation bounds gate and up by tanh, which no fused kernel implements. The experts run their
own activation between grouped products.
"""

from typing import Any

import torch
from torch import Tensor

from moe_patch.families.score_fn import scored_topk
from moe_patch.runtime.spec import Const, FamilySpec


def linear_of_fp32(router: Any, hidden: Tensor) -> Tensor:
    """Return W x with the hidden states upcast to fp32; the family keeps W in fp32."""
    return torch.nn.functional.linear(hidden.float().reshape(-1, hidden.shape[-1]), router.weight)


def inkling2_like(prefix: str, module: str, *model_types: str) -> FamilySpec:
    """Return the entry of a family whose classes are renamed copies of Inkling-2's."""
    return FamilySpec(
        model_types=model_types,
        module=module,
        block=f"{prefix}SparseMoeBlock",
        router=f"{prefix}TopKRouter",
        experts=f"{prefix}Experts",
        logits=linear_of_fp32,
        routing=scored_topk,
        params={
            "top_k": "top_k",
            "score_fn": "score_fn",
            "eps": Const(1e-20),
            "scale": "routed_scaling_factor",
        },
        bias="e_score_correction_bias",
    )


FAMILIES = (
    inkling2_like("Inkling2", "inkling2", "inkling2_text"),
    inkling2_like("Inkling2Loop", "inkling2_loop", "inkling2_loop_text"),
)
