"""A user's forward on a class or in a subclass runs, or the block is refused by name."""

from __future__ import annotations

import functools

import pytest
import torch

from moe_patch import UnsupportedModelError, patch_model, patch_report
from tests.support import tiny_models
from tests.support.numerics import FP32, assert_close
from tests.support.snapshots import assert_unchanged, logits, snapshot


def noise_in_training(original, wrapped=False):
    """Wrap a forward with noise in train mode, which no check in eval mode can detect."""

    def noisy(self, hidden_states, *args, **kwargs):
        if self.training:
            hidden_states = hidden_states + torch.randn_like(hidden_states)
        return original(self, hidden_states, *args, **kwargs)

    return functools.wraps(original)(noisy) if wrapped else noisy


def module_of(block, role):
    return {"block": block, "router": block.gate, "experts": block.experts}[role]


@pytest.mark.routers
@pytest.mark.parametrize("where", ["subclass", "class", "class, with functools.wraps"])
@pytest.mark.parametrize("role", ["block", "router", "experts"])
@pytest.mark.parametrize("model_type", ["qwen2_moe", "glm4_moe"])
def test_a_forward_of_the_user_is_not_overridden(model_type, role, where, monkeypatch):
    """Run a forward that the user has put on the class or in a subclass."""
    model = tiny_models.build(model_type).train()
    module = module_of(tiny_models.blocks(model)[1][1], role)
    own = type(module)
    forward = noise_in_training(own.forward, wrapped="wraps" in where)
    if where == "subclass":
        module.__class__ = type("Noisy", (own,), {"forward": forward})
    else:
        monkeypatch.setattr(own, "forward", forward)
    batch = tiny_models.inputs(model)
    torch.manual_seed(3)
    expected, before = logits(model, batch), snapshot(model)
    said = rf"layers\.\d\.mlp.*\({type(module).__name__}\) runs .*accepted: {own.__name__} as"
    with pytest.raises(UnsupportedModelError, match=said):
        patch_model(model)
    assert_unchanged(before, snapshot(model))
    with pytest.warns(UserWarning, match=said):
        patch_model(model, strict=False)
    assert patch_report(model)[-1].tier == "refused"
    torch.manual_seed(3)
    assert_close(logits(model, batch), expected, FP32)


def test_a_block_whose_forward_stays_its_own_may_be_the_users():
    """Run the subclass of a block without a shared expert: only router and experts are bound."""
    model = tiny_models.build("qwen3_moe").train()
    block = tiny_models.blocks(model)[1][1]
    forward = noise_in_training(type(block).forward)
    block.__class__ = type("Noisy", (type(block),), {"forward": forward})
    batch = tiny_models.inputs(model)
    torch.manual_seed(3)
    expected = logits(model, batch)
    patch_model(model)
    assert [row.tier for row in patch_report(model)] == ["full", "full"]
    torch.manual_seed(3)
    assert_close(logits(model, batch), expected, FP32)


def test_experts_that_two_blocks_share_are_named():
    model = tiny_models.build("qwen3_moe")
    (_, first), (_, second) = tiny_models.blocks(model)
    second.experts = first.experts
    with pytest.raises(
        UnsupportedModelError, match=r"layers\.1\.mlp: its experts .* belong to another"
    ):
        patch_model(model)
    batch = tiny_models.inputs(model)
    expected = logits(model, batch)
    patch_model(model, exclude="*layers.1*")
    assert_close(logits(model, batch), expected, FP32)
