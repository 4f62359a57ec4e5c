"""Calls that reach the router's kernels, whatever they compute: kernels/test_routing.py."""

from __future__ import annotations

from functools import partial
from unittest import mock

import torch

from moe_patch.ops.routing_op import route as triton_route
from moe_patch.types import RouteSpec
from tests.support.numerics import assert_bits
from tests.support.routing_cases import F32, inputs
from tests.support.watching import Watching


def _trained_and_not(
    logits_TE: torch.Tensor, spec: RouteSpec, bias_E: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    routing = triton_route(logits_TE, spec, bias_E)
    (grad,) = torch.autograd.grad(routing.weights_TK.square().sum(), logits_TE)
    with torch.no_grad():
        again = triton_route(logits_TE, spec, bias_E)
    chosen = (routing.ids_TK, routing.weights_TK, again.ids_TK, again.weights_TK)
    return *chosen, grad


def check_without_dispatcher(device: str) -> None:
    """Bits agree between operators and direct calls, by which plain eager code runs."""
    for name in ("deepseek_v3", "qwen3"):
        logits_TE, spec, bias_E = inputs(name, 5, F32, device)
        step = partial(_trained_and_not, logits_TE.requires_grad_(), spec, bias_E)
        operators = torch.ops.moe_patch
        with mock.patch.multiple(operators, route_forward=None, route_backward=None):
            direct = step()
        with Watching() as watching:
            watched = step()
        assert watching.called == ["route_forward", "route_backward", "route_forward"]
        for a, b in zip(direct, watched, strict=True):
            assert_bits(a, b, name)


def check_not_as_stored(device: str) -> None:
    """Accept logits and gradients stored negated, and several gradients at once."""
    logits_TE, spec, _ = inputs("qwen3", 5, F32, device)
    logits_TE.requires_grad_()
    weights_TK = triton_route(logits_TE, spec).weights_TK
    negated = triton_route(torch._neg_view(-logits_TE.detach()), spec)
    assert_bits(negated.weights_TK, weights_TK.detach())
    three_STK = torch.randn(3, *weights_TK.shape, device=device)

    def gradient(*values: torch.Tensor, **batched: bool) -> torch.Tensor:
        return torch.autograd.grad(weights_TK, logits_TE, *values, retain_graph=True, **batched)[0]

    assert_bits(gradient(torch._neg_view(-three_STK[0])), gradient(three_STK[0]))
    several = gradient(three_STK, is_grads_batched=True)
    assert_bits(several, torch.stack([gradient(each) for each in three_STK]))
