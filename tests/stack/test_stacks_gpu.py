"""On CUDA devices: checkpointing, casts, autocast, offload, device maps and a patch's whole life.

Compiled models and generate are in tests/stack/test_compile_gpu.py, several processes in
test_ranks.py.
"""

from __future__ import annotations

import copy
import functools
import pickle

import accelerate
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_patch import patch_model, patch_report, unpatch_model
from tests.stack.test_checkpointing import (
    assert_ties,
    keeping,
    recomputed_ids,
    tied_model,
    train,
)
from tests.support import tiny_models
from tests.support.dist_helpers import needs_cards
from tests.support.numerics import FP32, assert_bits, assert_close, bf16_rule, probe
from tests.support.snapshots import (
    assert_patched_stretch_unseen,
    assert_unchanged,
    logits,
    snapshot,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
STEPS = 50
FAMILIES = ["qwen2_moe", "gpt_oss"]
ORDERS = ["patch first", "place first"]


@pytest.fixture
def deterministic():
    """Make torch's own backward passes deterministic too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def build(name, dtype=torch.float32, device=DEVICE, **overrides):
    return tiny_models.build(name, dtype=dtype, **overrides).to(device)


def batch_for(model, *sizes, device=DEVICE):
    return {key: t.to(device) for key, t in tiny_models.inputs(model, *sizes).items()}


def assert_ours(model):
    """Expect Triton kernels for router and experts of every block."""
    found = {(row.tier, row.router_backend, row.experts_backend) for row in patch_report(model)}
    assert found == {("full", "triton", "triton")}


def kernels(call):
    """Count the runs of each kernel on the device during a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return {event.key: event.count for event in profile.key_averages()}


def checkpointed(model, reentrant):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_fifty_checkpointed_steps_with_exact_ties(name, reentrant, deterministic):
    """Recompute the same ids in bf16, and change no bit of losses and gradients."""
    plain = tied_model(name).to(DEVICE)
    ours = checkpointed(copy.deepcopy(plain), reentrant)
    assert_ours(ours)
    batch = batch_for(plain)
    _, losses, gradients = train(plain, batch, STEPS)
    calls, found, ours_gradients = train(ours, batch, STEPS)
    for step in calls:
        for forward, recompute in recomputed_ids(step):
            assert torch.equal(forward, recompute)
    if name == "gpt_oss":
        assert_ties(calls[0][0][1])
    assert_bits(found, losses)
    assert ours_gradients.keys() == gradients.keys()
    for key, gradient in gradients.items():
        assert_bits(ours_gradients[key], gradient, key)


@pytest.mark.parametrize("reentrant", [True, False])
def test_memory_at_step_fifty_is_that_at_step_five(reentrant):
    model = checkpointed(tied_model("qwen3_moe").to(DEVICE), reentrant)
    batch = batch_for(model, 4, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    memory = []
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad(set_to_none=True)
        model(**batch).loss.backward()
        optimizer.step()
        memory.append((torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))
    assert memory[-1] == memory[4]


def test_selective_checkpointing_keeps_routing_decisions_and_experts():
    """Run the kernels of router and experts once if a policy keeps their operators."""
    model = tied_model("qwen3_moe", dtype=torch.float32).to(DEVICE)
    block = tiny_models.blocks(model)[0][1]
    x = tiny_models.hidden(block, 2, 7)
    parameters = [x, *block.parameters()]
    operators = (torch.ops.moe_patch.route_forward.default, torch.ops.moe_patch.experts.default)
    forwards = {
        "plain": block,
        "whole": lambda x: checkpoint(block, x, use_reentrant=False),
        "selective": lambda x: keeping(block, x, operators)[0],
    }
    ran, gradients = {}, {}

    def step(way):
        loss = forwards[way](x).square().sum()
        gradients[way] = torch.autograd.grad(loss, parameters)

    step("plain")  # whatever only a first call launches
    for way in forwards:
        counts = kernels(functools.partial(step, way))
        ran[way] = [counts[name] for name in ("forward_kernel", "_up_kernel")]
    assert ran["selective"] == ran["plain"]
    assert ran["whole"] == [count + 1 for count in ran["plain"]]
    for way in ("whole", "selective"):
        for found, wanted in zip(gradients[way], gradients["plain"], strict=True):
            assert_bits(found, wanted)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_mixed_dtypes_and_autocast(name, w_dtype, x_dtype, autocast):
    """Raise no dtype error, stay within bf16's distance to fp64, keep each leaf's dtype."""
    experts = tiny_models.blocks(patch_model(build(name, w_dtype)))[0][1].experts
    wide = tiny_models.blocks(build(name, w_dtype))[0][1].experts.double()
    x = torch.randn(64, 32, device=DEVICE, dtype=x_dtype).requires_grad_()
    ids = torch.rand(64, 8, device=DEVICE).argsort(-1)[:, :2]
    weights = torch.rand(64, 2, device=DEVICE).requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        out = experts(x, ids, weights)
        probe(out.float()).backward()
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, weights))
    ref = wide(x64, ids, w64)
    probe(ref).backward()
    limit = 2e-2 if autocast or torch.bfloat16 in (w_dtype, x_dtype) else FP32
    assert out.dtype == x_dtype
    assert_close(out, ref, limit, "out")
    leaves = [x, weights, *experts.parameters()]
    for leaf, exact in zip(leaves, [x64, w64, *wide.parameters()], strict=True):
        assert leaf.grad.dtype == leaf.dtype
        assert_close(leaf.grad, exact.grad, limit)


@pytest.mark.parametrize("name", FAMILIES)
def test_training_under_autocast(name):
    """Give fp32 masters fp32 gradients, and a loss as close to fp64 as the unpatched twin's."""
    twin = build(name)
    batch = batch_for(twin, 4, 16)
    ours, wide = patch_model(copy.deepcopy(twin)), copy.deepcopy(twin).double()
    outs = []
    for model in (ours, twin):
        with torch.autocast(DEVICE, torch.bfloat16):
            out = model(**batch)
        out.loss.backward()
        outs.append(out.logits.detach())
        for key, p in model.named_parameters():
            assert p.grad is None or p.grad.dtype == torch.float32, key
    with torch.no_grad():
        bf16_rule(*outs, wide(**batch).logits, factor=2.0)
    grads = [{k for k, p in m.named_parameters() if p.grad is not None} for m in (ours, twin)]
    assert grads[0] == grads[1]


@pytest.mark.parametrize("move", ["bf16", "fp16", "cpu and back"])
@pytest.mark.parametrize("name", FAMILIES)
def test_moved_and_cast_after_patching(name, move):
    """Give the bits of a model patched after the move or cast."""
    moves = {
        "bf16": lambda m: m.bfloat16(),
        "fp16": lambda m: m.half(),
        "cpu and back": lambda m: m.cpu().to(DEVICE),
    }
    twin = build(name)
    ours = moves[move](patch_model(copy.deepcopy(twin)))
    assert_ours(ours)
    twin = moves[move](twin)
    for (key, mine), theirs in zip(
        ours.state_dict().items(), twin.state_dict().values(), strict=True
    ):
        assert_bits(mine, theirs, key)
    batch = batch_for(ours)
    eager = logits(twin, batch)
    assert_bits(logits(patch_model(copy.deepcopy(twin)), batch), logits(ours, batch))
    assert_bits(logits(unpatch_model(ours), batch), eager)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_offloaded_to_the_host(name, order):
    """Keep the second layer's weights in host memory and copy them to the card for each call."""
    model = build(name)
    batch = batch_for(model)
    plain = logits(model, batch)
    expected = logits(patch_model(copy.deepcopy(model)), batch)
    if order == "patch first":
        patch_model(model)
    device_map = {f"model.{child}": 0 for child, _ in model.model.named_children()}
    del device_map["model.layers"]
    device_map |= {"lm_head": 0, "model.layers.0": 0, "model.layers.1": "cpu"}
    accelerate.dispatch_model(model, device_map, main_device=0)
    patch_model(model)
    assert {row.tier for row in patch_report(model)} == {"full"}
    assert_bits(logits(model, batch), expected)
    unpatch_model(model)
    assert_bits(logits(model, batch), plain)


@needs_cards(2)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_over_two_cards(name, order):
    """Place half of the layers on a card other than the current one."""
    model = build(name)
    batch = batch_for(model)
    expected = logits(patch_model(copy.deepcopy(model)), batch)
    if order == "patch first":
        patch_model(model)
    device_map = {f"model.{child}": 0 for child, _ in model.model.named_children()}
    del device_map["model.layers"]
    device_map |= {"lm_head": 0, "model.layers.0": 0, "model.layers.1": 1}
    accelerate.dispatch_model(model, device_map)
    patch_model(model)
    assert_ours(model)
    assert_bits(logits(model, batch), expected)
    model.train()(**batch).loss.backward()
    assert {p.grad.device.index for p in model.model.layers.parameters()} == {0, 1}
    assert torch.cuda.current_device() == 0


@needs_cards(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_block_on_another_card_than_the_current_one(name):
    runs = []
    for index in (0, 1):
        model = patch_model(build(name, device=f"cuda:{index}"))
        model(**batch_for(model, device=f"cuda:{index}")).loss.backward()
        runs.append({k: p.grad.cpu() for k, p in model.named_parameters() if p.grad is not None})
    assert torch.cuda.current_device() == 0
    for key, gradient in runs[0].items():
        assert_close(runs[1][key], gradient, FP32, key)


def test_patch_train_undo_continue():
    model = build("qwen3_moe")
    assert_patched_stretch_unseen(model, batch_for(model))


@pytest.mark.parametrize("name", FAMILIES)
def test_copies_are_their_own_and_undo_leaves_nothing(name):
    model = build(name)
    batch = batch_for(model)
    pickled = pickle.loads(pickle.dumps(patch_model(model)))
    copied = copy.deepcopy(model)
    unpatch_model(model)
    plain, before = logits(model, batch), snapshot(model)
    expected = logits(patch_model(model), batch)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    for each in (pickled, copied):
        assert_ours(each)
        assert_bits(logits(each, batch), expected)
        assert_bits(logits(unpatch_model(each), batch), plain)
    unpatch_model(model)
    assert_unchanged(before, snapshot(model))
