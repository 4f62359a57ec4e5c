"""Models that cannot be patched: refused by name and unchanged, or reported if not strict."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from moe_patch import (
    UnsupportedModelError,
    UnsupportedOptionError,
    patch_model,
    patch_report,
    unpatch_model,
)
from tests.support import tiny_models, window
from tests.support.adapters import UP, adapt, lora_config
from tests.support.numerics import FP32, assert_close
from tests.support.snapshots import assert_unchanged, logits, snapshot


@pytest.fixture
def model():
    return tiny_models.build("qwen2_moe")


def borrowed_forward(module, *args, **kwargs):
    return type(module).forward(module, *args, **kwargs)


def break_router(model):
    model.model.layers[1].mlp.gate.forward = functools.partial(
        borrowed_forward, model.model.layers[1].mlp.gate
    )


class Called:
    """A callable object in place of a forward: it has a class but no name."""

    def __call__(self, *args, **kwargs):
        raise AssertionError("not to be called")


def break_router_with_an_object(model):
    model.model.layers[1].mlp.gate.forward = Called()


def break_attribute(model):
    del model.model.layers[1].mlp.gate.norm_topk_prob


def break_weight(model):
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach()[:, :, :-1].contiguous())


def break_values(model):
    """Make a class compute other values than its entry; only the self-check detects this."""
    gate = model.model.layers[1].mlp.gate
    gate.__class__ = type("DoublingRouter", (type(gate),), {"factor": 2})


ROUTER_FORWARD = Qwen2MoeTopKRouter.forward


def routed_times_a_factor(self, hidden_states):
    scores, weights, ids = ROUTER_FORWARD(self, hidden_states)
    return scores, getattr(self, "factor", 1) * weights, ids


# As if transformers had changed it.
routed_times_a_factor.__module__ = Qwen2MoeTopKRouter.__module__


@pytest.fixture(autouse=True)
def router_with_a_factor(monkeypatch):
    monkeypatch.setattr(Qwen2MoeTopKRouter, "forward", routed_times_a_factor)


@pytest.mark.parametrize(
    "break_it",
    [break_router, break_router_with_an_object, break_attribute, break_weight, break_values],
)
def test_failure_leaves_the_model_as_it_was(model, break_it):
    logits(model, tiny_models.inputs(model))
    break_it(model)
    before, rng = snapshot(model), torch.get_rng_state()
    with pytest.raises((UnsupportedModelError, RuntimeError)) as raised:
        patch_model(model)
    assert_unchanged(before, snapshot(model))
    assert torch.equal(torch.get_rng_state(), rng)
    assert patch_report(model) == []
    if break_it is not break_weight:
        assert isinstance(raised.value, UnsupportedModelError)
        assert "Router" in str(raised.value) or "layers.1.mlp" in str(raised.value)


@pytest.mark.parametrize(
    "options",
    [{"backend": "triton"}, {"backend": "cuda"}, {"stric": True}, {"fuse_lora": "require"}],
    ids=str,
)
def test_option_that_cannot_hold_is_an_error_and_changes_nothing(options):
    model = adapt(tiny_models.build("gpt_oss"), lora_config([UP, "experts.gate_up_proj_bias"]))
    before = snapshot(model)
    with pytest.raises(UnsupportedOptionError):
        patch_model(model, **options)
    assert_unchanged(before, snapshot(model))


def test_not_strict_warns_once_and_reports(model):
    break_router(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch_model(model, strict=False)
    (warning,) = [w for w in caught if "moe_patch" in str(w.message)]
    assert "1 of 2 MoE blocks" in str(warning.message)
    assert "borrowed_forward" in str(warning.message)
    assert warning.filename == __file__
    assert [row.tier for row in patch_report(model)] == ["full", "refused"]
    assert isinstance(model.model.layers[1].mlp.gate.forward, functools.partial)
    unpatch_model(model)
    assert patch_report(model) == []


def test_not_strict_leaves_out_what_the_self_check_refuses(model):
    expected = logits(model, tiny_models.inputs(model))
    break_values(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch_model(model, strict=False)
    (warning,) = [w for w in caught if "moe_patch" in str(w.message)]
    assert "1 of 2 MoE blocks" in str(warning.message)
    assert "self-check: routing weights" in str(warning.message)
    assert warning.filename == __file__
    assert [row.tier for row in patch_report(model)] == ["full", "refused"]
    assert "differs from transformers" in patch_report(model)[1].reason
    doubled = logits(model, tiny_models.inputs(model))
    unpatch_model(model)
    assert_close(doubled, logits(model, tiny_models.inputs(model)), FP32)
    assert not torch.equal(doubled, expected)


def test_a_block_refused_once_is_patched_when_the_reason_is_gone(model):
    expected = logits(model, tiny_models.inputs(model))
    before = snapshot(model)
    break_router(model)
    with pytest.warns(UserWarning, match="borrowed_forward"):
        patch_model(model, strict=False)
    del model.model.layers[1].mlp.gate.forward
    patch_model(model, strict=False)
    assert {row.tier for row in patch_report(model)} == {"full"}
    roles = [
        m._moe_patch.role for m in model.model.layers[1].mlp.modules() if "_moe_patch" in m.__dict__
    ]
    assert sorted(roles) == ["block", "experts", "router"]
    assert_close(logits(model, tiny_models.inputs(model)), expected, FP32)
    unpatch_model(model)
    assert_unchanged(before, snapshot(model))


def test_dense_model_is_refused_by_name():

    sizes = {
        name: tiny_models.SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, intermediate_size=16))
    before = snapshot(model)
    accepted = "accepted: the model types that `moe-patch families` lists$"
    wanted = rf"LlamaForCausalLM: no MoE block found; {accepted}"
    for options in ({}, {"exclude": "model.layers.0.*"}):  # the model is wrong, not the pattern
        with pytest.raises(UnsupportedModelError, match=wanted):
            patch_model(model, **options)
    assert_unchanged(before, snapshot(model))


class RemoteExpert(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        return self.proj(x)


class RemoteBlock(nn.Module):
    """One small MLP per expert in a ModuleList, as in remote-code models of 2023."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(RemoteExpert() for _ in range(4))


def test_module_list_experts_are_refused_with_the_reason():
    model = nn.ModuleDict({"mlp": RemoteBlock()})
    before = snapshot(model)
    with pytest.raises(
        UnsupportedModelError, match=r"mlp: .*RemoteBlock keeps its experts as a ModuleList"
    ):
        patch_model(model)
    assert_unchanged(before, snapshot(model))
    with pytest.warns(UserWarning, match="ModuleList"):
        patch_model(model, strict=False)
    (row,) = patch_report(model)
    assert (row.path, row.tier) == ("mlp", "refused")
    assert "ModuleList" in row.reason
    unpatch_model(model)
    assert_unchanged(before, snapshot(model))


def store_experts_in(model, dtype):
    for _, block in tiny_models.blocks(model):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(block.experts, name).detach().to(dtype)
            setattr(block.experts, name, nn.Parameter(weight, requires_grad=False))


@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
def test_packed_or_8_bit_weights_are_refused_by_name(model, dtype, self_check):
    before = snapshot(model)
    patch_model(model)
    store_experts_in(model, dtype)
    with pytest.raises(UnsupportedModelError, match=rf"Qwen2MoeExperts.gate_up_proj.*{dtype}"):
        model(**tiny_models.inputs(model))
    unpatch_model(model)
    with pytest.raises(UnsupportedModelError, match=rf"layers.0.mlp.experts.*stored in {dtype}"):
        patch_model(model, self_check=self_check)
    assert before.keys() == snapshot(model).keys()
    assert patch_report(model) == []


def test_a_block_refused_later_is_given_back_to_transformers(model):
    batch = tiny_models.inputs(model)
    gate = model.model.layers[1].mlp.gate
    flag = gate.norm_topk_prob
    break_attribute(model)
    gate.norm_topk_prob = flag  # as below: last in the order of attributes
    expected, before = logits(model, batch), snapshot(model)
    patch_model(model, strict=False)
    break_attribute(model)
    with pytest.warns(UserWarning, match="no attribute 'norm_topk_prob'"):
        patch_model(model, strict=False)
    assert [row.tier for row in patch_report(model)] == ["full", "refused"]
    gate.norm_topk_prob = flag
    assert_close(logits(model, batch), expected, FP32)
    assert "forward" not in gate.__dict__
    unpatch_model(model)
    assert_unchanged(before, snapshot(model))


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
def test_one_8_bit_projection_is_enough_to_refuse(model, name, dtype):
    experts = model.model.layers[1].mlp.experts
    weight = getattr(experts, name).detach().to(dtype)
    setattr(experts, name, nn.Parameter(weight, requires_grad=False))
    with pytest.warns(UserWarning, match=rf"layers.1.mlp.experts.*stored in {dtype}"):
        patch_model(model, strict=False)
    assert [row.tier for row in patch_report(model)] == ["full", "refused"]


def test_not_strict_a_model_without_blocks_gets_one_warning_and_a_row():
    dense = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, vocab_size=99)
    )
    before = snapshot(dense)
    with pytest.warns(UserWarning, match="no MoE block found") as caught:
        assert patch_model(dense, strict=False) is dense
    assert len(caught) == 1
    (row,) = patch_report(dense)
    assert row.tier == "refused"
    assert "LlamaForCausalLM" in row.reason
    unpatch_model(dense)
    with pytest.raises(UnsupportedModelError, match="no MoE block found"):
        patch_model(dense)
    assert_unchanged(before, snapshot(dense))


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "triton"},
        pytest.param(
            {"fuse_lora": "require"},
            marks=window.single_expert,
        ),
    ],
)
def test_not_strict_an_option_that_cannot_hold_gets_one_warning_and_rows(options):
    model = tiny_models.build("qwen3_moe", **tiny_models.with_experts("qwen3_moe", 1, 1))
    if "fuse_lora" in options:  # PEFT takes a single expert for a plain matrix
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        model = get_peft_model(model, LoraConfig(r=2, target_parameters=targets))
    with pytest.raises(UnsupportedOptionError):
        patch_model(model, **options)
    batch = tiny_models.inputs(model)
    expected = logits(model, batch)
    with pytest.warns(UserWarning, match="leaves 2 of 2 MoE blocks") as caught:
        patch_model(model, strict=False, **options)
    assert len(caught) == 1
    assert [row.tier for row in patch_report(model)] == ["refused"] * 2
    assert torch.equal(logits(model, batch), expected)
