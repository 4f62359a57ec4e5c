"""record(): the values it keeps and when, and no cost when off."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_patch import PatchStateError, UnsupportedOptionError, patch_model, record
from moe_patch.ops.experts import torch_backend
from moe_patch.runtime import taps
from tests.support import tiny_models
from tests.support.numerics import assert_bits, assert_close
from tests.support.signals_cases import (
    CHECKPOINTS,
    EXACT,
    GRADIENTS,
    build,
    checkpointed,
    experts_below,
    last_layer,
    listening,
    patched,
    recorded,
    sum_loss,
)


def test_fields_are_detached_and_gradients_are_none_before_backward() -> None:
    model = patched("qwen3_moe")
    batch = tiny_models.inputs(model)
    with record(model) as recorder:
        (layer,) = recorder.layers.values()
        assert layer.ids is layer.act_norm is layer.grad_norm_params is None
        loss = sum_loss(model, batch)
        assert [getattr(layer, name) for name in GRADIENTS] == [None, None]
        loss.backward()
    assert layer.router_input is None
    for name in ("ids", "weights", "logits", "act_norm", *GRADIENTS):
        assert not getattr(layer, name).requires_grad, name
    with record(model) as recorder, torch.no_grad():
        sum_loss(model, batch)
    (layer,) = recorder.layers.values()
    assert layer.act_norm is not None
    assert layer.grad_norm_params is None


@pytest.mark.parametrize("reentrant", CHECKPOINTS, ids=["kept", "checkpoint", "reentrant"])
def test_two_forwards_before_one_backward_keep_the_newest(reentrant) -> None:
    """Keep ids and gradients of the newest forward if two precede one backward.

    Preference losses run a model this way.
    """
    model = patched("qwen3_moe", layers=2)
    checkpointed(model, reentrant)
    first, second = (tiny_models.inputs(model, seed=seed) for seed in (1, 2))
    expected = recorded(model, second)
    with record(model) as recorder:
        (sum_loss(model, first) + sum_loss(model, second)).backward()
    for path, layer in recorder.layers.items():
        alone = expected.layers[path]
        assert torch.equal(layer.ids, alone.ids)
        assert_close(layer.grad_norm_params, alone.grad_norm_params, EXACT, path)


@pytest.mark.parametrize("reentrant", CHECKPOINTS, ids=["kept", "checkpoint", "reentrant"])
def test_a_step_counts_every_forward_once(reentrant) -> None:
    model = patched("qwen3_moe", layers=2)
    checkpointed(model, reentrant)
    batches = [tiny_models.inputs(model, seed=seed) for seed in (1, 2, 3)]
    with record(model, keep="all") as recorder:
        for batch in batches[:2]:
            sum_loss(model, batch).backward()
        first = recorder.step()
        sum_loss(model, batches[2]).backward()
        second = recorder.step()
        kept = {p: s.grad_norm_params.clone() for p, s in second.layers.items()}
        sum_loss(model, batches[0]).backward()
    assert recorder.history == [first, second]
    for path, layer in recorder.layers.items():
        assert int(first.load[path].sum()) == 2 * 14 * 2
        assert torch.equal(second.load[path], second.layers[path].tokens_per_expert)
        assert torch.equal(layer.load, layer.tokens_per_expert)
        assert_bits(second.layers[path].grad_norm_params, kept[path])
        assert not torch.equal(layer.grad_norm_params, kept[path])


class Launches(TorchDispatchMode):
    """Record every operator that runs, with the bytes that it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
        self.seen.append((str(func), sum(t.numel() * t.element_size() for t in tensors)))
        return out


def launches(model: Any, batch: dict[str, Tensor]) -> list[tuple[str, int]]:
    model.zero_grad(set_to_none=True)
    with Launches() as mode:
        sum_loss(model, batch).backward()
    return mode.seen


def test_off_costs_no_launch_and_no_byte() -> None:
    """Run the same operators, with the same bytes, before and after a recording."""
    model = patched("qwen3_moe", layers=2)
    batch = tiny_models.inputs(model)
    never = launches(model, batch)
    with record(model, router_input=True):
        on = launches(model, batch)
    after = launches(model, batch)
    assert not listening(model)
    assert after == never
    assert len(on) > len(never)
    assert sum(size for _, size in on) > sum(size for _, size in never)


def test_off_no_norm_and_no_count_is_computed(monkeypatch) -> None:
    """Compute no norm and no count when off, also inside the experts operator."""

    def fail(*args: Any) -> Tensor:
        raise AssertionError("computed")

    model = patched("qwen3_moe", layers=2)
    batch = tiny_models.inputs(model)
    monkeypatch.setattr(torch_backend, "row_norm", fail)
    monkeypatch.setattr(taps, "count_rows", fail)
    sum_loss(model, batch).backward()
    with record(model), pytest.raises(AssertionError, match="computed"):
        sum_loss(model, batch)


def test_recording_changes_no_bit() -> None:
    model = patched("gpt_oss", layers=2)
    batch = tiny_models.inputs(model)
    results = []
    for on in (False, True):
        model.zero_grad(set_to_none=True)
        if on:
            recorded(model, batch)
        else:
            sum_loss(model, batch).backward()
        results.append([p.grad for p in model.parameters()])
    for without, with_signals in zip(*results, strict=True):
        assert_bits(with_signals, without)


def test_errors() -> None:
    model = build("qwen3_moe")
    with pytest.raises(PatchStateError, match="no patched MoE block"), record(model):
        pass
    patch_model(model, self_check=False)
    with pytest.raises(UnsupportedOptionError, match="keep"), record(model, keep="some"):
        pass
    with record(model), pytest.raises(PatchStateError, match="already"), record(model):
        pass
    assert not listening(model)
    assert last_layer(model).mlp.experts.config._experts_implementation == "moe_patch"


def test_a_copy_of_a_recorded_model_is_not_recorded() -> None:
    model = patched("qwen3_moe")
    with record(model) as recorder:
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not listening(twin)
            sum_loss(twin, tiny_models.inputs(model)).backward()
    assert all(layer.ids is None for layer in recorder.layers.values())


def test_compiled_code_notices_the_recorder() -> None:
    """Compile before, during and after a recording; recorded layers run outside the graph.

    Blocks are compiled, not the model: each break makes the compiler trace all callers again.
    """
    model = patched("qwen3_moe", layers=2)
    batch = tiny_models.inputs(model)
    expected = recorded(model, batch)
    for _, block in tiny_models.blocks(model):
        block.compile(backend="aot_eager")
    sum_loss(model, batch)
    with record(model, router_input=True) as recorder:
        sum_loss(model, batch).backward()
        recorder.step()
    sum_loss(model, batch)
    for path, layer in recorder.layers.items():
        assert layer.load is None
        wanted = expected.layers[path]
        assert torch.equal(layer.ids, wanted.ids)
        assert_close(layer.router_input, wanted.router_input, EXACT, path)
        assert_close(layer.act_norm, wanted.act_norm, EXACT, path)
        assert_close(layer.grad_norm_params, wanted.grad_norm_params, EXACT, path)


@pytest.mark.parametrize("tokens", [(0, 7), (1, 1), (3, 11)])
def test_any_number_of_tokens(tokens) -> None:
    model = patched("qwen3_moe")
    block = last_layer(model).mlp
    x = torch.randn(*tokens, 32, dtype=torch.float64, requires_grad=True)
    with record(model, router_input=True) as recorder:
        block(x).square().sum().backward()
    (layer,) = recorder.layers.values()
    T = tokens[0] * tokens[1]
    for name in ("ids", "weights", "act_norm", *GRADIENTS):
        assert getattr(layer, name).shape == (T, 2), name
    assert int(layer.tokens_per_expert.sum()) == 2 * T


@pytest.mark.parametrize("empty", [-1, 8, 1000])
def test_empty_slots_count_nowhere_and_have_no_norm(empty) -> None:
    """Count no empty slot and give it no norm; expert-parallel sentinels make such slots."""
    model = patched("qwen3_moe")
    experts = experts_below(last_layer(model).mlp)
    ids = torch.tensor([[0, empty], [empty, empty], [3, 0]])
    weights = torch.full((3, 2), 0.5, dtype=torch.float64)
    x = torch.randn(3, 32, dtype=torch.float64, requires_grad=True)
    with record(model) as recorder:
        experts(x, ids, weights).square().sum().backward()
    (layer,) = recorder.layers.values()
    assert layer.tokens_per_expert.tolist() == [2, 0, 0, 1, 0, 0, 0, 0]
    for name in ("act_norm", *GRADIENTS):
        assert torch.equal(getattr(layer, name) > 0, ids == ids.clamp(0, 7)), name
