"""Routing: from router logits to the chosen experts and their weights. Pure functions, torch only.

Every family's router is one of the named functions below, each a set of fixed choices for
:func:`route`, which is the definition (the Triton ``route`` of ops/routing_op.py has the same
signature).

Rules, whatever the family:
    ties      equal scores go to the lower expert id, equal groups to the lower group: a stable
              descending sort. ``torch.topk`` promises no order; ``ties="torch"`` takes it anyway.
    NaN       a row with NaN or Inf gets distinct ids in range, NaN weights; other rows are exact.
    bias      a correction bias decides which experts are chosen and never enters the weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_patch.errors import check_logits
from moe_patch.types import NEG_INF, RouteSpec, Routing


def best_ids(scores_TE: Tensor, k: int, ties: str = "lower") -> Tensor:
    """Indices of the k largest of each row, descending; equal values in order of their index.

    Args:
        scores_TE: [rows, candidates], any floating dtype. NaN counts as the largest value.
        k: how many, at most the number of candidates.
        ties: "lower" or "torch" (torch.topk's own, undefined, choice).

    Returns:
        [rows, k], int64.
    """
    scores_TE = scores_TE.detach()
    if ties == "torch":
        return torch.topk(scores_TE, k, dim=-1).indices
    if scores_TE.is_cuda:
        # Its sort puts a NaN whose sign bit is set below every number
        # (https://github.com/pytorch/pytorch/issues/190781).
        scores_TE = scores_TE.masked_fill(scores_TE.isnan(), float("nan"))
    return torch.sort(scores_TE, dim=-1, descending=True, stable=True).indices[:, :k]


def stable_topk(scores_TE: Tensor, k: int, ties: str = "lower") -> tuple[Tensor, Tensor]:
    """(values, indices) of :func:`best_ids`; the values are differentiable."""
    ids_TK = best_ids(scores_TE, k, ties)
    return scores_TE.gather(-1, ids_TK), ids_TK


def score(logits: Tensor, name: str) -> Tensor:
    """Elementwise or row-wise score of the logits, in their own dtype."""
    if name == "softmax":
        return torch.softmax(logits, dim=-1)
    if name == "sigmoid":
        return torch.sigmoid(logits)
    if name == "sqrtsoftplus":
        return torch.nn.functional.softplus(logits).sqrt()
    if name == "none":
        return logits
    raise ValueError(f"score is {name!r}; accepted: softmax, sigmoid, sqrtsoftplus, none")


def limit_groups(choice_TE: Tensor, spec: RouteSpec) -> Tensor:
    """Mask the experts outside each row's best groups (group-limited routing, DeepSeek-V2/V3)."""
    T, E = choice_TE.shape
    grouped_TGe = choice_TE.view(T, spec.groups, E // spec.groups)
    if spec.group_score == "top2":
        group_TG = grouped_TGe.topk(2, dim=-1).values.sum(dim=-1)
    elif spec.group_score == "max":
        group_TG = grouped_TGe.amax(dim=-1)
    else:
        raise ValueError(f"group_score is {spec.group_score!r}; accepted: top2, max")
    best_Tg = best_ids(group_TG, spec.top_groups, spec.ties)
    keep_TG = torch.zeros_like(group_TG, dtype=torch.bool).scatter_(1, best_Tg, True)
    return grouped_TGe.masked_fill(~keep_TG.unsqueeze(-1), spec.group_fill).view(T, E)


def route(logits_TE: Tensor, spec: RouteSpec, bias_E: Tensor | None = None) -> Routing:
    """The definition of routing: choose ``spec.top_k`` experts per row and weight them.

    Args:
        logits_TE: raw router logits, fp64, fp32, bf16 or fp16, any strides.
        spec: the family's choices.
        bias_E: correction bias, for the choice only; receives no gradient.

    Returns:
        Routing with int64 ids in descending order of the choice score and differentiable weights.

    Raises:
        UnsupportedOptionError: logits of another dtype, or that are no matrix.
    """
    check_logits(logits_TE, "moe_patch.ops.routing.route", "logits_TE")
    if spec.fp32 and logits_TE.dtype in (torch.bfloat16, torch.float16):
        scored_TE = logits_TE.float()
    else:
        scored_TE = logits_TE
    if spec.order == "topk_score":
        values_TK, ids_TK = stable_topk(_biased(scored_TE, bias_E), spec.top_k, spec.ties)
        if bias_E is not None:
            values_TK = scored_TE.gather(1, ids_TK)
        weights_TK = score(values_TK, spec.score)
    else:
        scores_TE = score(scored_TE, spec.score)
        choice_TE = (scores_TE if spec.bias_on == "scores" else scored_TE).detach()
        choice_TE = _biased(choice_TE, bias_E)
        if spec.groups > 1 and spec.top_groups < spec.groups:
            choice_TE = limit_groups(choice_TE, spec)
        ids_TK = best_ids(choice_TE, spec.top_k, spec.ties)
        weights_TK = scores_TE.gather(1, ids_TK)
    if spec.renormalize:
        total_T1 = weights_TK.sum(dim=-1, keepdim=True)
        total_T1 = total_T1.clamp(min=spec.eps) if spec.clamp_eps else total_T1 + spec.eps
        weights_TK = weights_TK / total_T1
    if spec.scale != 1.0:
        weights_TK = weights_TK * spec.scale
    if spec.weights_dtype is not None:
        weights_TK = weights_TK.to(spec.weights_dtype)
    return Routing(ids_TK, weights_TK, logits_TE)


def _biased(choice: Tensor, bias_E: Tensor | None) -> Tensor:
    return choice if bias_E is None else choice.detach() + bias_E.detach()


RouteImpl = Callable[[Tensor, RouteSpec, Tensor | None], Routing]


def softmax_topk(
    logits_TE: Tensor,
    bias_E: Tensor | None = None,
    *,
    top_k: int,
    renormalize: bool = False,
    eps: float = 0.0,
    clamp_eps: bool = False,
    scale: float = 1.0,
    groups: int | None = 0,
    top_groups: int | None = 0,
    group_score: str = "max",
    group_fill: float = 0.0,
    fp32: bool = True,
    weights_dtype: torch.dtype | None = None,
    ties: str = "lower",
    impl: RouteImpl = route,
) -> Routing:
    """Softmax over all experts, then the best k. w = softmax(l)[ids], optionally renormalised.

    Source: Qwen2/3-MoE, OLMoE, Mixtral (renormalised), DeepSeek-V2 (groups by max, masked with 0),
    Mistral-4 (groups by top-2 sum), ERNIE-4.5 (bias, clamp).
    """
    spec = RouteSpec(
        top_k=top_k, score="softmax", fp32=fp32, renormalize=renormalize, eps=eps,
        clamp_eps=clamp_eps, scale=scale, groups=groups or 0, top_groups=top_groups or 0,
        group_score=group_score, group_fill=group_fill, weights_dtype=weights_dtype, ties=ties,
    )  # fmt: skip
    return impl(logits_TE, spec, bias_E)


def greedy_or_groups(
    logits_TE: Tensor,
    bias_E: Tensor | None = None,
    *,
    top_k: int,
    method: str,
    groups: int | None,
    top_groups: int | None,
    scale: float = 1.0,
    weights_dtype: torch.dtype | None = None,
    ties: str = "lower",
    impl: RouteImpl = route,
) -> Routing:
    """DeepSeek-V2: softmax, the best k overall ("greedy") or within the best groups by maximum.

    transformers masks the scores of the other groups with 0.0 and takes the weights after that, so
    an excluded expert can only ever be an empty choice. Here it is never chosen, and asking for
    more experts than the best groups hold is an error.

    Raises:
        ValueError: another method, or groups too small for ``top_k``.
        UnsupportedOptionError: as :func:`route`.
    """
    check_logits(logits_TE, "moe_patch.ops.routing.greedy_or_groups", "logits_TE")
    if method == "greedy":
        groups = top_groups = 0
    elif method != "group_limited_greedy":
        raise ValueError(f"topk_method is {method!r}; accepted: greedy, group_limited_greedy")
    elif groups is None or top_groups is None or top_k * groups > top_groups * logits_TE.shape[-1]:
        raise ValueError(
            f"top_k = {top_k} of {logits_TE.shape[-1]} experts does not fit into {top_groups} of "
            f"{groups} groups"
        )
    return softmax_topk(
        logits_TE, bias_E, top_k=top_k, scale=scale, groups=groups, top_groups=top_groups,
        group_score="max", group_fill=NEG_INF, weights_dtype=weights_dtype, ties=ties, impl=impl,
    )  # fmt: skip


def topk_softmax(
    logits_TE: Tensor,
    bias_E: Tensor | None = None,
    *,
    top_k: int,
    scale: float = 1.0,
    fp32: bool = False,
    weights_dtype: torch.dtype | None = None,
    ties: str = "lower",
    impl: RouteImpl = route,
) -> Routing:
    """The best k logits, then softmax over those k alone. Source: gpt_oss, Granite-MoE, Aria."""
    spec = RouteSpec(
        top_k=top_k, score="softmax", order="topk_score", fp32=fp32, scale=scale,
        weights_dtype=weights_dtype, ties=ties,
    )  # fmt: skip
    return impl(logits_TE, spec, bias_E)


def sigmoid_topk(
    logits_TE: Tensor,
    bias_E: Tensor | None = None,
    *,
    top_k: int,
    renormalize: bool = True,
    eps: float = 0.0,
    scale: float = 1.0,
    groups: int | None = 0,
    top_groups: int | None = 0,
    group_fill: float = NEG_INF,
    bias_on: str = "scores",
    use_bias: bool = True,
    fp32: bool = True,
    weights_dtype: torch.dtype | None = None,
    ties: str = "lower",
    impl: RouteImpl = route,
) -> Routing:
    """Independent sigmoid scores; a correction bias and group limits shape the choice only.

    s = sigmoid(l); choose by s + bias within the best groups (top-2 sum); w = s[ids], optionally
    divided by its sum + eps, times scale. Groups of 0 or None mean no limit; ``use_bias=False``
    leaves a given bias out (LFM2-MoE). Source: DeepSeek-V3 (arXiv:2412.19437 section 2.1.2),
    GLM-4.5, MiniMax-M2 (no groups), Kolibri (bias on the logits).
    """
    spec = RouteSpec(
        top_k=top_k, score="sigmoid", fp32=fp32, renormalize=renormalize, eps=eps, scale=scale,
        groups=groups or 0, top_groups=top_groups or 0, group_fill=group_fill, bias_on=bias_on,
        weights_dtype=weights_dtype, ties=ties,
    )  # fmt: skip
    return impl(logits_TE, spec, bias_E if use_bias else None)
