"""Triton-backed :func:`route` and :func:`weights_at`: custom operators for forward and backward.

Both have the name, signature and meaning of those in ``ops.routing``, which are the definition and
the default on a CPU. The operators work under autograd and ``torch.compile``. In plain eager
execution the functions behind them are called without torch's dispatcher (ops/direct.py). The first
call imports Triton; importing this module does not.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe_patch.errors import UnsupportedOptionError, check_logits, refuse_forward_mode
from moe_patch.ops.backend import choose_backend, refuse_batch_invariant
from moe_patch.ops.define import define
from moe_patch.ops.direct import is_plain_eager
from moe_patch.ops.routing import route as torch_route
from moe_patch.ops.routing import weights_at as torch_weights_at
from moe_patch.ops.routing_fields import (
    SPEC_ARGUMENTS,
    SPEC_FIELDS,
    Choices,
    choices_of,
    spec_of,
)
from moe_patch.types import RouteSpec, Routing


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
    choices = _accepted("route", logits_TE, spec, bias_E)
    return _route(logits_TE, bias_E, ids_dtype, choices)


def weights_at(logits_TE: Tensor, spec: RouteSpec, ids_TK: Tensor, biased: bool = False) -> Tensor:
    """Return the weights [T, K] that :func:`route` gives these experts, instead of the best.

    For the experts that ``route`` chose, in its order, weights and gradients have the same bits.

    Args:
        logits_TE, spec: as for :func:`route`.
        ids_TK: int32 or int64, K different experts per row.
        biased: whether ``route`` had a correction bias, which changes its roundings.

    Raises:
        UnsupportedOptionError: as for :func:`route`.
    """
    check_logits(logits_TE, "moe_patch.ops.routing_op.weights_at", "logits_TE")
    choices = _accepted("weights_at", logits_TE, spec, None)
    return _weights_at(logits_TE, ids_TK, biased, choices)


def _accepted(name: str, logits_TE: Tensor, spec: RouteSpec, bias_E: Tensor | None) -> Choices:
    choices = choices_of(logits_TE, spec, bias_E)
    if choices.why_not is not None:
        raise UnsupportedOptionError(
            f"moe_patch.ops.routing_op.{name}: {choices.why_not}; use moe_patch.ops.routing.{name} "
            "(backend='torch')"
        )
    return choices


def _route(
    logits_TE: Tensor, bias_E: Tensor | None, ids_dtype: torch.dtype, choices: Choices
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


def _weights_at(logits_TE: Tensor, ids_TK: Tensor, biased: bool, choices: Choices) -> Tensor:
    """Run :func:`weights_at` after the checks."""
    refuse_forward_mode(logits_TE, what="routing")
    if is_plain_eager((logits_TE, ids_TK)):
        graph = torch.is_grad_enabled() and logits_TE.requires_grad
        run: Any = _WeightsAt.apply if graph else _weights_kernels().weights_at
        return run(logits_TE, ids_TK, choices.spec, biased)
    return torch.ops.moe_patch.weights_at(logits_TE, ids_TK, biased, *choices.fields)


def route_impl(backend: str, batch_invariant: bool = False) -> Callable[..., Routing]:
    """Return the :func:`route` of a backend: Triton where its kernels support the call, else torch.

    The result is a RouteImpl that also takes ``ids_TK``: the experts to use instead of the best.
    With ``batch_invariant``, a call that would run in torch raises UnsupportedOptionError.
    """
    return functools.partial(_route_on, backend, batch_invariant)


def _route_on(
    backend: str,
    batch_invariant: bool,
    logits_TE: Tensor,
    spec: RouteSpec,
    bias_E: Tensor | None = None,
    ids_TK: Tensor | None = None,
) -> Routing:
    check_logits(logits_TE, "moe_patch.ops.routing_op.route_impl", "logits_TE")
    device, dtype = logits_TE.device, logits_TE.dtype
    triton = choose_backend(backend, device, dtype, batch_invariant).name == "triton"
    if batch_invariant:
        spec = replace(spec, batch_invariant=True)
    why_not: str | None = ""
    if triton:
        choices = choices_of(logits_TE, spec, bias_E)
        if (why_not := choices.why_not) is None:
            if ids_TK is None:
                return _route(logits_TE, bias_E, torch.int64, choices)
            weights_TK = _weights_at(logits_TE, ids_TK, bias_E is not None, choices)
            return Routing(ids_TK, weights_TK, logits_TE)
    if batch_invariant:
        refuse_batch_invariant(f"routing with {why_not}")
    if ids_TK is None:
        return torch_route(logits_TE, spec, bias_E)
    return Routing(ids_TK, torch_weights_at(logits_TE, spec, ids_TK), logits_TE)


@functools.cache
def _kernels() -> ModuleType:
    """Import the module of the kernels, and with it Triton."""
    return importlib.import_module("moe_patch.kernels.routing.route")


@functools.cache
def _weights_kernels() -> ModuleType:
    """Import the module of the kernel of :func:`weights_at`; see :func:`_kernels`."""
    return importlib.import_module("moe_patch.kernels.routing.weights_at")


def _forward(
    logits_TE: Tensor, bias_E: Tensor | None, ids_dtype: torch.dtype, *fields: Any
) -> tuple[Tensor, Tensor]:
    return tuple(_kernels().route_forward(logits_TE, spec_of(fields), bias_E, ids_dtype))


def _forward_fake(
    logits_TE: Tensor, bias_E: Tensor | None, ids_dtype: torch.dtype, *fields: Any
) -> tuple[Tensor, Tensor]:
    ids_TK = logits_TE.new_empty((logits_TE.shape[0], spec_of(fields).top_k), dtype=ids_dtype)
    return ids_TK, _weights_at_fake(logits_TE, ids_TK, False, *fields)


def _weights_at_run(logits_TE: Tensor, ids_TK: Tensor, biased: bool, *fields: Any) -> Tensor:
    return _weights_kernels().weights_at(logits_TE, ids_TK, spec_of(fields), biased)


def _weights_at_fake(logits_TE: Tensor, ids_TK: Tensor, biased: bool, *fields: Any) -> Tensor:
    spec = spec_of(fields)
    scores = torch.float32 if spec.fp32 else logits_TE.dtype
    shape = (logits_TE.shape[0], spec.top_k)
    return logits_TE.new_empty(shape, dtype=spec.weights_dtype or scores)


def _backward(dweights_TK: Tensor, logits_TE: Tensor, ids_TK: Tensor, *fields: Any) -> Tensor:
    return _kernels().route_backward(dweights_TK, logits_TE, ids_TK, spec_of(fields))


def _backward_fake(dweights_TK: Tensor, logits_TE: Tensor, ids_TK: Tensor, *fields: Any) -> Tensor:
    return torch.empty(logits_TE.shape, dtype=logits_TE.dtype, device=logits_TE.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], output[0])
    ctx.mark_non_differentiable(output[0])
    # By default autograd would fill a gradient of zeros for the ids before each backward.
    ctx.set_materialize_grads(False)
    ctx.fields = inputs[3:]


def _autograd(ctx: Any, dids: Any, dweights_TK: Tensor | None) -> tuple[Any, ...]:
    return (_observed_backward(ctx, dweights_TK), None, None, *[None] * len(SPEC_FIELDS))


def _weights_at_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.fields = inputs[3:]


def _weights_at_autograd(ctx: Any, dweights_TK: Tensor | None) -> tuple[Any, ...]:
    return (_observed_backward(ctx, dweights_TK), None, None, *[None] * len(SPEC_FIELDS))


def _observed_backward(ctx: Any, dweights_TK: Tensor | None) -> Tensor | None:
    logits_TE, ids_TK = ctx.saved_tensors
    if dweights_TK is None:
        return None
    return torch.ops.moe_patch.route_backward(dweights_TK, logits_TE, ids_TK, *ctx.fields)


def _direct_backward(ctx: Any, dweights_TK: Tensor | None) -> Tensor | None:
    if dweights_TK is None:
        return None
    logits_TE, ids_TK = ctx.saved_tensors
    if not torch.is_grad_enabled() and is_plain_eager((dweights_TK, logits_TE)):
        return _kernels().route_backward(dweights_TK, logits_TE, ids_TK, ctx.spec)
    fields = (getattr(ctx.spec, name) for name in SPEC_FIELDS)
    return torch.ops.moe_patch.route_backward(dweights_TK, logits_TE, ids_TK, *fields)


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
        return _direct_backward(ctx, grads[1]), None, None, None


class _WeightsAt(torch.autograd.Function):
    """Same as the operator's autograd formula; see :class:`_Route`."""

    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, ids_TK: Tensor, spec: RouteSpec, biased: bool
    ) -> Tensor:
        ctx.save_for_backward(logits_TE, ids_TK)
        ctx.spec = spec
        return _weights_kernels().weights_at(logits_TE, ids_TK, spec, biased)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return _direct_backward(ctx, grads[0]), None, None, None


define(
    "moe_patch::route_forward",
    f"(Tensor logits, Tensor? bias, ScalarType ids_dtype, {SPEC_ARGUMENTS}) -> (Tensor, Tensor)",
    _forward, _forward_fake, _autograd, _setup_context,
)  # fmt: skip
define(
    "moe_patch::weights_at",
    f"(Tensor logits, Tensor ids, bool biased, {SPEC_ARGUMENTS}) -> Tensor",
    _weights_at_run, _weights_at_fake, _weights_at_autograd, _weights_at_context,
)  # fmt: skip
define(
    "moe_patch::route_backward",
    f"(Tensor dweights, Tensor logits, Tensor ids, {SPEC_ARGUMENTS}) -> Tensor",
    _backward, _backward_fake,
)  # fmt: skip
