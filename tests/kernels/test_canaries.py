"""No kernel reads or writes outside its tensors: every operand and allocation between guard bands.

Runs natively on a GPU (``-m gpu``) and, on a CPU, under Triton's interpreter. On a GPU
``bash scripts/tiles/memcheck.sh`` checks the same calls, with one allocation per tensor.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from moe_patch.kernels.plan import plan as plans
from moe_patch.kernels.routing import losses, product_key, route, weights_at
from moe_patch.types import RouteSpec
from tests.support import interpreted
from tests.support.guards import Guards
from tests.support.kernels_cases import LARGE, SMALL, Case, Inputs, make_inputs, run_kernels
from tests.support.numerics import assert_bits, assert_close

LIMITS = {torch.float32: 1e-6, torch.float16: 5e-3, torch.bfloat16: 2e-2}


def check_experts(case: Case, dtype: torch.dtype, device: str, shift: int = 0) -> None:
    """Calls between guard bands give equal results; equal up to rounding if misaligned."""
    inputs = make_inputs(case, dtype, device)
    expected, _ = run_kernels(inputs)
    with Guards(shift) as guards:
        tensors = {name: guards.put(tensor) for name, tensor in inputs.tensors.items()}
        ids_TK, dout_TD = guards.put(inputs.ids_TK), guards.put(inputs.dout_TD)
        found, _ = run_kernels(Inputs(case, ids_TK, tensors, dout_TD))
    assert guards.check() > len(tensors)
    for name, value in expected.items():
        if shift:
            assert_close(found[name], value, LIMITS[dtype], name)
        else:
            assert torch.isfinite(found[name]).all(), name
            assert_bits(found[name], value, name)


def check_plan(device: str) -> None:
    for T, K, E in [(13, 3, 5), (300, 2, 7), (1, 1, 1)]:
        ids_TK = torch.randint(-1, E + 1, (T, K), device=device)
        weights_TK = torch.rand(T, K, device=device)
        expected = plans.build_plan(ids_TK, E)
        grouped = plans.grouped_rows(expected, weights_TK)
        with Guards() as guards:
            plan = plans.build_plan(guards.put(ids_TK), E)
            again = plans.grouped_rows(plan, guards.put(weights_TK))
            table = plans.tile_table(plan, 16)
        guards.check()
        for mine, other in zip((*plan, *again), (*expected, *grouped), strict=True):
            assert torch.equal(mine, other)
        assert torch.equal(table, plans.tile_table(expected, 16))


ROUTES = {
    "softmax": (60, RouteSpec(4)),
    "groups": (30, RouteSpec(6, score="sigmoid", groups=3, top_groups=2, renormalize=True)),
    "topk_first": (33, RouteSpec(4, order="topk_score", fp32=False)),
}


def check_route(name: str, device: str) -> None:
    E, spec = ROUTES[name]
    for T, dtype in [(7, torch.float32), (1, torch.float16)]:
        logits_TE = torch.randn(T, E, device=device, dtype=dtype)
        bias_E, grad_TK = torch.randn(E, device=device), torch.randn(T, spec.top_k, device=device)

        def run(
            logits: Tensor, bias: Tensor, grad: Tensor, spec: RouteSpec = spec
        ) -> tuple[Tensor, ...]:
            bias = bias if spec.order == "score_topk" else None
            made = route.route_forward(logits, spec, bias)
            again_TK = weights_at.weights_at(logits, made.ids_TK, spec, bias is not None)
            return *made, again_TK, route.route_backward(grad, logits, made.ids_TK, spec)

        expected = run(logits_TE, bias_E, grad_TK)
        with Guards() as guards:
            found = run(*(guards.put(t) for t in (logits_TE, bias_E, grad_TK)))
        guards.check()
        for mine, other in zip(found, expected, strict=True):
            assert_bits(mine, other, name)


def check_product_key(device: str) -> None:
    for T, P, K in [(5, 12, 6), (1, 3, 7)]:
        x_TP, y_TP = torch.randn(2, T, P, device=device)
        grad_TK = torch.randn(T, K, device=device)

        def run(x: Tensor, y: Tensor, grad: Tensor, K: int = K) -> tuple[Tensor, ...]:
            ids, weights = product_key.product_key_forward(x, y, K)
            return ids, weights, *product_key.product_key_backward(grad, x, y, ids)

        expected = run(x_TP, y_TP, grad_TK)
        with Guards() as guards:
            found = run(*(guards.put(t) for t in (x_TP, y_TP, grad_TK)))
        guards.check()
        for mine, other in zip(found, expected, strict=True):
            assert_bits(mine, other)


def check_losses(device: str) -> None:
    for T, E, dtype in [(37, 12, torch.float32), (5, 60, torch.float16)]:
        logits_TE = torch.randn(T, E, device=device, dtype=dtype)
        mask_T, dprobabilities_E = torch.rand(T, device=device), torch.randn(E, device=device)

        def run(logits: Tensor, mask: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
            sums = losses.router_sums(logits, mask, 2)
            return *sums, losses.router_sums_backward(grad, grad[0], logits, mask)

        expected = run(logits_TE, mask_T, dprobabilities_E)
        with Guards() as guards:
            found = run(*(guards.put(t) for t in (logits_TE, mask_T, dprobabilities_E)))
        guards.check()
        for mine, other in zip(found, expected, strict=True):
            assert_bits(mine, other)


def test_the_bands_show_a_stray_read_and_a_stray_write() -> None:
    for stray in (-1, 4):
        with Guards() as guards:
            tensor = guards.put(torch.ones(4))
            beside = tensor.as_strided((1,), (1,), tensor.storage_offset() + stray)
            assert beside.isnan()
            guards.check()
            beside.fill_(0.0)
        with pytest.raises(AssertionError, match="written outside a tensor of 4"):
            guards.check()


CASES = {
    **{
        f"experts-{name}": lambda device, case=SMALL[name]: check_experts(
            case, torch.float32, device
        )
        for name in ("gpt_oss", "all_empty", "odd_strides")
    },
    "experts-fp16": lambda device: check_experts(SMALL["lora"], torch.float16, device),
    "experts-shifted": lambda device: check_experts(SMALL["lora"], torch.float16, device, shift=1),
    "plan": check_plan,
    **{f"route-{name}": lambda device, name=name: check_route(name, device) for name in ROUTES},
    "product_key": check_product_key,
    "losses": check_losses,
}


@pytest.mark.parametrize("case", CASES)
def test_interpreted(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == ""


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_gpu(case: str) -> None:
    CASES[case]("cuda")


# A misaligned tensor reaches the kernels by pointers instead of descriptors.
LARGER = [
    *((name, 0) for name in ("tile_edges", "wide", "sparse", "gpt_oss_like", "lora_72", "decode")),
    ("tile_edges", 1),
    ("lora_16", 1),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "shift"), LARGER)
def test_gpu_larger(case: str, shift: int) -> None:
    check_experts(replace(LARGE[case], norms=False), torch.bfloat16, "cuda", shift)


if __name__ == "__main__":
    interpreted.report(CASES)
