"""Work that a repeated call skips on the host; test_call_changes.py covers changes between calls.

benchmarks/studies/host_block.py measures times; these tests count calls and compare results.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_patch.ops import routing
from moe_patch.ops.experts import autograd, grouped, op, torch_backend
from moe_patch.types import ExpertsNeeds
from tests.support.experts_cases import Case, arguments, gradients, make_inputs, ours
from tests.support.numerics import assert_bits

ADAPTED = Case(lora13=True, lora2=True)


class Counting(TorchDispatchMode):
    """Count the calls of each of torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


def test_products_on_a_cpu_take_one_call_an_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make six products an expert forward and ten backward with adapters, without row slices."""
    monkeypatch.setattr(grouped, "_cpu_supports", lambda dtype: False)
    t = make_inputs(ADAPTED, torch.float32)
    used = t["ids"].unique().numel()
    x, ids, weights, *rest = arguments(ADAPTED, {name: each.detach() for name, each in t.items()})
    with Counting() as forward:
        made = torch_backend.experts_forward(x, ids, weights, *rest, save_u13=True, save_u2=True)
    factors = ("lora13_A", "lora13_B", "lora2_A", "lora2_B")
    needs = ExpertsNeeds(x=True, weights=True, **dict.fromkeys(factors, True))
    with Counting() as backward:
        torch_backend.experts_backward(
            torch.ones_like(x), x, weights, *rest, made.plan, made.kept, needs
        )
    assert forward.calls["aten::mm.out"] == 6 * used
    assert backward.calls["aten::mm.out"] == 10 * used
    # The remaining slices take the routing weights' columns, and gate and up.
    assert forward.calls["aten::slice.Tensor"] + backward.calls["aten::slice.Tensor"] < 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("empty", [False, True], ids=["all with rows", "one without"])
def test_torchs_grouped_product_on_a_cpu_gives_the_bits_of_the_loop(
    monkeypatch: pytest.MonkeyPatch, empty: bool, dtype: torch.dtype
) -> None:
    """Make one call a product with the bits of the loop, also with idle experts or empty slots."""
    torch.manual_seed(0)
    ids = torch.randint(0, 4, (40, 2))
    ids[:3] = -1
    plan = torch_backend.build_plan(ids.where(ids != 2, 3) if empty else ids, 4)
    rows = int(plan.offsets_S[-1])
    x_NI, dy_NO = torch.randn(80, 16).to(dtype), torch.randn(80, 8).to(dtype)
    w_EOI = torch.randn(4, 8, 16).to(dtype)

    def products() -> list[torch.Tensor]:
        groups = grouped.Groups(plan, x_NI)
        y_NO, dx_NI = groups.linear(x_NI, w_EOI), groups.linear_transposed(dy_NO, w_EOI)[0]
        sums = [groups.outer_sum(dy_NO, x_NI, like) for like in (w_EOI, w_EOI.mT.contiguous().mT)]
        return [y_NO[:rows], dx_NI[:rows], *sums]

    if not grouped._cpu_supports(dtype):
        pytest.skip("this torch has the loop alone")
    with Counting() as counting:
        found = products()
    assert counting.calls["aten::_grouped_mm"] == (2 if empty else 3)
    monkeypatch.setattr(grouped, "_cpu_supports", lambda dtype: False)
    for one, other in zip(found, products(), strict=True):
        assert_bits(one, other)
        assert one.stride() == other.stride()


def test_autograd_is_given_no_more_than_the_tensors_and_one_argument(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pass few arguments and, without norms, return one output: each costs a microsecond."""
    given: list[tuple[int, type]] = []
    apply = autograd.Experts.apply

    def noting(*args: Any) -> Any:
        out = apply(*args)
        given.append((len(args), type(out)))
        return out

    monkeypatch.setattr(autograd.Experts, "apply", noting)
    t = make_inputs(ADAPTED, torch.float32)
    gradients(ours(ADAPTED, t), t)
    signals = op.Signals(torch.zeros(3, *t["ids"].shape))
    gradients(ours(ADAPTED, t, signals=signals), t)
    assert given == [(12, torch.Tensor), (12, tuple)]
    assert signals.act_norm_TK is not None


def test_a_rules_choices_are_made_once_and_anew_for_another_value() -> None:
    rule, specs = routing.softmax_topk, []

    def impl(logits: Any, spec: Any, bias: Any) -> Any:
        specs.append(spec)

    logits = torch.zeros(3, 8)
    for top_k in (2, 2, 3):
        rule(logits, impl=impl, top_k=top_k, renormalize=True)
    rule(torch.zeros(3, 9), impl=impl, top_k=2, weights_dtype=torch.float16)
    first, again, wider, other = specs
    assert first is again
    assert (first.top_k, wider.top_k, first.weights_dtype) == (2, 3, None)
    assert other.weights_dtype == torch.float16
    assert first == rule.spec(8, top_k=2, renormalize=True)
