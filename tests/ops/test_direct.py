"""Calls of the experts that bypass torch's dispatcher, with the same results and errors.

tests/kernels/test_routing.py has the same tests of the router, where its kernels run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from moe_patch.ops import direct
from moe_patch.ops.direct import is_plain_eager
from moe_patch.ops.experts import autograd, op, schema
from moe_patch.ops.experts.op import Signals
from moe_patch.runtime import taps
from tests.support.experts_cases import Case, gradients, make_inputs, ours
from tests.support.numerics import assert_bits
from tests.support.watching import Watching


class Labelled(torch.Tensor):
    """A tensor subclass, like DTensor."""


class Asked(torch.autograd.Function):
    """Record whether backward finds its gradient unwatched."""

    seen: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        Asked.seen.append(is_plain_eager((grad,)))
        return grad * 2


def test_plain_tensors_in_plain_eager_work_are_not_watched() -> None:
    plain, weight = torch.zeros(2), torch.nn.Parameter(torch.zeros(2))
    assert is_plain_eager((plain, weight, None))
    assert not is_plain_eager((plain, plain.as_subclass(Labelled)))
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with context:
            assert is_plain_eager((plain, weight, torch.zeros(2)))


def test_tensors_whose_values_are_not_what_is_stored_go_through_the_dispatcher() -> None:
    plain = torch.zeros(2)
    assert not is_plain_eager((plain, torch._neg_view(plain)))
    assert not is_plain_eager((torch.zeros(2, dtype=torch.cfloat).conj().imag,))
    assert not is_plain_eager((torch._efficientzerotensor(2),))


def test_whoever_watches_operators_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.zeros(2)
    with FakeTensorMode() as mode:
        assert not is_plain_eager((plain,))
    assert not is_plain_eager((mode.from_tensor(plain),))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not is_plain_eager((plain,))
    seen = []
    torch.func.grad(lambda x: seen.append(is_plain_eager((x,))) or x.sum())(plain)
    leaf = plain.clone().requires_grad_()
    torch.autograd.functional.jacobian(Asked.apply, leaf, vectorize=True)
    assert [seen.pop(), Asked.seen.pop()] == [False, False]
    noting = lambda x: seen.append(is_plain_eager((x,))) or x + 1  # noqa: E731
    torch.jit.trace(noting, (plain,), check_trace=False)
    make_fx(noting, tracing_mode="real", pre_dispatch=True)(plain)
    make_fx(noting)(plain)
    assert seen == [False] * 3
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not is_plain_eager((plain,))


DISPATCHER = (
    "_dispatch_tls_local_include_set",
    "_autograd._profiler_enabled",
    "DispatchKeySet",
    "DispatchKey.ADInplaceOrView",
)


LOOKUPS = (direct._dispatcher, autograd._graph_is_kept, taps._inside_backward)


@pytest.fixture
def without() -> Iterator[Callable[[str], None]]:
    """Hide a private name of torch from our lookups, as if a release had renamed it."""

    def hide(name: str) -> None:
        with pytest.MonkeyPatch.context() as gone:  # torch itself needs some of them in backward
            gone.delattr(f"torch._C.{name}")
            for lookup in LOOKUPS:
                lookup.cache_clear()
                lookup()

    yield hide
    for lookup in LOOKUPS:
        lookup.cache_clear()


def step_of(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = ours(Case(), t)
    found = {"out": out} | gradients(out, t)
    with torch.no_grad():
        return found | {"inference": ours(Case(), t)}


@pytest.mark.parametrize("name", DISPATCHER)
def test_a_torch_that_does_not_tell_who_watches_gets_operators(
    without: Callable[[str], None], name: str
) -> None:
    """Return the same bits by the dispatcher, through which all eager work then goes."""
    t = make_inputs(Case(), torch.float32)
    expected = step_of(t)
    without(name)
    assert not is_plain_eager((torch.zeros(2),))
    with mock.patch.object(op, "schema", None), mock.patch.object(autograd, "schema", None):
        found = step_of(t)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert_bits(found[key], value, key)


def test_a_torch_that_does_not_tell_what_is_kept_never_loses_h(
    without: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never overwrite h if backward may repeat, so that a second backward gives the same bits."""
    t = make_inputs(Case(), torch.float32)
    leaves = [each for each in t.values() if each.requires_grad]
    expected = torch.autograd.grad(ours(Case(), t).square().sum(), leaves)
    without("_autograd._get_current_graph_task_keep_graph")
    over, run = [], schema.experts_bwd

    def noting(*args: object, overwrite_h: bool = False) -> object:
        over.append(overwrite_h)
        return run(*args, overwrite_h=overwrite_h)

    monkeypatch.setattr(schema, "experts_bwd", noting)
    loss = ours(Case(), t).square().sum()
    twice = [torch.autograd.grad(loss, leaves, retain_graph=again) for again in (True, False)]
    assert over == [False, False]
    for found in twice:
        for one, other in zip(found, expected, strict=True):
            assert_bits(one, other)


@pytest.mark.parametrize("name", ["", "_current_graph_task_id"])
def test_inside_backward_and_outside(without: Callable[[str], None], name: str) -> None:
    """Detect backward also in a recomputed forward and in nested backwards."""
    if name:
        without(name)
    seen = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        seen.append(taps.inside_backward())
        return x.square()

    x = torch.ones(2, requires_grad=True)
    for reentrant in (True, False):
        seen.clear()
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
        assert seen == [False, True]
        assert not taps.inside_backward()


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
    assert watching.called == ["experts", "experts_bwd.inplace_h", "experts.inference"]
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
