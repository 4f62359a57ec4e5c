"""Patched blocks and models, one public bug report at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_patch import patch_model
from tests.support import tiny_models
from tests.support.numerics import FP32, assert_bits, assert_close, rel_err
from tests.support.pairs import EIGHT, WITH_AUX_LOSS, blocks, gate_of, pair
from tests.support.parity import assert_parity, run_block

# --- recorded router logits -----------------------------------------------------------------------


@pytest.mark.parametrize("name", EIGHT)
def test_recorded_router_logits_are_raw_and_one_per_sparse_layer(name) -> None:
    model, reference = pair(name)
    seen: list[Tensor] = []
    for _, block in tiny_models.blocks(model):
        gate_of(block).register_forward_hook(lambda m, args, out: seen.append(args[0].detach()))
    out, wanted = model(**tiny_models.inputs(model)), reference(**tiny_models.inputs(model))
    assert ("router_logits" in out) == ("router_logits" in wanted)
    if "router_logits" not in wanted:
        return  # older releases record none in some of these families
    logits, expected = out.router_logits, wanted.router_logits
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
    """Return the output of generate, or the type of the error that it raises."""
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
    """Return the shared expert's contribution, by transformers' own modules."""
    if "shared_expert_gate" in block._modules:
        return torch.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)
    return block.shared_experts(x)


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_next", "deepseek_v3", "glm4_moe"])
def test_without_routed_experts_the_shared_one_is_left(name) -> None:
    block, _ = blocks(name)
    with torch.no_grad():
        block.experts.down_proj.zero_()
        x = tiny_models.hidden(block, 2, 7)
        assert_close(block(x), shared_output(block, x), 1e-6)


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_next"])
def test_a_closed_shared_gate_lets_nothing_through(name) -> None:
    block, _ = blocks(name)
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
    """Follow a replaced shared expert or gate: no code reads their weights directly."""
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


def pre_hooked_silu() -> nn.Module:
    act = nn.SiLU()
    act.register_forward_pre_hook(lambda m, args: (2 * args[0],))
    return act


def backward_hooked_silu() -> nn.Module:
    act = nn.SiLU()
    act.register_full_backward_hook(lambda m, grads_in, grads_out: (2 * grads_in[0],))
    return act


@pytest.mark.parametrize(
    "act",
    [nn.ReLU, nn.Tanh, Cubic, hooked_silu, pre_hooked_silu, backward_hooked_silu],
    ids=lambda a: a.__name__,
)
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
