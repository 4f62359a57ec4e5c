"""Patched blocks and models, one public bug report at a time."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_patch import patch_model, patch_report
from moe_patch.routing import softmax_topk
from tests import tiny_models
from tests.numerics import FP32, assert_bits, assert_close, bf16_rule, probe, rel_err
from tests.parity import assert_parity, run_block, run_model
from tests.trace import assert_tier, executed

WITH_AUX_LOSS = ("qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "minimax_m2", "gpt_oss")
EIGHT = (*WITH_AUX_LOSS, "deepseek_v3", "glm4_moe")


def pair(name: str, **over: Any) -> tuple[nn.Module, nn.Module]:
    """A patched model and the same model untouched, on transformers' eager experts."""
    reference = tiny_models.build(name, **over)
    return patch_model(copy.deepcopy(reference)), reference


def blocks(name: str, **over: Any) -> tuple[nn.Module, nn.Module]:
    """The first MoE block of each of such a pair."""
    return tuple(tiny_models.blocks(model)[0][1] for model in pair(name, **over))


def gate_of(block: nn.Module) -> nn.Module:
    return block.router if "router" in block._modules else block.gate


# --- router logits and the auxiliary loss ---------------------------------------------------------


@pytest.mark.parametrize("name", EIGHT)
def test_recorded_router_logits_are_raw_and_one_per_sparse_layer(name) -> None:
    model, reference = pair(name)
    seen: list[Tensor] = []
    for _, block in tiny_models.blocks(model):
        gate_of(block).register_forward_hook(lambda m, args, out: seen.append(args[0].detach()))
    logits = model(**tiny_models.inputs(model)).router_logits
    expected = reference(**tiny_models.inputs(model)).router_logits
    assert len(logits) == len(expected) == len(seen) == 2
    for found, ref, x, (_, block) in zip(
        logits, expected, seen, tiny_models.blocks(model), strict=True
    ):
        assert found.shape == (14, 8)
        assert_close(found, ref, FP32)
        bias = getattr(gate_of(block), "bias", None)
        plain = nn.functional.linear(x.reshape(14, -1), gate_of(block).weight, bias)
        assert_close(found, plain, 1e-6)
        assert (found.sum(-1) - 1).abs().min() > 1e-3


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", WITH_AUX_LOSS)
def test_auxiliary_loss_and_its_own_gradient(name, masked) -> None:
    model, reference = pair(name)
    batch = tiny_models.inputs(model, 2, 10)
    batch["attention_mask"] = torch.ones(2, 10, dtype=torch.long)
    if masked:
        batch["attention_mask"][1, 4:] = 0
    losses, grads = [], []
    for each in (model, reference):
        aux_loss = each(**batch).aux_loss
        weights = [gate_of(block).weight for _, block in tiny_models.blocks(each)]
        losses.append(aux_loss)
        grads.append(torch.autograd.grad(aux_loss, weights))
    assert_close(losses[0], losses[1], 1e-6)
    for mine, ref in zip(*grads, strict=True):
        assert ref.any()
        assert_close(mine, ref, FP32)


@pytest.mark.parametrize("name", EIGHT)
def test_padding_does_not_reach_real_tokens(name) -> None:
    model, _ = pair(name)
    batch = tiny_models.inputs(model, 2, 10)
    del batch["labels"]
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 4:] = 0
    changed = batch["input_ids"].clone()
    changed[1, 4:] = 7
    with torch.no_grad():
        a = model(**batch, attention_mask=mask).logits
        b = model(input_ids=changed, attention_mask=mask).logits
    assert_close(a[mask.bool()], b[mask.bool()], 1e-6)
    assert rel_err(a[~mask.bool()], b[~mask.bool()]) > 0.1


def outcome(model: nn.Module, **kwargs: Any) -> Any:
    """What generate returns, or the type of what it raises."""
    ids = tiny_models.inputs(model, 2, 5)["input_ids"]
    try:
        return model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, **kwargs)
    except (RuntimeError, IndexError, ValueError) as error:
        return type(error)


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_generate_does_what_it_did(name, logits) -> None:
    mine, ref = (outcome(m.eval(), output_router_logits=logits) for m in pair(name))
    assert type(mine) is type(ref)
    assert torch.equal(mine, ref) if isinstance(ref, Tensor) else mine is ref
    assert logits or isinstance(ref, Tensor)


# --- shared experts -------------------------------------------------------------------------------


def shared_output(block: nn.Module, x: Tensor) -> Tensor:
    """What the shared expert contributes, from transformers' own modules."""
    if "shared_expert_gate" in block._modules:
        return torch.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)
    return block.shared_experts(x)


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3", "glm4_moe"])
def test_without_routed_experts_the_shared_one_is_left(name) -> None:
    block, _ = blocks(name)
    with torch.no_grad():
        block.experts.down_proj.zero_()
        x = tiny_models.hidden(block, 2, 7)
        assert_close(block(x), shared_output(block, x), 1e-6)


def test_a_closed_shared_gate_lets_nothing_through() -> None:
    block, _ = blocks("qwen2_moe")
    with torch.no_grad():
        block.experts.down_proj.zero_()
        block.shared_expert_gate.weight.fill_(-100.0)
        x = torch.ones(1, 3, tiny_models.SIZES["hidden_size"])
        assert block.shared_expert(x).norm() > 0.1
        assert block(x).norm() < 1e-6


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_scaling_factor_scales_the_routed_part_only(name) -> None:
    parts = []
    for factor in (2.5, 5.0):
        block, _ = blocks(name, routed_scaling_factor=factor)
        x = tiny_models.hidden(block, 2, 7)
        with torch.no_grad():
            parts.append((block(x) - block.shared_experts(x), block.shared_experts(x)))
    assert_close(parts[1][0], 2 * parts[0][0], FP32)
    assert_bits(parts[1][1], parts[0][1])


def test_parts_of_a_block_stay_modules() -> None:
    """Replacing the shared expert or its gate on the instance acts: nothing reads their weights."""
    block, reference = blocks("qwen2_moe")
    for each in (block, reference):
        torch.manual_seed(1)
        each.shared_expert = nn.Linear(32, 32)
        each.shared_expert_gate = nn.Sequential(nn.Linear(32, 1), nn.Tanh())
    x = tiny_models.hidden(reference, 2, 7)
    assert_parity(run_block(block, x), run_block(reference, x), FP32)


# --- activations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden_act", ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu"])
@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral", "deepseek_v3"])
def test_configured_activation(name, hidden_act) -> None:
    block, reference = blocks(name, hidden_act=hidden_act)
    x = tiny_models.hidden(reference, 2, 7)
    assert_parity(run_block(block, x), run_block(reference, x), FP32)


class Cubic(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x**3 / 10


def hooked_silu() -> nn.Module:
    act = nn.SiLU()
    act.register_forward_hook(lambda m, args, out: 2 * out)
    return act


@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh, Cubic, hooked_silu], ids=lambda a: a.__name__)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_activation_replaced_on_the_instance_is_followed(act, when) -> None:
    reference = tiny_models.build("qwen3_moe")
    model = copy.deepcopy(reference)
    if when == "after":
        patch_model(model)
    for each in (model, reference):
        tiny_models.blocks(each)[0][1].experts.act_fn = act()
    if when == "before":
        patch_model(model)
    block, ref = (tiny_models.blocks(each)[0][1] for each in (model, reference))
    x = tiny_models.hidden(ref, 2, 7)
    assert_parity(run_block(block, x), run_block(ref, x), FP32)


def test_a_gate_replaced_on_the_instance_is_followed() -> None:
    block, reference = blocks("gpt_oss")
    for each in (block, reference):
        each.experts._apply_gate = lambda h: torch.tanh(h[..., ::2]) * h[..., 1::2]
    x = tiny_models.hidden(reference, 2, 7)
    assert_parity(run_block(block, x), run_block(reference, x), FP32)


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_a_clamp_limit_changed_after_patching_is_followed(limit) -> None:
    block, reference = blocks("gpt_oss")
    for each in (block, reference):
        each.experts.limit = limit
    x = tiny_models.hidden(reference, 2, 7)
    assert_parity(run_block(block, x), run_block(reference, x), FP32)


# --- what trains ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", list(product((False, True), repeat=4)), ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_requires_grad_of_input_gate_and_experts(name, wanted) -> None:
    """Set after patching: None exactly where frozen, elsewhere as unpatched."""
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
        each.activation_checkpointing_enable({"use_reentrant": reentrant})
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
    """No dtype error, values within bf16's reach of fp64, every gradient in its leaf's dtype."""
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
    """As close to fp64 as the untouched model under the same autocast."""
    model, reference = pair(name)
    wide = copy.deepcopy(reference).double()
    batch = tiny_models.inputs(model, 4, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        mine, eager = model(**batch).logits, reference(**batch).logits
    bf16_rule(mine, eager, wide(**batch).logits, factor=2.0)


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
    """A zero gate is all ties: ours takes experts 0 and 1, the option what torch.topk takes."""
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
