"""Routing for families whose config names the score function (DeepSeek-V4, Inkling-2)."""

from __future__ import annotations

from typing import Any

from torch import nn

from moe_patch.errors import UnsupportedModelError
from moe_patch.ops.routing import RouteRule

SCORES = {"Sigmoid": "sigmoid", "SqrtSoftplusActivation": "sqrtsoftplus"}


def score_name(score_fn: nn.Module) -> str:
    """Return the name of a score module in :func:`moe_patch.ops.routing.score`.

    Raises:
        UnsupportedModelError: it has none.
    """
    name = type(score_fn).__name__
    if name not in SCORES:
        raise UnsupportedModelError(
            f"the router's score function is {type(score_fn).__module__}.{name}; accepted "
            f"scoring_func: {', '.join(SCORES.values())}"
        )
    return SCORES[name]


def _scored(
    experts: int, *, top_k: int, score_fn: nn.Module, eps: float, scale: float
) -> dict[str, Any]:
    return {
        "top_k": top_k, "score": score_name(score_fn), "fp32": False, "renormalize": True,
        "eps": eps, "scale": scale,
    }  # fmt: skip


# s = score(l) in the dtype of l; choose by s + bias; w = s[ids] / (sum + eps) * scale.
scored_topk = RouteRule("scored_topk", _scored)
