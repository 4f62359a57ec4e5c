"""Routing for families whose config names the score function (DeepSeek-V4, Inkling-2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_patch.errors import UnsupportedModelError
from moe_patch.ops.routing import RouteImpl, route
from moe_patch.types import RouteSpec, Routing

SCORES = {"Sigmoid": "sigmoid", "SqrtSoftplusActivation": "sqrtsoftplus"}


def score_name(score_fn: nn.Module) -> str:
    """The name that :func:`moe_patch.ops.routing.score` knows a score module by.

    Raises:
        UnsupportedModelError: it is none of those.
    """
    name = type(score_fn).__name__
    if name not in SCORES:
        raise UnsupportedModelError(
            f"the router's score function is {type(score_fn).__module__}.{name}; accepted "
            f"scoring_func: {', '.join(SCORES.values())}"
        )
    return SCORES[name]


def scored_topk(
    logits_TE: Tensor,
    bias_E: Tensor | None = None,
    *,
    top_k: int,
    score_fn: nn.Module,
    eps: float,
    scale: float,
    weights_dtype: torch.dtype | None = None,
    ties: str = "lower",
    impl: RouteImpl = route,
) -> Routing:
    """s = score(l) in the dtype of l; choose by s + bias; w = s[ids] / (sum + eps) * scale."""
    spec = RouteSpec(
        top_k=top_k, score=score_name(score_fn), fp32=False, renormalize=True, eps=eps, scale=scale,
        weights_dtype=weights_dtype, ties=ties,
    )  # fmt: skip
    return impl(logits_TE, spec, bias_E)
