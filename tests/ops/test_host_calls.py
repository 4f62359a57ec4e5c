"""Work that a repeated call skips on the host, and changes between two calls that it follows.

Times are measured by benchmarks/studies/host_block.py; here numbers of calls and results decide.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from moe_patch import patch_model
from moe_patch.ops import routing
from moe_patch.ops.experts import grouped, op, torch_backend
from moe_patch.types import ExpertsNeeds
from tests.support import tiny_models
from tests.support.adapters import EXPERTS, adapt, lora_config
from tests.support.experts_cases import Case, arguments, gradients, make_inputs, ours
from tests.support.numerics import assert_bits
from tests.support.parity import assert_parity, run_block

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
    """Six forward and ten backward with adapters, over rows that are not sliced one by one."""
    monkeypatch.setattr(grouped, "_serves_cpu", lambda dtype: False)
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
    # Those that are left belong to the routing weights' columns and to gate and up.
    assert forward.calls["aten::slice.Tensor"] + backward.calls["aten::slice.Tensor"] < 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("empty", [False, True], ids=["all with rows", "one without"])
def test_torchs_grouped_product_on_a_cpu_gives_the_bits_of_the_loop(
    monkeypatch: pytest.MonkeyPatch, empty: bool, dtype: torch.dtype
) -> None:
    """In one call a product; also where an expert has no rows, or slots are empty."""
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

    if not grouped._serves_cpu(dtype):
        pytest.skip("this torch has the loop alone")
    with Counting() as counting:
        found = products()
    assert counting.calls["aten::_grouped_mm"] == (2 if empty else 3)
    monkeypatch.setattr(grouped, "_serves_cpu", lambda dtype: False)
    for one, other in zip(found, products(), strict=True):
        assert_bits(one, other)
        assert one.stride() == other.stride()


def test_autograd_is_given_no_more_than_the_tensors_and_one_argument(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each argument and each output costs a microsecond; the output comes alone without norms."""
    given: list[tuple[int, type]] = []
    apply = op._Experts.apply

    def noting(*args: Any) -> Any:
        out = apply(*args)
        given.append((len(args), type(out)))
        return out

    monkeypatch.setattr(op._Experts, "apply", noting)
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


def _blocks() -> tuple[nn.Module, nn.Module]:
    """A patched block and transformers' own with the same weights, both once run."""
    model, reference = (tiny_models.build("qwen3_moe") for _ in range(2))
    patch_model(model)
    return tiny_models.blocks(model)[0][1], tiny_models.blocks(reference)[0][1]


def _new_parameter(block: Any) -> None:
    old = block.experts.down_proj
    block.experts.down_proj = nn.Parameter(old.detach() * 2)


def _new_router(block: Any) -> None:
    block.gate.weight = nn.Parameter(block.gate.weight.detach().flip(0))


def _other_top_k(block: Any) -> None:
    block.gate.top_k = 1


def _frozen(block: Any) -> None:
    block.experts.gate_up_proj.requires_grad_(False)
    block.gate.weight.requires_grad_(False)


def _other_activation(block: Any) -> None:
    block.experts.act_fn = nn.ReLU()


def _hooked_activation(block: Any) -> None:
    block.experts.act_fn.register_forward_hook(lambda module, args, out: out * 2)


def _other_dtype(block: Any) -> None:
    block.to(torch.float64)


def _evaluated(block: Any) -> None:
    block.eval()


@pytest.mark.parametrize(
    "change",
    [_new_parameter, _new_router, _other_top_k, _frozen, _other_activation, _hooked_activation,
     _other_dtype, _evaluated],
)  # fmt: skip
def test_a_change_between_two_calls_is_followed(change: Callable[[Any], None]) -> None:
    """Against transformers' own block, changed in the same way; twice, as caches fill."""
    mine, theirs = _blocks()
    D = mine.gate.weight.shape[1]
    for changed in (False, True, True):
        if changed:
            change(mine)
            change(theirs)
        x = torch.randn(2, 5, D, dtype=mine.gate.weight.dtype)
        assert_parity(run_block(mine, x), run_block(theirs, x), 1e-5)


def test_adapters_that_are_switched_replaced_and_frozen_are_followed() -> None:
    """Against PEFT itself, in one model that stays patched."""
    models = [tiny_models.build("qwen3_moe") for _ in range(2)]
    pairs: list[Any] = [tiny_models.blocks(model)[0][1] for model in models]
    adapted = [adapt(model, lora_config(EXPERTS)) for model in models]
    patch_model(adapted[0])

    def replace(block: Any) -> None:
        linear = block.experts.lora_B["default"]
        linear.weight = nn.Parameter(linear.weight.detach() * -3)

    changes: list[Callable[[Any], Any]] = [
        lambda block: None,
        replace,
        lambda block: block.experts.scaling.update(default=0.5),
        lambda block: block.experts.enable_adapters(False),
        lambda block: block.experts.enable_adapters(True),
        lambda block: block.experts.lora_A["default"].weight.requires_grad_(False),
        lambda block: block.double(),
    ]
    for change in changes:
        for block in pairs:
            change(block)
        x = torch.randn(2, 5, pairs[0].gate.weight.shape[1], dtype=pairs[0].gate.weight.dtype)
        assert_parity(run_block(pairs[0], x), run_block(pairs[1], x), 1e-5)
