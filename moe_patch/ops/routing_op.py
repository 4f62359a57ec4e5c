"""Triton-backed :func:`route`: one custom operator each for forward and backward.

Has the name, signature and meaning of ``ops.routing.route``, which is the definition and the
default on a CPU. The operators work under autograd and ``torch.compile``. In plain eager execution
the functions behind them are called without torch's dispatcher (ops/direct.py). The first call
imports Triton; importing this module does not.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_patch.errors import (
    UnsupportedOptionError,
    check_logits,
    refuse_forward_mode,
)
from moe_patch.ops.backend import choose_backend, refuse_batch_invariant
from moe_patch.ops.define import define
from moe_patch.ops.direct import eagerly_cached, is_plain_eager
from moe_patch.ops.routing import RouteImpl
from moe_patch.ops.routing import route as torch_route
from moe_patch.types import RouteSpec, Routing

MAX_EXPERTS = 512
MAX_TOP_K = 32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "none")
_SPEC_ARGUMENTS = (
    "int top_k, str score, str order, bool fp32, str bias_on, int groups, int top_groups, "
    "str group_score, float group_fill, bool renormalize, float eps, bool clamp_eps, float scale, "
    "ScalarType? weights_dtype, bool batch_invariant"
)
_SPEC_FIELDS = tuple(part.split()[-1] for part in _SPEC_ARGUMENTS.split(","))
_NUMBERS = tuple(
    (at, {"int": int, "float": float}[part.split()[0]])
    for at, part in enumerate(_SPEC_ARGUMENTS.split(","))
    if part.split()[0] in ("int", "float")
)


def route(
    logits_TE: Tensor,
    spec: RouteSpec,
    bias_E: Tensor | None = None,
    *,
    ids_dtype: torch.dtype = torch.int64,
) -> Routing:
    """Choose ``spec.top_k`` experts per row and compute their weights, in one Triton launch.

    Args:
        logits_TE: raw router logits, fp32, bf16 or fp16, any strides, at most 512 experts.
        spec: the family's options; ties must be "lower", top_k at most 32.
        bias_E: correction bias, for the choice only; receives no gradient.
        ids_dtype: int64, which transformers' experts expect, or int32.

    Returns:
        Routing with ids in descending order of the choice score, and weights differentiable in the
        logits. The gradient is evaluated in fp32, rounded once, and reproducible bit for bit.

    Raises:
        UnsupportedOptionError: the kernels do not support this spec, dtype, size or device, or a
            forward-mode derivative was requested.
    """
    check_logits(logits_TE, "moe_patch.ops.routing_op.route", "logits_TE")
    choices = _choices_of(logits_TE, spec, bias_E)
    if choices.why_not is not None:
        raise UnsupportedOptionError(
            f"moe_patch.ops.routing_op.route: {choices.why_not}; use moe_patch.ops.routing.route "
            "(backend='torch')"
        )
    return _route(logits_TE, bias_E, ids_dtype, choices)


class _Choices(NamedTuple):
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


def _choices_of(logits_TE: Tensor, spec: RouteSpec, bias_E: Tensor | None) -> _Choices:
    bias_dtype = None if bias_E is None else bias_E.dtype
    return _choices(spec, logits_TE.shape[1], logits_TE.dtype, bias_dtype)


@eagerly_cached
def _choices(
    spec: RouteSpec, experts: int, logits: torch.dtype, bias: torch.dtype | None
) -> _Choices:
    fields = [getattr(spec, name) for name in _SPEC_FIELDS]
    why_not = _why_not(spec, experts, logits, bias)
    if why_not is None:
        for at, kind in _NUMBERS:  # Convert numbers as the operator's schema does.
            fields[at] = kind(fields[at])
        spec = RouteSpec(**dict(zip(_SPEC_FIELDS, fields, strict=True)))
    return _Choices(why_not, tuple(fields), spec)


def _route(
    logits_TE: Tensor, bias_E: Tensor | None, ids_dtype: torch.dtype, choices: _Choices
) -> Routing:
    """Run :func:`route` after the checks."""
    refuse_forward_mode(logits_TE, what="routing")
    bias_E = None if bias_E is None else bias_E.detach()
    if is_plain_eager((logits_TE, bias_E)):
        graph = torch.is_grad_enabled() and logits_TE.requires_grad
        run: Any = _Route.apply if graph else _kernels().route_forward
        ids_TK, weights_TK = run(logits_TE, choices.spec, bias_E, ids_dtype)
    else:
        run = torch.ops.moe_patch.route_forward
        ids_TK, weights_TK = run(logits_TE, bias_E, ids_dtype, *choices.fields)
    return Routing(ids_TK, weights_TK, logits_TE)


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


def route_impl(backend: str, batch_invariant: bool = False) -> RouteImpl:
    """Return the :func:`route` of a backend: Triton where its kernels support the call, else torch.

    With ``batch_invariant``, a call that would run in torch raises UnsupportedOptionError.
    """
    return functools.partial(_route_on, backend, batch_invariant)


def _route_on(
    backend: str,
    batch_invariant: bool,
    logits_TE: Tensor,
    spec: RouteSpec,
    bias_E: Tensor | None = None,
) -> Routing:
    check_logits(logits_TE, "moe_patch.ops.routing_op.route_impl", "logits_TE")
    device, dtype = logits_TE.device, logits_TE.dtype
    triton = choose_backend(backend, device, dtype, batch_invariant).name == "triton"
    if batch_invariant:
        spec = replace(spec, batch_invariant=True)
    why_not: str | None = ""
    if triton:
        choices = _choices_of(logits_TE, spec, bias_E)
        if (why_not := choices.why_not) is None:
            return _route(logits_TE, bias_E, torch.int64, choices)
    if batch_invariant:
        refuse_batch_invariant(f"routing with {why_not}")
    return torch_route(logits_TE, spec, bias_E)


@functools.cache
def _kernels() -> ModuleType:
    """Import the module of the kernels, and with it Triton."""
    return importlib.import_module("moe_patch.kernels.routing.route")


@functools.cache
def _spec(fields: tuple[Any, ...]) -> RouteSpec:
    return RouteSpec(**dict(zip(_SPEC_FIELDS, fields, strict=True)))


def _forward(
    logits_TE: Tensor, bias_E: Tensor | None, ids_dtype: torch.dtype, *fields: Any
) -> tuple[Tensor, Tensor]:
    return tuple(_kernels().route_forward(logits_TE, _spec(fields), bias_E, ids_dtype))


def _forward_fake(
    logits_TE: Tensor, bias_E: Tensor | None, ids_dtype: torch.dtype, *fields: Any
) -> tuple[Tensor, Tensor]:
    spec = _spec(fields)
    T = logits_TE.shape[0]
    scores = torch.float32 if spec.fp32 else logits_TE.dtype
    new = logits_TE.new_empty
    return (
        new((T, spec.top_k), dtype=ids_dtype),
        new((T, spec.top_k), dtype=spec.weights_dtype or scores),
    )


def _backward(dweights_TK: Tensor, logits_TE: Tensor, ids_TK: Tensor, *fields: Any) -> Tensor:
    return _kernels().route_backward(dweights_TK, logits_TE, ids_TK, _spec(fields))


def _backward_fake(dweights_TK: Tensor, logits_TE: Tensor, ids_TK: Tensor, *fields: Any) -> Tensor:
    return torch.empty(logits_TE.shape, dtype=logits_TE.dtype, device=logits_TE.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], output[0])
    ctx.mark_non_differentiable(output[0])
    # By default autograd would fill a gradient of zeros for the ids before each backward.
    ctx.set_materialize_grads(False)
    ctx.fields = inputs[3:]


def _autograd(ctx: Any, dids: Any, dweights_TK: Tensor | None) -> tuple[Any, ...]:
    logits_TE, ids_TK = ctx.saved_tensors
    dlogits_TE = None
    if dweights_TK is not None:
        run = torch.ops.moe_patch.route_backward
        dlogits_TE = run(dweights_TK, logits_TE, ids_TK, *ctx.fields)
    return (dlogits_TE, None, None, *[None] * len(_SPEC_FIELDS))


class _Route(torch.autograd.Function):
    """Same autograd formula with the spec as one argument: autograd takes 1 µs per argument."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: Tensor,
        spec: RouteSpec,
        bias_E: Tensor | None,
        ids_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        ids_TK, weights_TK = _kernels().route_forward(logits_TE, spec, bias_E, ids_dtype)
        ctx.save_for_backward(logits_TE, ids_TK)
        ctx.mark_non_differentiable(ids_TK)
        # By default autograd would fill a gradient of zeros for the ids before each backward.
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        return ids_TK, weights_TK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        logits_TE, ids_TK = ctx.saved_tensors
        dweights_TK, spec = grads[1], ctx.spec
        if dweights_TK is None:
            return None, None, None, None
        if not torch.is_grad_enabled() and is_plain_eager((dweights_TK, logits_TE)):
            dlogits_TE = _kernels().route_backward(dweights_TK, logits_TE, ids_TK, spec)
        else:
            fields = (getattr(spec, name) for name in _SPEC_FIELDS)
            run = torch.ops.moe_patch.route_backward
            dlogits_TE = run(dweights_TK, logits_TE, ids_TK, *fields)
        return dlogits_TE, None, None, None


define(
    "moe_patch::route_forward",
    f"(Tensor logits, Tensor? bias, ScalarType ids_dtype, {_SPEC_ARGUMENTS}) -> (Tensor, Tensor)",
    _forward, _forward_fake, _autograd, _setup_context,
)  # fmt: skip
define(
    "moe_patch::route_backward",
    f"(Tensor dweights, Tensor logits, Tensor ids, {_SPEC_ARGUMENTS}) -> Tensor",
    _backward, _backward_fake,
)  # fmt: skip
