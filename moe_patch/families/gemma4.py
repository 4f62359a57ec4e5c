"""Gemma-4 and DiffusionGemma: normed router input, softmax, trainable scale per expert.

There is no block: router and experts sit on the decoder layer. The router returns probabilities
where other families return logits.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_patch.ops.routing import softmax_topk
from moe_patch.runtime.spec import Const, FamilySpec
from moe_patch.types import Routing


def normed_projection(router: Any, hidden: Tensor) -> Tensor:
    """Return proj(norm(x) * scale / sqrt(D)), in the dtype of the weights."""
    normed = router.norm(hidden) * router.scale * router.scalar_root_size
    return router.proj(normed).reshape(-1, router.per_expert_scale.shape[0])


def probabilities_and_scaled(router: Any, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities, weights times the scale of each expert, and ids."""
    probabilities_TE = torch.softmax(routing.logits_TE, dim=-1, dtype=torch.float32)
    weights_TK = routing.weights_TK * router.per_expert_scale[routing.ids_TK]
    return probabilities_TE, weights_TK, routing.ids_TK


def gemma4_like(prefix: str, module: str, *model_types: str) -> FamilySpec:
    """Return the entry of a family whose classes are renamed copies of Gemma-4's."""
    return FamilySpec(
        model_types=model_types,
        module=module,
        router=f"{prefix}Router",
        experts=f"{prefix}Experts",
        logits=normed_projection,
        routing=softmax_topk,
        params={"top_k": "config.top_k_experts", "renormalize": Const(True)},
        router_attr="router",
        returns=probabilities_and_scaled,
    )


def narrow_probabilities_and_scaled(router: Any, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the router returns before 5.13: the same, with a softmax in the logits' dtype."""
    weights_TK = routing.weights_TK * router.per_expert_scale[routing.ids_TK]
    return torch.softmax(routing.logits_TE, dim=-1), weights_TK, routing.ids_TK


GEMMA4 = gemma4_like("Gemma4Text", "gemma4", "gemma4_text")

FAMILIES = (
    replace(GEMMA4, since="5.13"),
    replace(
        GEMMA4,
        until="5.13",
        params={**GEMMA4.params, "fp32": Const(False)},
        weights_dtype="logits",
        returns=narrow_probabilities_and_scaled,
    ),
    gemma4_like("DiffusionGemmaText", "diffusion_gemma", "diffusion_gemma_text"),
)
