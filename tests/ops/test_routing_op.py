"""The routing op around the kernels: refusals, whole-graph compilation, repeatable bits.

tests/kernels/test_routing.py checks its results.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from moe_patch.errors import UnsupportedOptionError
from moe_patch.ops import routing
from moe_patch.ops.balance_loss import router_losses
from moe_patch.ops.product_key import product_key_triton
from moe_patch.ops.routing_fields import SPEC_FIELDS
from moe_patch.ops.routing_op import route as triton_route
from moe_patch.ops.routing_op import route_impl
from moe_patch.types import RouteSpec
from tests.support.numerics import assert_bits
from tests.support.routing_cases import BF16, F16, F32, SPECS, WRONG_LOGITS, inputs


@pytest.mark.parametrize(
    ("logits", "spec", "word"),
    [
        (torch.zeros(2, 8), RouteSpec(2, ties="torch"), "ties"),
        (torch.zeros(2, 8).double(), RouteSpec(2), "float64"),
        (torch.zeros(2, 513), RouteSpec(2), "513"),
        (torch.zeros(2, 64), RouteSpec(33), "33"),
        (torch.zeros(2, 8), RouteSpec(9), "top_k=9"),
        (torch.zeros(2, 8), RouteSpec(2, groups=3, top_groups=2), "groups=3"),
        (torch.zeros(2, 8), RouteSpec(2, groups=8, top_groups=2), "two experts per group"),
        (torch.zeros(2, 8), RouteSpec(2, score="tanh"), "tanh"),
        (torch.zeros(2, 8), RouteSpec(2, group_score="mean"), "mean"),
    ],
)
def test_what_the_kernels_do_not_cover_is_refused(
    logits: Tensor, spec: RouteSpec, word: str
) -> None:
    with pytest.raises(UnsupportedOptionError, match=word) as error:
        triton_route(logits, spec)
    assert "backend='torch'" in str(error.value)


ROUTES = {
    "triton": lambda logits: triton_route(logits, RouteSpec(2)),
    "torch": lambda logits: routing.route(logits, RouteSpec(2)),
    "chosen": lambda logits: route_impl("auto")(logits, RouteSpec(2)),
    "softmax_topk": lambda logits: routing.softmax_topk(logits, top_k=2),
    "topk_softmax": lambda logits: routing.topk_softmax(logits, top_k=2),
    "sigmoid_topk": lambda logits: routing.sigmoid_topk(logits, top_k=2),
    "greedy_or_groups": lambda logits: routing.greedy_or_groups(
        logits, top_k=2, method="group_limited_greedy", groups=2, top_groups=1
    ),
}


@pytest.mark.parametrize("wrong", WRONG_LOGITS, ids=str)
@pytest.mark.parametrize("name", ROUTES)
def test_logits_that_are_no_matrix_of_numbers_are_refused(name: str, wrong: str) -> None:
    said = rf"logits_TE is {wrong}; accepted: a tensor \[tokens, experts\] of float64, float32"
    with pytest.raises(UnsupportedOptionError, match=said):
        ROUTES[name](WRONG_LOGITS[wrong])


@pytest.mark.parametrize(
    ("run", "word"),
    [
        (lambda t: triton_route(t, RouteSpec(2)).weights_TK, "routing"),
        (lambda t: product_key_triton(t, torch.zeros(2, 8), 2).weights_TK, "product_key_topk"),
        (lambda t: product_key_triton(torch.zeros(2, 8), t, 2).weights_TK, "product_key_topk"),
        (lambda t: router_losses([t], 2)[0], "router losses"),
    ],
    ids=["route", "product key x", "product key y", "losses"],
)
def test_a_forward_mode_derivative_is_a_named_error(run, word: str) -> None:
    """Raise an error: without a rule of the operators, torch would take the tangent for zero."""
    logits = torch.zeros(2, 8)
    with pytest.raises(UnsupportedOptionError, match=f"{word}: a forward-mode derivative"):
        torch.func.jvp(run, (logits,), (torch.ones_like(logits),))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3_30b", "deepseek_v3_full", "gpt_oss", "widest"])
def test_gpu_few_tokens_take_one_launch(name: str) -> None:
    for T in (1, 7, 64):
        logits_TE, spec, bias_E = inputs(name, T, BF16, "cuda")
        logits_TE.requires_grad_()
        weights_TK = triton_route(logits_TE, spec, bias_E).weights_TK
        gradient_TK = torch.ones_like(weights_TK)
        torch.autograd.grad(weights_TK, logits_TE, gradient_TK, retain_graph=True)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as forward:
            triton_route(logits_TE, spec, bias_E)
            torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as backward:
            torch.autograd.grad(weights_TK, logits_TE, gradient_TK, retain_graph=True)
            torch.cuda.synchronize()
        assert on_device(forward) == ["forward_kernel"], T
        assert on_device(backward) == ["backward_kernel"], T


def on_device(profiled: profile) -> list[str]:
    return [e.name for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("name", ["qwen3_30b", "deepseek_v3_full", "gpt_oss", "widest", "clamp"])
def test_gpu_repeats_are_bit_identical(
    name: str, dtype: torch.dtype, poisoned_memory: None
) -> None:
    _, spec, bias_E = inputs(name, 1, dtype, "cuda")
    logits_TE = torch.randn(32768, SPECS[name][0], device="cuda").to(dtype).requires_grad_()
    first = None
    for _ in range(40):
        routed = triton_route(logits_TE, spec, bias_E)
        weights_TK = routed.weights_TK
        (grad,) = torch.autograd.grad(weights_TK, logits_TE, torch.ones_like(weights_TK))
        found = (routed.ids_TK, weights_TK, grad)
        first = first or found
        for a, b in zip(first, found, strict=True):
            assert_bits(a, b)


@pytest.mark.gpu
def test_gpu_compiles_whole_and_registers_correctly() -> None:
    logits_TE, spec, bias_E = inputs("deepseek_v3", 64, BF16, "cuda")
    logits_TE.requires_grad_()
    compiled = torch.compile(triton_route, fullgraph=True)
    ours, eager = compiled(logits_TE, spec, bias_E), triton_route(logits_TE, spec, bias_E)
    assert_bits(ours.ids_TK, eager.ids_TK)
    assert_bits(ours.weights_TK, eager.weights_TK)
    (a,) = torch.autograd.grad(ours.weights_TK.sum(), logits_TE)
    (b,) = torch.autograd.grad(eager.weights_TK.sum(), logits_TE)
    assert_bits(a, b)


def differentiable(*shape: int) -> Tensor:
    return torch.zeros(shape, device="meta", requires_grad=True)


BACKWARDS = {
    "route_backward": lambda: (
        differentiable(5, 2),
        differentiable(5, 8),
        torch.zeros(5, 2, dtype=torch.int64, device="meta"),
        *[getattr(RouteSpec(2), name) for name in SPEC_FIELDS],
    ),
    "product_key_backward": lambda: (
        differentiable(5, 2),
        differentiable(5, 4),
        differentiable(5, 4),
        torch.zeros(5, 2, dtype=torch.int64, device="meta"),
        "softmax",
        False,
    ),
    "router_sums_backward": lambda: (
        differentiable(8), differentiable(), differentiable(5, 8), None
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_second_derivative_is_a_named_error(name) -> None:
    """Raise an error: a backward operator without a rule would drop its part silently."""
    gradient = getattr(torch.ops.moe_patch, name)(*BACKWARDS[name]())
    first = gradient[0] if isinstance(gradient, tuple) else gradient
    with pytest.raises(UnsupportedOptionError, match="second derivative"):
        first.sum().backward()
