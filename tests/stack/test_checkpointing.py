"""Gradient checkpointing with routers whose scores tie exactly: the recompute takes the same ids.

Adapters under checkpointing are in tests/lora/test_training.py, a frozen base in
tests/patching/test_block_training.py.
"""

from __future__ import annotations

import copy
import functools
import weakref

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import moe_patch.ops.experts.torch_backend
from moe_patch import patch_model
from tests.support import tiny_models
from tests.support.numerics import assert_bits
from tests.support.snapshots import assert_unchanged, snapshot

STEPS = 20
# The auxiliary loss is off: transformers loses its gradient under reentrant recompute.
OVERRIDES = {"output_router_logits": False}


def tied_model(name, dtype=torch.bfloat16, **patch):
    """Return a model with four exactly equal copies of each score, in all rows and layers."""
    over = {} if name == "deepseek_v3" else OVERRIDES
    model = tiny_models.build(name, dtype=dtype, **over)
    for _, block in tiny_models.blocks(model):
        router = block.router if name == "gpt_oss" else block.gate
        with torch.no_grad():
            router.weight[2:] = router.weight[:2].repeat(3, 1)
            for bias in (n for n in ("bias", "e_score_correction_bias") if hasattr(router, n)):
                getattr(router, bias).zero_()
    return patch_model(model, **patch)


def routers(model):
    for _, block in tiny_models.blocks(model):
        yield block.router if "router" in block._modules else block.gate


def train(model, batch, steps=STEPS):
    """Return per step the ids of every router call and the loss, and the last gradients."""
    seen, losses = [], []
    hooks = [
        router.register_forward_hook(lambda m, _a, out: seen.append((m, out[2].clone())))
        for router in routers(model)
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    calls = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        calls.append(list(seen))
        seen.clear()
    for hook in hooks:
        hook.remove()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return calls, torch.stack(losses), gradients


def recomputed_ids(calls):
    """Return for each router of one step its ids in the forward and in the recompute."""
    ids = {}
    for router, ids_TK in calls:
        ids.setdefault(id(router), []).append(ids_TK)
    assert [len(each) for each in ids.values()] == [2, 2], "nothing was recomputed"
    return ids.values()


def assert_ties(ids_TK):
    """Expect the two lowest of the four experts that tie for the best score."""
    assert (ids_TK.sort(-1).values % 2 == ids_TK.sort(-1).values[:, :1] % 2).all()
    assert ids_TK.max() < 4


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_twenty_steps_with_exact_ties_change_no_bit(name, reentrant):
    plain = tied_model(name)
    ours = copy.deepcopy(plain)
    batch = tiny_models.inputs(plain)
    _, losses, gradients = train(plain, batch)
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ours.enable_input_require_grads()
    calls, found, ours_gradients = train(ours, batch)
    for step in calls:
        for forward, recompute in recomputed_ids(step):
            assert torch.equal(forward, recompute)
    if name != "deepseek_v3":
        assert_ties(calls[0][0][1])
    assert_bits(found, losses)
    assert ours_gradients.keys() == gradients.keys()
    for key, gradient in gradients.items():
        assert_bits(ours_gradients[key], gradient, key)


class Saved:
    """A tensor on its way from forward to backward, counted while it lives."""

    def __init__(self, tensor):
        self.tensor = tensor


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_held_for_backward_does_not_grow(recompute, checkpointing):
    """Hold the same at step 20 as at step 5, and nothing after a backward."""
    model = tied_model("qwen2_moe", recompute=recompute)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = tiny_models.inputs(model)
    alive = weakref.WeakSet()

    def pack(tensor):
        alive.add(saved := Saved(tensor))
        return saved

    held = []
    for _ in range(STEPS):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            loss = model(**batch).loss
        held.append(sum(saved.tensor.nbytes for saved in alive))
        loss.backward()
        model.zero_grad(set_to_none=True)
        del loss
        assert not alive
    assert held[4] > 0
    assert held[-1] == held[4]


class Boom(Exception):
    pass


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_raising_forward_leaves_no_state(reentrant):
    model = tied_model("qwen2_moe")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    batch = tiny_models.inputs(model)
    _, losses, _ = train(copy.deepcopy(model), batch, 2)
    model(**batch)
    before = snapshot(model)

    def fail(*_):
        raise Boom

    for where in (model.model.layers[1].mlp.experts, model.model.layers[1].mlp.gate):
        hook = where.register_forward_hook(fail)
        with pytest.raises(Boom):
            model(**batch)
        hook.remove()
        assert_unchanged(before, snapshot(model))
    assert_bits(train(model, batch, 2)[1], losses)


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_recompute_that_stops_early_leaves_no_state(early_stop):
    """Leave no state if recompute stops at the last saved tensor, before the end of a block."""
    model = tied_model("qwen2_moe", dtype=torch.float32)
    block = tiny_models.blocks(model)[0][1]
    x = tiny_models.hidden(block, 2, 7)
    finished = []
    hook = block.register_forward_hook(lambda *_: finished.append(1))
    (expected,) = torch.autograd.grad(block(x).square().sum(), x)
    finished.clear()
    before = snapshot(block)
    with set_checkpoint_early_stop(early_stop):
        out = checkpoint(block, x, use_reentrant=False)
        (found,) = torch.autograd.grad(out.square().sum(), x)
    assert_bits(found, expected)
    assert len(finished) == (1 if early_stop else 2)
    assert_unchanged(before, snapshot(block))
    hook.remove()


KEPT = (torch.ops.aten.sort.stable, torch.ops.moe_patch.experts.default)


def keeping(block, x, operators):
    """Return a block's output under a policy that keeps some operators, and the operators seen."""
    met = []

    def policy(_ctx, op, *_args, **_kwargs):
        if op in operators:
            met.append(op)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts), met


def test_selective_checkpointing_keeps_routing_decisions_and_experts(monkeypatch):
    """Run router and experts once if a policy keeps their operators; recompute the rest."""
    model = tied_model("qwen3_moe", dtype=torch.float32)
    block = tiny_models.blocks(model)[0][1]
    x = tiny_models.hidden(block, 2, 7)
    parameters = [x, *block.parameters()]
    expected = torch.autograd.grad(block(x).square().sum(), parameters)
    ran, forward = [], moe_patch.ops.experts.torch_backend.experts_forward
    monkeypatch.setattr(
        moe_patch.ops.experts.torch_backend,
        "experts_forward",
        lambda *args, **kwargs: (ran.append(1), forward(*args, **kwargs))[1],
    )
    out, met = keeping(block, x, KEPT)
    found = torch.autograd.grad(out.square().sum(), parameters)
    assert met[: len(KEPT)] == list(KEPT)  # some releases of torch call the policy again
    assert len(ran) == 1, "the experts ran again in recompute"
    for mine, wanted in zip(found, expected, strict=True):
        assert_bits(mine, wanted)
