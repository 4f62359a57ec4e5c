"""Routing: router logits to the chosen experts and their weights. Pure functions in plain torch.

:func:`route` defines routing; the Triton ``route`` of ops/routing_op.py has the same signature.
Wherever possible, a family's router is a :class:`RouteRule`: a named set of options of ``route``.

Rules for all families:

- Ties: among equal scores the lower expert id wins, among equal groups the lower group. This is a
  stable descending sort. ``torch.topk`` guarantees no order; ``ties="torch"`` selects it anyway.
- NaN: a row with NaN or Inf gets distinct ids in range and NaN weights. Other rows are exact.
- Bias: a correction bias affects the choice of experts and never the weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_patch.errors import check_logits
from moe_patch.ops.direct import eagerly_cached
from moe_patch.types import RouteSpec, Routing


def best_ids(scores_TE: Tensor, k: int, ties: str = "lower") -> Tensor:
    """Return the indices of each row's k largest values, descending; ties in order of the index.

    Args:
        scores_TE: [rows, candidates], any floating dtype. NaN counts as the largest value.
        k: number of indices, at most the number of candidates.
        ties: "lower", or "torch" for the undefined order of torch.topk.

    Returns:
        [rows, k], int64.
    """
    scores_TE = scores_TE.detach()
    if ties == "torch":
        return torch.topk(scores_TE, k, dim=-1).indices
    if scores_TE.is_cuda:
        # On CUDA, torch.sort orders a NaN with the sign bit set below every number
        # (https://github.com/pytorch/pytorch/issues/190781).
        scores_TE = scores_TE.masked_fill(scores_TE.isnan(), float("nan"))
    return torch.sort(scores_TE, dim=-1, descending=True, stable=True).indices[:, :k]


def stable_topk(scores_TE: Tensor, k: int, ties: str = "lower") -> tuple[Tensor, Tensor]:
    """Return (values, indices) of :func:`best_ids`; the values are differentiable."""
    ids_TK = best_ids(scores_TE, k, ties)
    return scores_TE.gather(-1, ids_TK), ids_TK


def score(logits: Tensor, name: str) -> Tensor:
    """Compute the score of the logits, elementwise or row by row, in their dtype."""
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
    """Mask experts outside each row's best groups (group-limited routing, DeepSeek-V2/V3)."""
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
    """Choose ``spec.top_k`` experts per row and compute their weights: the definition of routing.

    Args:
        logits_TE: raw router logits, fp64, fp32, bf16 or fp16, any strides.
        spec: the family's options.
        bias_E: correction bias, for the choice only; receives no gradient.

    Returns:
        Routing with int64 ids in descending order of the choice score, and differentiable weights.

    Raises:
        UnsupportedOptionError: the logits have another dtype or are not a matrix.
    """
    check_logits(logits_TE, "moe_patch.ops.routing.route", "logits_TE")
    scores_TE = _scores(logits_TE, spec)
    if spec.order == "topk_score":
        choice_TE = _biased(scores_TE, bias_E)
    else:
        choice_TE = scores_TE if spec.bias_on == "scores" else _wide(logits_TE, spec)
        choice_TE = _biased(choice_TE.detach(), bias_E)
        if spec.groups > 1 and spec.top_groups < spec.groups:
            choice_TE = limit_groups(choice_TE, spec)
    ids_TK = best_ids(choice_TE, spec.top_k, spec.ties)
    return Routing(ids_TK, _weights(scores_TE, spec, ids_TK), logits_TE)


def weights_at(logits_TE: Tensor, spec: RouteSpec, ids_TK: Tensor) -> Tensor:
    """Return the weights [T, K] that :func:`route` gives these experts, instead of the best.

    Args:
        logits_TE, spec: as for :func:`route`.
        ids_TK: int64, K different experts per row.
    """
    return _weights(_scores(logits_TE, spec), spec, ids_TK)


def _wide(logits_TE: Tensor, spec: RouteSpec) -> Tensor:
    if spec.fp32 and logits_TE.dtype in (torch.bfloat16, torch.float16):
        return logits_TE.float()
    return logits_TE


def _scores(logits_TE: Tensor, spec: RouteSpec) -> Tensor:
    """Return the values to choose by: scores, or for order "topk_score" the logits."""
    wide_TE = _wide(logits_TE, spec)
    return wide_TE if spec.order == "topk_score" else score(wide_TE, spec.score)


def _weights(scores_TE: Tensor, spec: RouteSpec, ids_TK: Tensor) -> Tensor:
    weights_TK = scores_TE.gather(1, ids_TK)
    if spec.order == "topk_score":
        weights_TK = score(weights_TK, spec.score)
    if spec.renormalize:
        total_T1 = weights_TK.sum(dim=-1, keepdim=True)
        total_T1 = total_T1.clamp(min=spec.eps) if spec.clamp_eps else total_T1 + spec.eps
        weights_TK = weights_TK / total_T1
    if spec.scale != 1.0:
        weights_TK = weights_TK * spec.scale
    if spec.weights_dtype is not None:
        weights_TK = weights_TK.to(spec.weights_dtype)
    return weights_TK


def _biased(choice: Tensor, bias_E: Tensor | None) -> Tensor:
    return choice if bias_E is None else choice.detach() + bias_E.detach()


RouteImpl = Callable[[Tensor, RouteSpec, Tensor | None], Routing]
# Fields of RouteSpec that a family entry cannot set: the rule or the caller determines them.
NOT_OF_AN_ENTRY = ("score", "order", "weights_dtype", "ties", "batch_invariant")


class RouteRule:
    """A family's routing as data: a name and options for :class:`RouteSpec`.

    A rule is called like any routing function. Its parameters are the keyword arguments of
    ``make``, or else the fields of RouteSpec other than NOT_OF_AN_ENTRY.

    Args:
        name: name of the rule in reports and in the table of families.
        make: (experts, **parameters) -> fields of RouteSpec, for a rule with logic of its own;
            ``experts`` is the number of logits per row. None uses the parameters unchanged.
        constants: fields fixed by the rule, and defaults of the parameters.
    """

    def __init__(
        self, name: str, make: Callable[..., dict[str, Any]] | None = None, **constants: Any
    ) -> None:
        self.name = self.__name__ = name
        self.make, self.constants = make, constants
        self._constants = tuple(constants.items())
        given = inspect.signature(RouteSpec if make is None else make).parameters.values()
        at_call = inspect.signature(self.__call__).parameters.values()
        self.__signature__ = inspect.Signature(
            [p for p in at_call if p.kind is not p.VAR_KEYWORD]
            + [
                p.replace(kind=p.KEYWORD_ONLY, default=constants.get(p.name, p.default))
                for p in given
                if p.name not in (*NOT_OF_AN_ENTRY, "experts")
            ]
        )

    def __eq__(self, other: object) -> bool:
        """Compare by value: the entry of a copied or unpickled model equals the shipped one."""
        return isinstance(other, RouteRule) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def spec(
        self,
        experts: int,
        *,
        weights_dtype: torch.dtype | None = None,
        ties: str = "lower",
        **params: Any,
    ) -> RouteSpec:
        """Return the RouteSpec for ``experts`` logits per row; None for groups means no limit.

        Raises:
            ValueError, UnsupportedModelError: raised by ``make`` for values it does not accept.
        """
        return _spec_of(
            self.make, self._constants, experts, weights_dtype, ties, tuple(params.items())
        )

    def __call__(
        self,
        logits_TE: Tensor,
        bias_E: Tensor | None = None,
        *,
        weights_dtype: torch.dtype | None = None,
        ties: str = "lower",
        impl: RouteImpl = route,
        **params: Any,
    ) -> Routing:
        """Route by this rule; arguments and errors as in :func:`route` and :meth:`spec`."""
        check_logits(logits_TE, f"moe_patch.ops.routing.{self.name}", "logits_TE")
        spec = self.spec(logits_TE.shape[-1], weights_dtype=weights_dtype, ties=ties, **params)
        return impl(logits_TE, spec, bias_E)


@eagerly_cached
def _spec_of(
    make: Callable[..., dict[str, Any]] | None,
    constants: tuple[tuple[str, Any], ...],
    experts: int,
    weights_dtype: torch.dtype | None,
    ties: str,
    params: tuple[tuple[str, Any], ...],
) -> RouteSpec:
    """Build the RouteSpec of a rule; see :meth:`RouteRule.spec`."""
    chosen = {**dict(constants), **dict(params)}
    if make is not None:
        chosen = make(experts, **chosen)
    for name in ("groups", "top_groups"):
        chosen[name] = chosen.get(name) or 0
    return RouteSpec(**chosen, weights_dtype=weights_dtype, ties=ties)


# w = softmax(l)[ids] over all experts, optionally renormalised. Source: Qwen2/3-MoE, OLMoE,
# Mixtral (renormalised), Mistral-4 (groups by top-2 sum), ERNIE-4.5 (bias, clamp).
softmax_topk = RouteRule("softmax_topk", score="softmax", group_score="max", group_fill=0.0)

# Take the best k logits, then softmax over those k only. Source: gpt_oss, Granite-MoE, Aria.
topk_softmax = RouteRule("topk_softmax", score="softmax", order="topk_score", fp32=False)

# s = sigmoid(l). Choose by s + bias within the best groups (top-2 sum). w = s[ids], optionally
# divided by its sum + eps, times scale. Source: DeepSeek-V3 (arXiv:2412.19437 section 2.1.2),
# GLM-4.5, MiniMax-M2 (no groups), Kolibri (bias on the logits).
sigmoid_topk = RouteRule("sigmoid_topk", score="sigmoid", renormalize=True)


def _greedy_or_groups(
    experts: int,
    *,
    top_k: int,
    method: str,
    groups: int | None,
    top_groups: int | None,
    scale: float = 1.0,
) -> dict[str, Any]:
    if method == "greedy":
        groups = top_groups = 0
    elif method != "group_limited_greedy":
        raise ValueError(f"topk_method is {method!r}; accepted: greedy, group_limited_greedy")
    elif groups is None or top_groups is None or top_k * groups > top_groups * experts:
        raise ValueError(
            f"top_k = {top_k} of {experts} experts does not fit into {top_groups} of {groups} "
            "groups; accepted: at most as many experts as the best groups hold"
        )
    return {
        "top_k": top_k, "groups": groups, "top_groups": top_groups, "group_score": "max",
        "scale": scale,
    }  # fmt: skip


# DeepSeek-V2: softmax, then the best k overall ("greedy") or within the best groups by maximum.
# In transformers, the scores of the other groups are 0.0 when the weights are taken, so an excluded
# expert can be chosen, with weight 0. Here an excluded expert is never chosen. A top_k that exceeds
# the experts of the best groups is an error.
greedy_or_groups = RouteRule("greedy_or_groups", _greedy_or_groups)
