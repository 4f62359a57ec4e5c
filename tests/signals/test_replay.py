"""record_routing and replay_routing: the same experts, and the gate's own gradient.

test_trace.py covers masks, files, mismatches, and preference and RL steps with a trace.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_patch import (
    PatchStateError,
    UnsupportedOptionError,
    patch_model,
    record,
    replay_routing,
    supported_model_types,
    unpatch_model,
)
from moe_patch.signals.trace import RoutingTrace
from tests.support import tiny_models
from tests.support.numerics import FP32, assert_bits, assert_close, rel_err
from tests.support.replay_cases import check_own_routing, other_experts, patched, step, traced
from tests.support.signals_cases import listening

# One of each routing function and of each peculiarity: bias on gate or block, groups, fp32 or not.
FAMILIES = (
    "qwen3_moe", "deepseek_v3", "deepseek_v2", "mistral4", "minimax_m2", "gpt_oss", "cohere2_moe",
    "gemma4_text", "ernie4_5_moe", "longcat_flash", "muse_spark_text", "kolibri1", "granitemoe",
    "openai_privacy_filter",
)  # fmt: skip
NAMES = {"gemma4_text": "gemma4", "muse_spark_text": "muse_spark"}
TIERS = supported_model_types()
FAMILIES = tuple(name for name in FAMILIES if TIERS.get(name) == "full")


@pytest.mark.routers
@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_models_own_routing_gives_the_same_bits(model_type, dtype) -> None:
    """Loss and every gradient, the gate's among them."""
    model = patched(NAMES.get(model_type, model_type), dtype=dtype).eval()
    batch = tiny_models.inputs(model)
    check_own_routing(model, batch)


@pytest.mark.routers
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "checkpoint", "reentrant"])
def test_prescribed_experts_run_and_the_gate_learns(model_type, reentrant) -> None:
    """Match transformers' experts with the weights that its gate gives the prescribed experts."""
    model = patched(model_type, dtype=torch.float64)
    batch = tiny_models.inputs(model)
    trace = other_experts(traced(model, batch))
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    with replay_routing(model, trace), record(model) as recorder:
        step(model, batch)
    for index, (path, layer) in enumerate(recorder.layers.items()):
        assert torch.equal(layer.ids, trace.ids_TLK[:, index])
        picked = layer.logits.gather(1, layer.ids)
        if model_type == "deepseek_v3":
            router = model.get_submodule(layer.router_path)
            weights = picked.float().sigmoid()
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            weights = weights * router.routed_scaling_factor
        elif model_type == "gpt_oss":
            weights = picked.softmax(-1)
        else:
            weights = layer.logits.softmax(-1).gather(1, layer.ids)
            weights = weights / weights.sum(-1, keepdim=True)
        assert_close(layer.weights, weights, 1e-6, path)
    gates = [p for n, p in model.named_parameters() if "gate.weight" in n or "router.weight" in n]
    assert gates
    assert all(gate.grad.any() for gate in gates)


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "checkpoint", "reentrant"])
def test_the_routers_own_choice_is_counted_once_per_forward(reentrant) -> None:
    """Prescribed tokens only; against the ids of a recorded forward."""
    model = patched()
    batch = tiny_models.inputs(model)
    own = traced(model, batch)
    ids_TLK = own.ids_TLK.flip(-1).clone()  # another order is no other choice
    ids_TLK[3:, 0] = (ids_TLK[3:, 0] + 1) % own.experts
    ids_TLK[5:7] = -1
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    with replay_routing(model, RoutingTrace(ids_TLK), compare=True) as replay:
        step(model, batch)
        prescribed, other = replay.counts().tolist()
    T, L, K = ids_TLK.shape
    assert prescribed == (T - 2) * L * K
    with replay_routing(model, RoutingTrace(ids_TLK)), record(model) as recorder:
        model(**batch)
    wanted = 0
    for index, layer in enumerate(recorder.layers.values()):
        best = layer.logits.topk(K).indices.tolist()
        rows = zip(ids_TLK[:, index].tolist(), best, strict=True)
        wanted += sum(len({*row} - {*top}) for row, top in rows if row[0] >= 0)
    assert 0 < other == wanted < prescribed
    with replay_routing(model, own) as replay:
        model(**batch)
    with pytest.raises(UnsupportedOptionError, match="nothing was compared"):
        replay.counts()


def test_a_model_that_changed_is_searched_again() -> None:
    """Another patch, adapters, fewer layers: the blocks of the last search no longer count."""
    model = patched()
    batch = tiny_models.inputs(model)
    for change in (
        lambda: patch_model(unpatch_model(model), self_check=False),
        lambda: setattr(model.model.layers[1], "mlp", model.model.layers[0].mlp.gate),
    ):
        trace = other_experts(traced(model, batch))
        with replay_routing(model, trace), record(model) as recorder, torch.no_grad():
            model(**batch)
        for index, layer in enumerate(recorder.layers.values()):
            assert torch.equal(layer.ids, trace.ids_TLK[:, index])
        change()
    with (
        pytest.raises(UnsupportedOptionError, match="the model has 1"),
        replay_routing(model, trace),
    ):
        pass


@pytest.mark.parametrize("reentrant", [False, True], ids=["checkpoint", "reentrant"])
def test_a_replay_that_ends_before_its_recomputes_is_refused(reentrant) -> None:
    """And leaves nothing behind once a forward without it has run."""
    model = patched()
    batch = tiny_models.inputs(model)
    trace = other_experts(traced(model, batch))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with replay_routing(model, trace):
        loss = tiny_models.loss(model(**batch))
    with pytest.raises(PatchStateError, match=r"mlp\.gate: .* after its replay ended"):
        loss.backward()
    expected = step(model, batch)
    assert not listening(model)
    with replay_routing(model, trace):
        step(model, batch)
    assert not listening(model)
    for mine, theirs in zip(step(model, batch), expected, strict=True):
        assert_bits(mine, theirs)


def test_two_replays_at_once_are_refused() -> None:
    """And the first one goes on."""
    model = patched()
    batch = tiny_models.inputs(model)
    trace = other_experts(traced(model, batch))
    with replay_routing(model, trace), record(model) as recorder:
        with (
            pytest.raises(UnsupportedOptionError, match=r"mlp\.gate: a replay is already active"),
            replay_routing(model, trace),
        ):
            pass
        step(model, batch)
    for index, layer in enumerate(recorder.layers.values()):
        assert torch.equal(layer.ids, trace.ids_TLK[:, index])
    assert not listening(model)


def test_other_threads_are_refused() -> None:
    """Before they route anything; the thread of the replay goes on."""
    model = patched()
    batch = tiny_models.inputs(model)
    trace = other_experts(traced(model, batch))
    failures: list[Exception] = []

    def forward() -> None:
        try:
            model(**batch)
        except PatchStateError as error:
            failures.append(error)

    with replay_routing(model, trace):
        thread = threading.Thread(target=forward, name="another")
        thread.start()
        thread.join()
        step(model, batch)
    assert "a forward of thread 'another'" in str(failures[0])


def as_in_transformers(model: Any, trace: RoutingTrace, values: bool) -> list[Tensor]:
    """Return loss and gradients of an unpatched model; hooks replace the outputs of its gates."""

    def hook(index: int) -> Any:
        ids = trace.ids_TLK[:, index]

        def replace(module: Any, args: tuple, out: tuple) -> tuple:
            logits, dtype = out[0], out[1].dtype
            picked = logits.softmax(-1, dtype=torch.float).gather(1, ids)
            weights = (picked / picked.sum(-1, keepdim=True)).to(dtype)
            if values:
                given = trace.weights_TLK[:, index].to(dtype)
                weights = given + (weights - weights.detach())
            return logits, weights, ids

        return replace

    blocks = tiny_models.blocks(model)
    handles = [block.gate.register_forward_hook(hook(i)) for i, (_, block) in enumerate(blocks)]
    found = step(model, batch=tiny_models.inputs(model))
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("values", [False, True], ids=["ids", "ids and weights"])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "checkpoint", "reentrant"])
def test_every_gradient_is_that_of_a_gate_whose_choice_a_hook_replaces(reentrant, values) -> None:
    """Match every gradient; the gate's follows the formula even with the trace's values."""
    reference = tiny_models.build("qwen3_moe", dtype=torch.float64, output_router_logits=False)
    model = patch_model(copy.deepcopy(reference), self_check=False)
    batch = tiny_models.inputs(model)
    trace = other_experts(traced(model, batch, weights=values))
    if values:
        trace = dataclasses.replace(trace, weights_TLK=1.5 * trace.weights_TLK)
    expected = as_in_transformers(reference, trace, values)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    with replay_routing(model, trace):
        found = step(model, batch)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine, theirs, FP32)


def test_compiled_code_replays_too() -> None:
    """Replay with blocks compiled before, during and after."""
    torch._dynamo.reset()
    model = patched(output_router_logits=False)
    batch = tiny_models.inputs(model)
    trace = other_experts(traced(model, batch))
    with replay_routing(model, trace):
        expected = model(**batch).logits
    for _, block in tiny_models.blocks(model):
        block.compile(backend="aot_eager")
    own = model(**batch).logits
    with replay_routing(model, trace):
        found = model(**batch).logits
    assert_close(found, expected, FP32)
    assert rel_err(found, own) > 1e-2
    assert_close(model(**batch).logits, own, FP32)


def test_prescribed_weights_are_exact_and_keep_the_gates_gradient() -> None:
    model = patched(dtype=torch.float64)
    batch = tiny_models.inputs(model)
    trace = traced(model, batch, weights=True)
    doubled = dataclasses.replace(trace, weights_TLK=2 * trace.weights_TLK)
    with replay_routing(model, doubled), record(model) as recorder:
        step(model, batch)
    for index, layer in enumerate(recorder.layers.values()):
        assert_bits(layer.weights, doubled.weights_TLK[:, index])
    assert all(block.gate.weight.grad.any() for _, block in tiny_models.blocks(model))
