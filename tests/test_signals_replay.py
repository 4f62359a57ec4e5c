"""record_routing and replay_routing: same experts, the gate's own gradient, clear mismatches."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from moe_patch import (
    PatchStateError,
    UnsupportedModelError,
    UnsupportedOptionError,
    patch_model,
    record,
    record_routing,
    replay_routing,
    supported_model_types,
)
from moe_patch.signals.trace import RoutingTrace
from tests import tiny_models
from tests.numerics import FP32, FP64, assert_bits, assert_close, rel_err
from tests.signals_cases import listening

# One of each routing function and of each peculiarity: bias on gate or block, groups, fp32 or not.
FAMILIES = (
    "qwen3_moe", "deepseek_v3", "deepseek_v2", "mistral4", "minimax_m2", "gpt_oss", "cohere2_moe",
    "gemma4_text", "ernie4_5_moe", "longcat_flash", "muse_spark_text", "kolibri1", "granitemoe",
    "openai_privacy_filter",
)  # fmt: skip
NAMES = {"gemma4_text": "gemma4", "muse_spark_text": "muse_spark"}
TIERS = supported_model_types()
FAMILIES = tuple(name for name in FAMILIES if TIERS.get(name) == "full")


def patched(model_type: str = "qwen3_moe", **options: Any) -> Any:
    return patch_model(tiny_models.build(model_type, **options), self_check=False)


def traced(model: Any, batch: dict[str, Tensor], weights: bool = False) -> RoutingTrace:
    with record_routing(model) as capture, torch.no_grad():
        model(**batch)
    return capture.trace(weights)


def step(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss = tiny_models.loss(model(**batch))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def other_experts(trace: RoutingTrace, by: int = 1) -> RoutingTrace:
    """Every id moved on by one: experts that the routers did not choose."""
    return dataclasses.replace(trace, ids_TLK=(trace.ids_TLK + by) % trace.experts)


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_models_own_routing_gives_the_same_bits(model_type, dtype) -> None:
    """Loss and every gradient, the gate's among them."""
    model = patched(NAMES.get(model_type, model_type), dtype=dtype).eval()
    batch = tiny_models.inputs(model)
    expected = step(model, batch)
    for weights in (False, True):
        trace = traced(model, batch, weights)
        with replay_routing(model, trace):
            found = step(model, batch)
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert_bits(mine, theirs)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "checkpoint", "reentrant"])
def test_prescribed_experts_run_and_the_gate_learns(model_type, reentrant) -> None:
    """Against transformers' experts with the weights that its gate gives those experts."""
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


def test_tokens_with_a_negative_id_are_left_to_the_router() -> None:
    model = patched()
    batch = tiny_models.inputs(model)
    trace = traced(model, batch)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, :3] = False
    rows, _ = other_experts(trace).rows(mask)
    assert rows.shape == (11, *trace.ids_TLK.shape[1:])
    partial = RoutingTrace.from_rows(rows, mask)
    with replay_routing(model, partial), record(model) as recorder:
        step(model, batch)
    first = next(iter(recorder.layers.values()))
    assert torch.equal(
        first.ids[:3], trace.ids_TLK[:3, 0]
    )  # in the first layer, nothing differs yet
    assert torch.equal(first.ids[3:], (trace.ids_TLK[3:, 0] + 1) % trace.experts)
    with_weights = RoutingTrace.from_rows(
        rows, mask, torch.full(rows.shape, 0.25), trace.paths, trace.experts
    )
    with replay_routing(model, with_weights), record(model) as recorder:
        step(model, batch)
    first = next(iter(recorder.layers.values()))
    assert (first.weights[3:] == 0.25).all()
    assert_close(first.weights[:3].sum(-1), torch.ones(3), FP32)


@pytest.mark.parametrize(("experts", "dtype"), [(8, torch.int16), (70000, torch.int32)])
@pytest.mark.parametrize("weights", [False, True])
def test_a_file_gives_the_trace_back(tmp_path, experts, dtype, weights) -> None:
    ids = torch.randint(-1, experts, (5, 3, 2))
    values = torch.rand(5, 3, 2) if weights else None
    trace = RoutingTrace(ids, values, ("a", "b", "c"), experts)
    trace.save(tmp_path / "routing.safetensors")
    with safe_open(tmp_path / "routing.safetensors", framework="pt") as file:
        assert file.get_tensor("ids").dtype == dtype
    back = RoutingTrace.load(tmp_path / "routing.safetensors")
    assert torch.equal(back.ids_TLK, ids)
    assert (back.paths, back.experts) == (trace.paths, experts)
    assert back.weights_TLK is None if values is None else torch.equal(back.weights_TLK, values)
    save_file({"ids": ids}, tmp_path / "other.safetensors")
    with pytest.raises(UnsupportedOptionError, match=r"other\.safetensors: format"):
        RoutingTrace.load(tmp_path / "other.safetensors")
    with pytest.raises(UnsupportedOptionError, match=r"missing: not a safetensors file"):
        RoutingTrace.load(tmp_path / "missing")


def test_a_mismatch_is_named() -> None:
    model = patched()
    batch = tiny_models.inputs(model)
    trace = traced(model, batch)
    ids = trace.ids_TLK

    def run(changed: RoutingTrace, forward: bool) -> None:
        with replay_routing(model, changed):
            assert forward, "the trace should not have been accepted"
            model(**batch)

    def refused(changed: RoutingTrace, match: str, forward: bool = False) -> None:
        with pytest.raises(UnsupportedOptionError, match=match):
            run(changed, forward)

    refused(RoutingTrace(ids[:, :1]), "the trace has 1 layers")
    refused(dataclasses.replace(trace, paths=("a", "b")), "a trace of this model")
    refused(RoutingTrace(ids[:, :, :1].expand(ids.shape)), "name an expert twice")
    refused(RoutingTrace(ids[:-1]), r"\(tokens, K\) = \(14, 2\), the trace has \(13, 2\)", True)
    refused(RoutingTrace(ids[:, :, :1]), r"the trace has \(14, 1\)", True)
    refused(RoutingTrace(ids + 8), "8 experts, the trace an unknown number and ids up to", True)
    refused(dataclasses.replace(trace, experts=16), "8 experts, the trace 16", True)
    assert not listening(model)
    for make, match in (
        (lambda: RoutingTrace(ids.float()), "accepted: integers"),
        (lambda: RoutingTrace(ids[0]), "accepted: integers"),
        (lambda: dataclasses.replace(trace, paths=("a",)), "1 paths"),
        (lambda: RoutingTrace(ids, torch.ones(1, 2, 2)), "weights are"),
        (lambda: RoutingTrace.from_rows(ids, torch.ones(13)), "selects 13 tokens"),
        (lambda: trace.rows(torch.ones(13)), "covers 13 tokens"),
    ):
        with pytest.raises(UnsupportedOptionError, match=match):
            make()
    with (
        record_routing(model) as capture,
        pytest.raises(UnsupportedOptionError, match="one forward"),
    ):
        capture.trace()
    with pytest.raises(PatchStateError), record_routing(tiny_models.build("qwen3_moe")):
        pass
    with (
        pytest.raises(UnsupportedModelError, match="zaya run a forward of their own"),
        record_routing(patched("zaya")),
    ):
        pass


def log_probs(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Summed log-probability of each sequence's completion."""
    logits = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    picked = logits.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (picked * mask[:, 1:]).sum(-1)


def test_dpo_shaped_step() -> None:
    """Policy and reference on chosen and rejected as one batch; the policy replays the reference.

    With equal weights and the reference's experts the margins are exactly zero; from there the
    policy trains, its gates included.
    """
    reference = patched(dtype=torch.float64)
    policy = copy.deepcopy(reference)
    ids = tiny_models.inputs(policy, batch=4)["input_ids"]
    mask = torch.ones_like(ids)
    with record_routing(reference) as capture, torch.no_grad():
        expected = log_probs(reference, ids, mask)
    trace = capture.trace()
    assert not listening(policy)
    with replay_routing(policy, trace):
        margins = log_probs(policy, ids, mask) - expected
        assert_close(margins + 1, torch.ones(4, dtype=torch.float64), FP64)
        loss = -nn.functional.logsigmoid(margins[:2] - margins[2:]).mean()
        loss.backward()
    assert all(block.gate.weight.grad.any() for _, block in tiny_models.blocks(policy))


def test_grpo_shaped_update_on_an_engines_routing() -> None:
    """Rollout ids of completion tokens only, in another precision: ratios come out at one.

    bf16 rounds other logits, so the two would choose other experts for some tokens: replayed, the
    ratio of the update's first step is off by rounding alone.
    """
    engine = patched(dtype=torch.bfloat16)
    policy = patched()
    policy.load_state_dict(engine.state_dict())
    for _, block in tiny_models.blocks(policy):  # near-ties, so that precision decides
        block.gate.weight.data *= 1e-3
    engine.load_state_dict(policy.state_dict())
    policy.load_state_dict(engine.state_dict())
    ids = tiny_models.inputs(policy, batch=8, seq=16)["input_ids"]
    completion = torch.arange(16).expand(8, 16) >= 5
    with record_routing(engine) as capture, torch.no_grad():
        rollout = log_probs(engine, ids, completion)
    rows, _ = capture.trace().rows(torch.ones_like(completion))
    own = traced(policy, {"input_ids": ids})
    assert (own.ids_TLK.sort(-1).values != rows.sort(-1).values).any()
    trace = RoutingTrace.from_rows(rows, torch.ones_like(completion), experts=8)
    with replay_routing(policy, trace):
        replayed = log_probs(policy, ids, completion)
        ratio = (replayed - replayed.detach()).exp()
        advantage = torch.linspace(-1, 1, 8)
        (-(ratio * advantage).mean()).backward()
    with torch.no_grad():
        free = log_probs(policy, ids, completion)
    assert rel_err(replayed, rollout) < rel_err(free, rollout)
    assert all(block.gate.weight.grad.any() for _, block in tiny_models.blocks(policy))
