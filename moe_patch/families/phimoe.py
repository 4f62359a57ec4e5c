"""Phi-3.5-MoE: SparseMixer-v2 picks two experts one after the other.

Each pick masks experts far below the best. In training it samples one of the rest (Gumbel noise),
and it weights the pick by the softmax over the rest. If the pick is not the best, its weight in
training is cut to a third three times in four (Heun's method). The gradient stays that of the uncut
weight. Source: arXiv:2409.12136 sections 2 and 3. Random draws come from the same generator in the
same order as transformers' own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_patch.families.logits import linear
from moe_patch.ops.routing import stable_topk
from moe_patch.runtime.module_patch import ModulePatch, bound
from moe_patch.runtime.spec import FamilySpec
from moe_patch.types import NEG_INF

KEEP_PROBABILITY_THRESHOLD = 0.75
CUT, REST = 0.3333, 0.6667


@bound
def sparsemixer(
    router: Any, patch: ModulePatch, hidden_states: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits_TE, weights_T2 and ids_T2; in training, jitter hidden states in place."""
    noise = router.input_jitter_noise
    if router.training and noise > 0:
        hidden_states *= torch.empty_like(hidden_states).uniform_(1.0 - noise, 1.0 + noise)
    logits_TE = linear(router, hidden_states)
    ties = patch.config.ties
    left_TE, ids, weights = logits_TE, [], []
    for turn in range(2):
        gates_TE, best_T1 = near_best(logits_TE, left_TE, router.router_jitter_noise, ties)
        id_T1 = gumbel_choice(gates_TE, ties) if router.training else best_T1
        probabilities_TE = torch.softmax(gates_TE, dim=-1)
        weight_T1 = probabilities_TE.gather(1, id_T1)
        if router.training:
            top_T1 = best(probabilities_TE.detach(), ties)[1]
            draw_T1 = torch.rand_like(weight_T1)
            if turn == 1:
                draw_T1.uniform_()  # transformers draws the numbers of the second pick twice
            keep_T1 = (id_T1 == top_T1) | (draw_T1 > KEEP_PROBABILITY_THRESHOLD)
            factor_T1 = torch.add(CUT, keep_T1, alpha=REST).type_as(weight_T1)
            weight_T1 = _Scaled.apply(weight_T1, factor_T1)
        ids.append(id_T1)
        weights.append(weight_T1)
        left_TE = logits_TE.scatter(1, id_T1, NEG_INF)
    return logits_TE, torch.cat(weights, dim=-1), torch.cat(ids, dim=-1)


def near_best(
    logits_TE: Tensor, left_TE: Tensor, jitter: float, ties: str
) -> tuple[Tensor, Tensor]:
    """Mask candidates relatively further than 2 * jitter below the best; return the best id too."""
    with torch.no_grad():
        best_T1, id_T1 = best(left_TE, ties)
        size_TE = logits_TE.abs().clamp(min=best_T1)
        far_TE = (best_T1 - logits_TE) / size_TE > 2 * jitter
    return left_TE.masked_fill(far_TE, NEG_INF), id_T1


def gumbel_choice(gates_TE: Tensor, ties: str) -> Tensor:
    """Sample one id per row, with probability softmax(gates)."""
    with torch.no_grad():
        noise_TE = torch.empty_like(gates_TE, memory_format=torch.contiguous_format).exponential_()
        return best(gates_TE - noise_TE.log(), ties)[1]


def best(scores_TE: Tensor, ties: str) -> tuple[Tensor, Tensor]:
    """Return each row's largest score and its id; ``ties="torch"`` takes torch.max's choice."""
    if ties == "torch":
        return scores_TE.max(dim=-1, keepdim=True)
    return stable_topk(scores_TE, 1)


class _Scaled(torch.autograd.Function):
    """Return weight * factor; backward passes the gradient to the weight unscaled."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: Tensor) -> Tensor:
        return weight * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


PHIMOE = FamilySpec(
    model_types=("phimoe",),
    module="phimoe",
    block="PhimoeSparseMoeBlock",
    router="PhimoeTopKRouter",
    experts="PhimoeExperts",
    router_attr="router",
    router_forward=sparsemixer,
)

FAMILIES = (PHIMOE,)
