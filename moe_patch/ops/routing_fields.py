"""The options of :class:`RouteSpec` in the form that the routing operators and kernels take."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_patch.ops.direct import eagerly_cached
from moe_patch.types import RouteSpec

MAX_EXPERTS = 512
MAX_TOP_K = 32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "none")
SPEC_ARGUMENTS = (
    "int top_k, str score, str order, bool fp32, str bias_on, int groups, int top_groups, "
    "str group_score, float group_fill, bool renormalize, float eps, bool clamp_eps, float scale, "
    "ScalarType? weights_dtype, bool batch_invariant"
)
SPEC_FIELDS = tuple(part.split()[-1] for part in SPEC_ARGUMENTS.split(","))
_NUMBERS = tuple(
    (at, {"int": int, "float": float}[part.split()[0]])
    for at, part in enumerate(SPEC_ARGUMENTS.split(","))
    if part.split()[0] in ("int", "float")
)


class Choices(NamedTuple):
    """A RouteSpec in the form that the operator and the kernels take.

    Attributes:
        why_not: why the kernels cannot route by this spec, or None if they can. Unless it is
            None, ``fields`` and ``spec`` are not normalised.
        fields: fields of the spec in the operator's order, numbers converted to its schema's types.
        spec: RouteSpec made of these fields.
    """

    why_not: str | None
    fields: tuple[Any, ...]
    spec: RouteSpec


def choices_of(logits_TE: Tensor, spec: RouteSpec, bias_E: Tensor | None) -> Choices:
    bias_dtype = None if bias_E is None else bias_E.dtype
    return _choices(spec, logits_TE.shape[1], logits_TE.dtype, bias_dtype)


@eagerly_cached
def _choices(
    spec: RouteSpec, experts: int, logits: torch.dtype, bias: torch.dtype | None
) -> Choices:
    fields = [getattr(spec, name) for name in SPEC_FIELDS]
    why_not = _why_not(spec, experts, logits, bias)
    if why_not is None:
        for at, kind in _NUMBERS:  # Convert numbers as the operator's schema does.
            fields[at] = kind(fields[at])
        spec = RouteSpec(**dict(zip(SPEC_FIELDS, fields, strict=True)))
    return Choices(why_not, tuple(fields), spec)


def why_not_route(logits_TE: Tensor, spec: RouteSpec, bias_E: Tensor | None = None) -> str | None:
    """Return why the Triton kernels cannot route this and what they accept, or None if they can."""
    bias_dtype = None if bias_E is None else bias_E.dtype
    return _why_not(spec, logits_TE.shape[1], logits_TE.dtype, bias_dtype)


def _why_not(spec: RouteSpec, E: int, logits: torch.dtype, bias: torch.dtype | None) -> str | None:
    if spec.ties != "lower":
        return f"ties={spec.ties!r} is torch.topk's own order, the kernels implement ties='lower'"
    if spec.score not in _SCORES:
        return f"score={spec.score!r}, accepted are {', '.join(_SCORES)}"
    for name, dtype in (("logits", logits), ("bias", bias)):
        if dtype is not None and dtype not in DTYPES:
            return f"the {name} are {dtype}, accepted are float32, bfloat16 and float16"
    if not 1 <= spec.top_k <= min(E, MAX_TOP_K):
        return f"top_k={spec.top_k} of {E} experts, accepted is 1 to min(experts, {MAX_TOP_K})"
    if E > MAX_EXPERTS:
        return f"{E} experts, accepted are at most {MAX_EXPERTS}"
    if spec.groups > 1 and (E % spec.groups or not 1 <= spec.top_groups <= spec.groups):
        return f"top_groups={spec.top_groups} of groups={spec.groups} over {E} experts"
    if spec.group_score not in ("top2", "max"):
        return f"group_score={spec.group_score!r}, accepted are top2 and max"
    if spec.group_score == "top2" and spec.groups == E:
        return f"group_score='top2' needs two experts per group, found groups={spec.groups} of {E}"
    return None


@functools.cache
def spec_of(fields: tuple[Any, ...]) -> RouteSpec:
    return RouteSpec(**dict(zip(SPEC_FIELDS, fields, strict=True)))
