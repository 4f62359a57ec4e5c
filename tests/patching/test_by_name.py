"""experts_implementation="moe_patch" without a patch: our operator, checked once a class."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

import moe_patch.integrations.transformers  # noqa: F401
from moe_patch import UnsupportedModelError, patch_model, patch_report, reference, unpatch_model
from moe_patch.patching import by_name, selfcheck
from moe_patch.patching.blockcheck import twins
from tests.support import tiny_models
from tests.support.adapters import EXPERTS, lora_config
from tests.support.numerics import FP32, assert_bits, assert_close
from tests.support.snapshots import assert_unchanged, logits, snapshot
from tests.support.toy_family import ToyModel
from tests.support.trace import assert_tier, executed

NAME = "moe_patch"


@pytest.fixture
def checked(monkeypatch):
    """Set of the kinds that have passed the self-check in this test."""
    monkeypatch.setattr(by_name, "_passed", set())
    return by_name._passed


def test_the_import_registers_the_name(monkeypatch):
    monkeypatch.delitem(ExpertsInterface._global_mapping, NAME)
    monkeypatch.delitem(sys.modules, "moe_patch.integrations.transformers")
    assert NAME not in ALL_EXPERTS_FUNCTIONS
    importlib.import_module("moe_patch.integrations.transformers")
    assert NAME in ALL_EXPERTS_FUNCTIONS


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_operator_runs_and_gives_what_transformers_gives(model_type):
    model = tiny_models.build(model_type)
    batch = tiny_models.inputs(model)
    tiny_models.loss(model(**batch)).backward()
    expected = logits(model, batch), [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    model.set_experts_implementation(NAME)
    logits(model, batch)  # the self-check runs transformers' own code in the first call
    ran = executed(lambda: tiny_models.loss(model(**batch)).backward())
    assert_tier("experts", model, ran)
    assert_close(logits(model, batch), expected[0], FP32)
    for parameter, grad in zip(model.parameters(), expected[1], strict=True):
        if grad is not None:
            assert_close(parameter.grad, grad, FP32)
    assert not patch_report(model)


def test_from_pretrained_copies_and_pickles_take_the_name(tmp_path):
    tiny_models.build("qwen3_moe").save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation=NAME)
    batch = tiny_models.inputs(model)
    expected = logits(model, batch)
    assert_close(expected, logits(plain, batch), FP32)
    other = copy.deepcopy(model)
    assert_bits(logits(other, batch), expected)
    assert_tier("experts", other, executed(lambda: logits(other, batch)))
    experts = tiny_models.blocks(model)[0][1].experts
    x, ids, weights = torch.randn(3, 32), torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
    assert_bits(pickle.loads(pickle.dumps(experts))(x, ids, weights), experts(x, ids, weights))
    assert not any("moe_patch" in key for key in model.state_dict())


def test_a_class_is_checked_once(checked, monkeypatch):
    calls = []
    check = selfcheck.check
    monkeypatch.setattr(selfcheck, "check", lambda *args: calls.append(1) or check(*args))
    for _ in range(2):
        model = tiny_models.build("qwen3_moe")
        model.set_experts_implementation(NAME)
        for _ in range(2):
            logits(model, tiny_models.inputs(model))
    assert len(calls) == len(checked) == 1


def test_a_class_that_computes_otherwise_is_refused_by_name(checked, monkeypatch):
    """Raise an error if a class's own forward computes something other than the operator."""
    model = ToyModel()
    model.config._experts_implementation_internal = NAME
    cls = type(model.layers[0].experts)
    plain = cls.forward.__wrapped__

    def doubled(*args):
        return 2 * plain(*args)

    monkeypatch.setattr(cls.forward, "__wrapped__", doubled)
    with pytest.raises(
        UnsupportedModelError, match=r"\"moe_patch\": ToyExperts: self-check.*differs"
    ):
        model(torch.randn(1, 3, 8))
    assert not checked
    monkeypatch.undo()
    assert model(torch.randn(1, 3, 8)).logits.isfinite().all()


def test_weights_that_the_operator_does_not_read_are_refused_by_name():
    model = tiny_models.build("qwen3_moe")
    model.set_experts_implementation(NAME)
    experts = tiny_models.blocks(model)[0][1].experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"Qwen3MoeExperts.*int8.*grouped_mm"):
        logits(model, tiny_models.inputs(model))


def test_adapters_without_a_patch(checked):
    """Check the class on its stored weights, although PEFT parametrizes them during a call."""
    from peft import get_peft_model

    config = lora_config(EXPERTS)
    torch.manual_seed(0)
    plain = get_peft_model(tiny_models.build("qwen3_moe"), config)
    torch.manual_seed(0)
    ours = get_peft_model(tiny_models.build("qwen3_moe"), config)
    batch = tiny_models.inputs(plain.base_model.model)
    ours.base_model.model.set_experts_implementation(NAME)
    logits(ours, batch)
    assert len(checked) == 1
    for model in (plain, ours):
        tiny_models.loss(model(**batch)).backward()
    assert_close(logits(ours, batch), logits(plain, batch), FP32)
    named = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            assert_close(parameter.grad, named[name].grad, FP32, name)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_moe"])
def test_patch_model_adopts_and_undo_leaves_the_name(model_type):
    model = tiny_models.build(model_type)
    batch = tiny_models.inputs(model)
    plain = logits(model, batch)
    model.set_experts_implementation(NAME)
    expected = logits(model, batch)
    before = snapshot(model)
    patch_model(model)
    assert {(row.tier, row.self_check) for row in patch_report(model)} == {("full", "passed")}
    assert_close(logits(model, batch), plain, FP32)
    assert_tier("full", model, executed(lambda: logits(model, batch)))
    with reference(model):
        assert_tier("refused", model, executed(lambda: logits(model, batch)))
    unpatch_model(model)
    assert_unchanged(before, snapshot(model))
    assert_bits(logits(model, batch), expected)
    assert_tier("experts", model, executed(lambda: logits(model, batch)))


@pytest.mark.parametrize("patched", [False, True], ids=["by name", "patched"])
def test_the_self_check_of_a_block_compares_with_transformers(patched):
    """Run copies that never reach this library again through the registry."""
    model = tiny_models.build("qwen2_moe")
    if patched:
        patch_model(model)
    else:
        model.set_experts_implementation(NAME)
    block = tiny_models.blocks(model)[0][1]
    copied = twins(block)[block]
    x = torch.randn(1, 5, model.config.hidden_size)
    assert_tier("refused", model, executed(lambda: copied(x)))
    assert block.experts.config._experts_implementation == NAME


def test_a_compiled_block_takes_the_name():
    model = tiny_models.build("qwen3_moe")
    model.set_experts_implementation(NAME)
    block = tiny_models.blocks(model)[0][1]
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    x = torch.randn(1, 5, model.config.hidden_size)
    assert_close(compiled(x), block(x), FP32)
