"""Forwards of one adapted model in two threads: the second raises, the first is correct."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from moe_patch import UnsupportedOptionError
from moe_patch.runtime.module_patch import patch_of
from tests.support.adapters import EXPERTS, adapted_pair, expert_modules, no_factors_left
from tests.support.limits import HANG_S
from tests.support.numerics import assert_bits
from tests.support.snapshots import logits


class Paused:
    """A thread that runs a model and stops within its first experts module until released."""

    def __init__(self, model: nn.Module, batch: dict[str, Tensor]) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.logits: Tensor | None = None
        self.thread = threading.Thread(target=self._run, args=(model, batch), name="the first")
        self.hook = expert_modules(model)[0].register_forward_pre_hook(self._wait)

    def _wait(self, *_: object) -> None:
        if threading.current_thread() is self.thread:
            self.inside.set()
            assert self.go_on.wait(HANG_S), "nobody released this thread"

    def _run(self, model: nn.Module, batch: dict[str, Tensor]) -> None:
        try:
            self.logits = logits(model, batch)
        finally:
            self.inside.set()

    def __enter__(self) -> Paused:
        self.thread.start()
        assert self.inside.wait(HANG_S), "the thread never came to the experts"
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        self.thread.join()
        self.hook.remove()


@pytest.mark.parametrize("second", ["model", "experts"])
def test_a_second_thread_is_refused_and_the_first_is_right(second):
    """Raise in the second thread, which would use and then remove the first thread's factors."""
    pair = adapted_pair("qwen3_moe", EXPERTS)
    expected = logits(pair.ours, pair.batch)
    experts = expert_modules(pair.ours)[0]
    x, ids, weights = torch.randn(3, 32), torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2)
    calls = {"model": lambda: pair.ours(**pair.batch), "experts": lambda: experts(x, ids, weights)}
    mine = threading.current_thread().name
    said = rf"Qwen3MoeExperts.*thread '{mine}' calls .* while thread 'the first'"
    with Paused(pair.ours, pair.batch) as first:
        with pytest.raises(UnsupportedOptionError, match=said):
            calls[second]()
        assert patch_of(experts).factors is not None, "the first thread's factors are gone"
    assert_bits(first.logits, expected)
    assert no_factors_left(pair.ours)
    assert_bits(logits(pair.ours, pair.batch), expected)


def test_threads_one_after_the_other():
    """Accept another thread after a call has ended, with an error or without."""
    pair = adapted_pair("qwen3_moe", EXPERTS)
    expected = logits(pair.ours, pair.batch)
    hook = expert_modules(pair.ours)[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pair.ours(**pair.batch)
    hook.remove()
    found = []
    thread = threading.Thread(target=lambda: found.append(logits(pair.ours, pair.batch)))
    thread.start()
    thread.join()
    assert_bits(found[0], expected)
    assert_bits(logits(pair.ours, pair.batch), expected)
