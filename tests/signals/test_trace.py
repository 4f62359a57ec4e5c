"""Routing traces: masks over padded batches, files, mismatches, preference and RL steps."""

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
    record,
    record_routing,
    replay_routing,
)
from moe_patch.signals.trace import RoutingTrace
from tests.support import tiny_models
from tests.support.numerics import FP32, FP64, assert_close, rel_err
from tests.support.replay_cases import other_experts, patched, step, traced
from tests.support.signals_cases import listening


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


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "int32", "int64"])
def test_rows_as_an_engine_returns_them(dtype) -> None:
    """NumPy arrays of any integer type, tokens x layers x K, for the unpadded tokens of a batch."""
    model = patched()
    batch = tiny_models.inputs(model)
    trace = other_experts(traced(model, batch))
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, :3] = mask[1, 6:] = False
    rows, _ = trace.rows(mask.numpy())
    back = RoutingTrace.from_rows(rows.numpy().astype(dtype), mask.numpy().astype("int64"))
    given_T = mask.flatten()
    assert torch.equal(back.ids_TLK[given_T].long(), trace.ids_TLK[given_T].long())
    assert (back.ids_TLK[~given_T] < 0).all()
    with replay_routing(model, back), record(model) as recorder:
        step(model, batch)
    for index, layer in enumerate(recorder.layers.values()):
        assert torch.equal(layer.ids[given_T].long(), trace.ids_TLK[given_T, index].long())


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
        (lambda: RoutingTrace.from_rows(ids, torch.ones(14), torch.ones(13, 2, 2)), "weights are"),
        (lambda: trace.save("no/such/folder/x"), "no/such/folder/x: cannot be written"),
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


@pytest.mark.families("zaya")
def test_a_router_with_a_forward_of_its_own_is_named() -> None:
    with (
        pytest.raises(UnsupportedModelError, match="zaya run a forward of their own"),
        record_routing(patched("zaya")),
    ):
        pass


def log_probs(model: Any, batch: dict[str, Tensor], mask: Tensor) -> Tensor:
    """Return the summed log-probability of each sequence's completion."""
    logits = model(**batch).logits[:, :-1].log_softmax(-1)
    picked = logits.gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    return (picked * mask[:, 1:]).sum(-1)


def test_dpo_shaped_step() -> None:
    """Train a policy that replays its reference, on chosen and rejected as one batch.

    With equal weights and the reference's experts the margins are exactly zero at first. The
    policy then trains, its gates included.
    """
    reference = patched(dtype=torch.float64)
    policy = copy.deepcopy(reference)
    batch = {"input_ids": tiny_models.inputs(policy, batch=4)["input_ids"]}
    mask = torch.ones_like(batch["input_ids"])
    with record_routing(reference) as capture, torch.no_grad():
        expected = log_probs(reference, batch, mask)
    trace = capture.trace()
    assert not listening(policy)
    with replay_routing(policy, trace):
        margins = log_probs(policy, batch, mask) - expected
        assert_close(margins + 1, torch.ones(4, dtype=torch.float64), FP64)
        loss = -nn.functional.logsigmoid(margins[:2] - margins[2:]).mean()
        loss.backward()
    assert all(block.gate.weight.grad.any() for _, block in tiny_models.blocks(policy))


def near_ties(engine: Any) -> Any:
    """Return an fp32 policy with the bf16 engine's weights; its gates make precision matter."""
    policy = patched(output_router_logits=False)
    policy.load_state_dict(engine.state_dict())
    for _, block in tiny_models.blocks(policy):
        block.gate.weight.data *= 1e-3
    engine.load_state_dict(policy.state_dict())
    policy.load_state_dict(engine.state_dict())
    return policy


def test_grpo_shaped_update_on_an_engines_routing() -> None:
    """Replay the bf16 rollout of single sequences in an fp32 policy on left-padded prompts.

    Rounding to bf16 makes engine and policy choose different experts for some tokens. Replay
    brings the policy's log-probabilities closer to the rollout's. One prompt was cut after the
    rollout: its first rows have no place in the batch and are left out.
    """
    engine = patched(dtype=torch.bfloat16, output_router_logits=False)
    policy = near_ties(engine)
    ids = tiny_models.inputs(policy, batch=8, seq=16)["input_ids"]
    at = torch.arange(16).expand(8, 16)
    real, completion = at >= torch.arange(8).unsqueeze(1) % 4, at >= 8
    rollout, rows = [], []
    for sequence, here, mask in zip(ids, real, completion, strict=True):
        alone = sequence[here].unsqueeze(0)
        with record_routing(engine) as capture, torch.no_grad():
            rollout.append(log_probs(engine, {"input_ids": alone}, mask[here].unsqueeze(0)))
        rows.append(capture.trace().ids_TLK)
    real[0, :2] = False  # the cut prompt
    rows[0] = rows[0][2:]
    batch = {"input_ids": ids, "attention_mask": real.long()}
    own, _ = traced(policy, batch).rows(real)
    assert (own.sort(-1).values != torch.cat(rows).sort(-1).values).any()
    trace = RoutingTrace.from_rows(torch.cat(rows).numpy().astype("int16"), real, experts=8)
    assert (trace.ids_TLK[~real.flatten()] < 0).all()
    with replay_routing(policy, trace), record(policy) as recorder:
        replayed = log_probs(policy, batch, completion)
        ratio = (replayed - replayed.detach()).exp()
        advantage = torch.linspace(-1, 1, 8)
        (-(ratio * advantage).mean()).backward()
    for index, layer in enumerate(recorder.layers.values()):
        assert torch.equal(layer.ids[real.flatten()], torch.cat(rows)[:, index])
    with torch.no_grad():
        free = log_probs(policy, batch, completion)
    wanted = torch.cat(rollout)[1:]  # the cut sequence's are of another prompt
    assert rel_err(replayed[1:], wanted) < rel_err(free[1:], wanted)
    assert all(block.gate.weight.grad.any() for _, block in tiny_models.blocks(policy))
