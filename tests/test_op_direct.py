"""Where the experts run without torch's dispatcher, and that nothing else tells it.

Of the router the same is in test_kernels_routing.py, where its kernels run.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from moe_patch.ops.direct import unwatched
from moe_patch.ops.experts import schema
from moe_patch.ops.experts.op import Signals
from tests.experts_cases import Case, gradients, make_inputs, ours
from tests.numerics import assert_bits
from tests.watching import Watching


class Labelled(torch.Tensor):
    """A subclass, as DTensor is one."""


class Asked(torch.autograd.Function):
    """What is found in backward."""

    seen: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        Asked.seen.append(unwatched((grad,)))
        return grad * 2


def test_plain_tensors_in_plain_eager_work_are_not_watched() -> None:
    plain, weight = torch.zeros(2), torch.nn.Parameter(torch.zeros(2))
    assert unwatched((plain, weight, None))
    assert not unwatched((plain, plain.as_subclass(Labelled)))
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with context:
            assert unwatched((plain, weight, torch.zeros(2)))


def test_tensors_whose_values_are_not_what_is_stored_go_through_the_dispatcher() -> None:
    plain = torch.zeros(2)
    assert not unwatched((plain, torch._neg_view(plain)))
    assert not unwatched((torch.zeros(2, dtype=torch.cfloat).conj().imag,))
    assert not unwatched((torch._efficientzerotensor(2),))


def test_whoever_watches_operators_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.zeros(2)
    with FakeTensorMode() as mode:
        assert not unwatched((plain,))
    assert not unwatched((mode.from_tensor(plain),))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not unwatched((plain,))
    seen = []
    torch.func.grad(lambda x: seen.append(unwatched((x,))) or x.sum())(plain)
    leaf = plain.clone().requires_grad_()
    torch.autograd.functional.jacobian(Asked.apply, leaf, vectorize=True)
    assert [seen.pop(), Asked.seen.pop()] == [False, False]
    noting = lambda x: seen.append(unwatched((x,))) or x + 1  # noqa: E731
    torch.jit.trace(noting, (plain,), check_trace=False)
    make_fx(noting, tracing_mode="real", pre_dispatch=True)(plain)
    make_fx(noting)(plain)
    assert seen == [False] * 3
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not unwatched((plain,))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("full", [False, True], ids=["plain", "bias and LoRA"])
def test_the_same_bits_by_the_operators_and_without_them(full: bool, recompute: bool) -> None:
    case = Case(bias=full, lora13=full, lora2=full, recompute=recompute)
    t = make_inputs(case, torch.float32)

    def step() -> dict[str, torch.Tensor]:
        signals = Signals(torch.zeros(3, *t["ids"].shape))
        out = ours(case, t, signals=signals)
        found = {"out": out} | gradients(out, t)
        with torch.no_grad():
            found["inference"] = ours(case, t)
        return found | {"norms": signals.act_norm_TK, "grads": signals.grads_3TK}

    direct = step()
    with Watching() as watching:
        watched = step()
    assert watching.called == ["experts", "experts_bwd.over_h", "experts.inference"]
    for name, value in watched.items():
        assert_bits(direct[name], value, name)


def test_no_operator_is_called_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for name in ("experts", "experts_bwd", "inference"):
        run = getattr(schema, name)
        monkeypatch.setattr(
            schema, name, lambda *a, n=name, r=run, **k: called.append(n) or r(*a, **k)
        )
    t = make_inputs(Case(), torch.float32)
    gradients(ours(Case(), t), t)
    with torch.no_grad():
        ours(Case(), t)
    assert called == ["experts", "experts_bwd", "inference"]


def test_a_profile_names_the_operators() -> None:
    t = make_inputs(Case(), torch.float32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gradients(ours(Case(), t), t)
    names = {event.key for event in profile.key_averages()}
    assert {"moe_patch::experts", "moe_patch::experts_bwd"} <= names
