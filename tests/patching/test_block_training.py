"""Patched blocks in training: gradients, dtypes, dense layers, noise, repeats."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from torch import nn

from moe_patch import patch_model, patch_report
from moe_patch.ops.routing import softmax_topk
from tests.support import tiny_models
from tests.support.numerics import FP32, assert_bits, assert_close, bf16_rule, probe, rel_err
from tests.support.pairs import EIGHT, blocks, gate_of, pair
from tests.support.parity import assert_parity, run_block, run_model
from tests.support.trace import assert_tier, executed


@pytest.mark.parametrize("wanted", list(product((False, True), repeat=4)), ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_requires_grad_of_input_gate_and_experts(name, wanted) -> None:
    """Follow requires_grad set after patching: None exactly where frozen, else as unpatched."""
    results = []
    for block in blocks(name):
        gate, experts = gate_of(block), block.experts
        block.requires_grad_(False)
        x = tiny_models.hidden(block, 2, 7).detach()
        leaves = (x, gate.weight, experts.gate_up_proj, experts.down_proj)
        for leaf, want in zip(leaves, wanted, strict=True):
            leaf.requires_grad_(want)
        out = block(x)
        out = out[0] if isinstance(out, tuple) else out
        assert out.requires_grad == any(wanted)
        if any(wanted):
            probe(out).backward()
        results.append([leaf.grad for leaf in leaves])
    for want, mine, ref in zip(wanted, *results, strict=True):
        assert (mine is not None) == (ref is not None) == want
        if want:
            assert_close(mine, ref, FP32)


@pytest.mark.parametrize("reentrant", [False, True])
def test_frozen_base_under_gradient_checkpointing(reentrant) -> None:
    gradients = []
    for each in pair("qwen3_moe"):
        each.requires_grad_(False)
        each.lm_head.weight.requires_grad_()
        each.model.layers[0].mlp.experts.gate_up_proj.requires_grad_()
        each.enable_input_require_grads()
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
        run = run_model(each, tiny_models.inputs(each))
        gradients.append({k: v for k, v in run.items() if v is not None})
    assert_parity(*gradients, FP32)
    assert gradients[0]["grad.model.layers.0.mlp.experts.gate_up_proj"].any()


def test_one_token_reaches_two_experts_and_the_rest_get_exact_zeros() -> None:
    block, _ = blocks("qwen3_moe")
    run = run_block(block, tiny_models.hidden(block, 1, 1))
    for name in ("gate_up_proj", "down_proj"):
        reached = run[f"grad.experts.{name}"].flatten(1).any(-1)
        assert reached.sum() == 2


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_mixed_dtypes_and_autocast(name, w_dtype, x_dtype, autocast) -> None:
    """Raise no dtype error, stay within bf16's distance to fp64, keep each leaf's dtype."""
    block, reference = blocks(name)
    experts = block.experts.to(w_dtype)
    wide = copy.deepcopy(reference.experts).to(w_dtype).double()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=generator).to(x_dtype).requires_grad_()
    ids = torch.rand(64, 8, generator=generator).argsort(-1)[:, :2]
    weights = torch.rand(64, 2, generator=generator).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = experts(x, ids, weights)
        probe(out.float()).backward()
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, weights))
    ref = wide(x64, ids, w64)
    probe(ref).backward()
    low = torch.bfloat16 in (w_dtype, x_dtype) or autocast
    limit = 2e-2 if low else FP32
    assert out.dtype == x_dtype
    assert_close(out, ref, limit, "out")
    pairs = {"x": (x, x64), "weights": (weights, w64)}
    pairs |= {
        n: (p, q) for (n, p), q in zip(experts.named_parameters(), wide.parameters(), strict=True)
    }
    for key, (leaf, ref_leaf) in pairs.items():
        assert leaf.grad.dtype == leaf.dtype, key
        assert_close(leaf.grad, ref_leaf.grad, limit, key)


@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral", "deepseek_v3"])
def test_a_model_under_autocast(name) -> None:
    """Logits are as close to fp64 as the untouched model's under the same autocast."""
    model, reference = pair(name)
    wide = copy.deepcopy(reference).double()
    batch = tiny_models.inputs(model, 4, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        mine, eager = model(**batch).logits, reference(**batch).logits
    bf16_rule(mine, eager, wide(**batch).logits, factor=2.0)


@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral", "gpt_oss"])
def test_autocast_leaves_fp64_alone(name) -> None:
    """Keep fp64 under autocast, as torch's own autocast keeps the untouched model."""
    block, reference = (b.double() for b in blocks(name))
    x = tiny_models.hidden(reference, 2, 7).double()
    with torch.autocast("cpu", torch.bfloat16):
        mine, theirs = run_block(block, x), run_block(reference, x)
    assert_parity(mine, theirs, FP32)


# --- which modules --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "over", "sparse"),
    [
        ("deepseek_v3", {"first_k_dense_replace": 1}, ["model.layers.1.mlp"]),
        ("glm4_moe", {"first_k_dense_replace": 1}, ["model.layers.1.mlp"]),
        ("qwen3_moe", {"mlp_only_layers": [0]}, ["model.layers.1.mlp"]),
        ("qwen2_moe", {"mlp_only_layers": [1]}, ["model.layers.0.mlp"]),
        ("qwen3_moe", {"decoder_sparse_step": 2}, ["model.layers.1.mlp"]),
    ],
    ids=str,
)
def test_dense_layers_are_left_alone(name, over, sparse) -> None:
    model, reference = pair(name, **over)
    assert [row.path for row in patch_report(model)] == sparse
    dense = next(m for p, m in model.named_modules() if p.endswith(".mlp") and p not in sparse)
    assert all("forward" not in m.__dict__ for m in dense.modules())
    batch = tiny_models.inputs(model)
    assert_parity(run_model(model, batch), run_model(reference, batch), FP32)


# --- training noise -------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["mixtral", "minimax_m2"])
def test_router_jitter_is_the_same_draw(name, training) -> None:
    block, reference = blocks(name, router_jitter_noise=0.3)
    calm, _ = blocks(name, router_jitter_noise=0.0)
    outs, states = [], []
    for each in (block, reference, calm):
        each.train(training)
        torch.manual_seed(3)
        with torch.no_grad():
            outs.append(each(tiny_models.hidden(each, 2, 7).detach().clone()))
        states.append(torch.get_rng_state())
    assert_close(outs[0], outs[1], FP32)
    assert torch.equal(states[0], states[1])
    assert (rel_err(outs[0], outs[2]) > 0.05) == training


def test_ties_torch_reaches_the_block() -> None:
    """Choose experts 0 and 1 from a zero gate, and with ``ties="torch"`` those of torch.topk."""
    reference = tiny_models.build("qwen3_moe")
    chosen = {}
    for ties in ("lower", "torch"):
        model = patch_model(copy.deepcopy(reference), ties=ties)
        gate = gate_of(tiny_models.blocks(model)[0][1])
        nn.init.zeros_(gate.weight)
        chosen[ties] = gate(torch.randn(3, 32))[2].tolist()
    assert chosen["lower"] == [[0, 1]] * 3
    expected = softmax_topk(torch.zeros(3, 8), top_k=2, ties="torch").ids_TK
    assert chosen["torch"] == expected.tolist() != chosen["lower"]


def test_recompute_gives_the_same_bits() -> None:
    reference = tiny_models.build("deepseek_v3")
    batch = tiny_models.inputs(reference)
    runs = []
    for recompute in (False, True):
        model = patch_model(copy.deepcopy(reference), recompute=recompute)
        runs.append(run_model(model, batch))
        assert_tier("full", model, executed(lambda model=model: run_model(model, batch)))
    for name, value in runs[0].items():
        if value is not None:
            assert_bits(runs[1][name], value, name)


@pytest.mark.parametrize("name", EIGHT)
def test_repeats_are_bit_identical(name) -> None:
    block, _ = blocks(name)
    x = tiny_models.hidden(block, 4, 16)
    first = run_block(block, x)
    for _ in range(5):
        for key, value in run_block(block, x).items():
            if value is not None:
                assert_bits(value, first[key], key)


@pytest.mark.parametrize("name", EIGHT)
def test_poisoned_memory_reaches_no_result(name, poisoned_memory) -> None:
    block, reference = blocks(name)
    x = tiny_models.hidden(reference, 1, 3)
    assert_parity(run_block(block, x), run_block(reference, x), FP32)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "minimax_m2"])
def test_transformers_sentinel_is_an_empty_slot(name) -> None:
    """Slots with the id E, as expert parallelism fills them, have no value and no gradient.

    The reference gives such slots expert 0 at weight 0, which eager code of any release accepts.
    """
    results = []
    for block, takes_sentinel in zip(blocks(name), (True, False), strict=True):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        ids = torch.arange(32).view(16, 2) % 9
        weights = torch.linspace(0.1, 1.0, 32).view(16, 2).requires_grad_()
        empty = ids == 8
        if takes_sentinel:
            out = block.experts(x, ids, weights)
        else:
            out = block.experts(x, ids.masked_fill(empty, 0), weights.masked_fill(empty, 0.0))
        grads = torch.autograd.grad(probe(out), (x, weights, *block.experts.parameters()))
        assert not grads[1][empty].any()
        results.append((out, *grads))
    for mine, ref in zip(*results, strict=True):
        assert_close(mine, ref, FP32)
