"""Patch, undo, copy and save: the model comes back bit for bit, and copies stand on their own."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from safetensors.torch import load_file
from torch import nn

import moe_patch
from moe_patch import UnsupportedModelError, patch_model, patch_report, patched, unpatch_model
from tests import tiny_models
from tests.numerics import assert_bits
from tests.snapshots import (
    assert_same_attributes,
    assert_unchanged,
    class_attributes,
    logits,
    module_globals,
    snapshot,
    tensors,
)

ROOT = Path(moe_patch.__file__).parents[1]
FAMILIES = (
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
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
    before, settings = snapshot(draft), draft.get_experts_implementation()
    patch_model(pair, include="text.*")
    assert_unchanged(before, snapshot(draft))
    assert draft.get_experts_implementation() == settings
    assert composite._experts_implementation != "moe_patch"
    assert all(row.path.startswith("text.") for row in patch_report(pair))


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
    )  # accelerate left each module's own bound method behind; that is nobody else's
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
        UnsupportedModelError, match=rf"{type(module).__name__}.*{__name__}\.foreign_forward"
    ):
        patch_model(model)
    assert_unchanged(before, snapshot(model))


def test_deepcopy_stands_on_its_own(model):
    batch = tiny_models.inputs(model)
    patch_model(model)
    out = logits(model, batch)
    twin = copy.deepcopy(model)
    assert_bits(logits(twin, batch), out)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.fill_(9.0)
    assert_bits(logits(model, batch), out)
    assert not torch.equal(logits(twin, batch), out)
    unpatch_model(twin)
    assert len(patch_report(model)) == 2
    assert not patch_report(twin)
    assert all(block.experts.config is twin.config for _, block in tiny_models.blocks(twin))
    assert_bits(logits(model, batch), out)


def test_torch_save_round_trip(model, tmp_path):
    batch = tiny_models.inputs(model)
    plain = logits(copy.deepcopy(model), batch)
    patch_model(model)
    torch.save(model, tmp_path / "model.pt")
    out = logits(model, batch)
    twin = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_bits(logits(twin, batch), out)
    assert patch_report(twin) == patch_report(model)
    assert_bits(logits(unpatch_model(twin), batch), plain)


LOAD = """
import pickle, sys, torch
with open(sys.argv[1], "rb") as file:
    model, batch, expected = pickle.load(file)
model.eval()
out = model(**batch).logits
assert torch.equal(out, expected), (out - expected).abs().max()
from moe_patch import patch_report, unpatch_model
assert [row.tier for row in patch_report(model)] == ["full", "full"], patch_report(model)
unpatch_model(model)
assert torch.isfinite(model(**batch).logits).all()
print("equal")
"""


def test_pickle_into_a_fresh_process(tmp_path):
    model = patch_model(tiny_models.build("qwen2_moe"))
    batch = {"input_ids": tiny_models.inputs(model)["input_ids"]}  # the aux loss needs a model built there
    expected = logits(copy.deepcopy(model), batch)
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps((model, batch, expected)))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, path],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.parametrize("model_type", FAMILIES)
def test_save_pretrained_writes_the_same_files(model_type, tmp_path):
    model = tiny_models.build(model_type)
    batch = tiny_models.inputs(model)
    model.save_pretrained(tmp_path / "plain")
    with patched(model):
        model.save_pretrained(tmp_path / "patched")
        out = logits(model, batch)
    plain, ours = (
        load_file(tmp_path / name / "model.safetensors") for name in ("plain", "patched")
    )
    assert list(plain) == list(ours)
    for key in plain:
        assert_bits(ours[key], plain[key], key)
    configs = [(tmp_path / name / "config.json").read_text() for name in ("plain", "patched")]
    assert configs[0] == configs[1]
    twin = type(model).from_pretrained(
        tmp_path / "patched", attn_implementation="eager", dtype="auto"
    )
    assert_bits(logits(patch_model(twin), batch), out)
