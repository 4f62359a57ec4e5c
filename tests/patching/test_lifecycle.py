"""Patch and undo: the model comes back bit for bit, and nothing else was touched."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from torch import nn

from moe_patch import UnsupportedModelError, patch_model, patch_report, unpatch_model
from tests.support import tiny_models
from tests.support.adapters import FAMILIES
from tests.support.numerics import FP32, assert_bits, assert_close
from tests.support.snapshots import (
    assert_same_attributes,
    assert_unchanged,
    class_attributes,
    experts_setting,
    logits,
    module_globals,
    snapshot,
    tensors,
)


def router_of(block: nn.Module) -> nn.Module:
    return block.router if "router" in block._modules else block.gate


@pytest.fixture(params=["qwen2_moe", "qwen3_moe"])
def model(request):
    """One family with a bound block (shared expert), one with router and experts alone."""
    return tiny_models.build(request.param)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_undo_is_bit_exact(model_type):
    model = tiny_models.build(model_type)
    batch = tiny_models.inputs(model)
    out = logits(model, batch)
    before, weights = snapshot(model), tensors(model)
    rng = torch.get_rng_state()
    config = copy.deepcopy(vars(model.config))

    patch_model(model)

    assert torch.equal(torch.get_rng_state(), rng), "the self-check drew from the global generator"
    assert tensors(model) == weights
    assert vars(model.config) == config
    assert [type(m).__name__ for m in model.modules()] == [s.cls.__name__ for s in before.values()]
    assert all(p.grad is None for p in model.parameters())
    logits(model, batch)

    unpatch_model(model)

    assert_unchanged(before, snapshot(model))
    assert tensors(model) == weights
    assert_bits(logits(model, batch), out)


def test_nothing_is_changed_process_wide(model):
    from transformers.integrations import moe

    patch_model(tiny_models.build("mixtral"))  # the one registry name is there from now on
    names = [type(model).__module__, "transformers.integrations.moe", "torch.nn.modules.module"]
    classes, modules = class_attributes(model), module_globals(*names)
    implementations = dict(moe.ALL_EXPERTS_FUNCTIONS._global_mapping)
    patch_model(model)
    assert_same_attributes(classes, class_attributes(model))
    assert_same_attributes(modules, module_globals(*names))
    assert dict(moe.ALL_EXPERTS_FUNCTIONS._global_mapping) == implementations
    assert [
        name for name, fn in implementations.items() if fn.__module__.startswith("moe_patch")
    ] == ["moe_patch"]


def test_another_model_with_the_same_config_object_is_untouched(model):
    other = type(model)(model.config)
    assert other.config is model.config
    batch = tiny_models.inputs(other)
    out, before = logits(other, batch), snapshot(other)
    patch_model(model)
    assert_unchanged(before, snapshot(other))
    assert_bits(logits(other, batch), out)
    assert not patch_report(other)


def test_sibling_in_a_composite_config_is_unchanged():
    parent_class = type(tiny_models.config("qwen3_moe"))

    class CompositeConfig(parent_class):
        model_type = "composite"
        sub_configs = {"text_config": parent_class, "draft_config": parent_class}

    text, draft = tiny_models.build("qwen3_moe"), tiny_models.build("qwen3_moe", seed=1)
    composite = CompositeConfig()
    composite.text_config, composite.draft_config = text.config, draft.config
    text.config.parent, draft.config.parent = None, None
    pair = nn.ModuleDict({"text": text, "draft": draft})
    pair.config = composite
    before, settings = snapshot(draft), experts_setting(draft)
    patch_model(pair, include="text.*")
    assert_unchanged(before, snapshot(draft))
    assert experts_setting(draft) == settings
    assert composite._experts_implementation != "moe_patch"
    assert all(row.path.startswith("text.") for row in patch_report(pair))


def test_weights_and_attributes_are_read_at_call_time(model):
    other = tiny_models.build(model.config.model_type, seed=4)
    patch_model(model)
    model.load_state_dict(other.state_dict())
    for each in (model, other):
        each.double()
        for _, block in tiny_models.blocks(each):
            block.gate.norm_topk_prob = not block.gate.norm_topk_prob
            block.gate.top_k = 3
            block.experts.act_fn = nn.ReLU()
    batch = tiny_models.inputs(model)
    assert_close(logits(model, batch), logits(other, batch), FP32)


def test_undo_restores_the_current_experts_setting(model):
    patch_model(model)
    model.set_experts_implementation("grouped_mm")
    experts = [block.experts for _, block in tiny_models.blocks(model)]
    assert {e.config._experts_implementation for e in experts} == {"moe_patch"}, (
        "the patch no longer acts"
    )
    unpatch_model(model)
    assert all(e.config is model.config for e in experts)
    assert {e.config._experts_implementation for e in experts} == {"grouped_mm"}


def test_undo_after_a_hook_was_added_and_removed(model):
    batch = tiny_models.inputs(model)
    out = logits(model, batch)
    patch_model(model)
    fast = logits(model, batch)
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook())
    assert_bits(logits(model, batch), fast)
    unpatch_model(model)
    hooked = {path: s for path, s in snapshot(model).items() if "_moe_patch" in s.entries}
    assert not hooked
    for module in model.modules():
        assert module._old_forward.__func__ is type(module).forward
        assert module._old_forward.__self__ is module
    assert_bits(logits(model, batch), out)


def test_patch_behind_hooks_and_undo(model):
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook())
    batch = tiny_models.inputs(model)
    out, before = logits(model, batch), snapshot(model)
    patch_model(model)
    assert {row.self_check for row in patch_report(model)} == {
        "skipped: an accelerate hook moves the weights"
    }
    assert {row.tier for row in patch_report(model)} == {"full"}
    calls = []
    for _, block in tiny_models.blocks(model):
        block.experts._hf_hook.pre_forward = lambda module, *args, **kw: (
            calls.append(module),
            (args, kw),
        )[1]
    logits(model, batch)
    assert len(calls) == 2, "the experts' hook does not run any more"
    for _, block in tiny_models.blocks(model):
        del block.experts._hf_hook.pre_forward
    unpatch_model(model)
    assert_unchanged(before, snapshot(model))
    assert_bits(logits(model, batch), out)


def test_hook_removed_while_patched(model):
    batch = tiny_models.inputs(model)
    out = logits(model, batch)
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook())
    patch_model(model)
    fast = logits(model, batch)
    remove_hook_from_module(model, recurse=True)
    assert_bits(logits(model, batch), fast)
    unpatch_model(model)
    assert_bits(logits(model, batch), out)
    assert not any(
        "_moe_patch" in m.__dict__ or "_old_forward" in m.__dict__ for m in model.modules()
    )
    patch_model(
        model
    )  # accelerate left each module's own bound method behind, which is not foreign
    assert_bits(logits(model, batch), fast)


def foreign_forward(module, *args, **kwargs):
    return type(module).forward(module, *args, **kwargs)


@pytest.mark.parametrize("where", ["router", "block", "router behind a hook"])
def test_forward_bound_by_another_library_is_refused_by_name(where):
    model = tiny_models.build("qwen2_moe")
    block = tiny_models.blocks(model)[1][1]
    module = block if where == "block" else router_of(block)
    module.forward = functools.partial(foreign_forward, module)
    if "hook" in where:
        add_hook_to_module(module, AlignDevicesHook())
    before = snapshot(model)
    with pytest.raises(
        UnsupportedModelError,
        match=rf"{type(module).__name__}.*{__name__}\.foreign_forward.*, or leave moe_patch out",
    ):
        patch_model(model)
    assert_unchanged(before, snapshot(model))


def test_a_wrapper_put_around_our_forward_survives_undo(model):
    batch = tiny_models.inputs(model)
    out = logits(model, batch)
    patch_model(model)
    fast = logits(model, batch)
    router = tiny_models.blocks(model)[1][1].gate
    inner, calls = router.forward, []

    def wrapper(*args):
        calls.append(args)
        return inner(*args)

    router.forward = wrapper
    assert_bits(logits(patch_model(model), batch), fast)
    assert calls
    unpatch_model(model)
    assert router.forward is wrapper
    assert_bits(logits(model, batch), out)
    assert len(calls) == 2
