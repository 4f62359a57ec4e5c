"""The line that an integration logs about a patched model, and the ms-swift plugin."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from torch import nn

from moe_patch import patch_model, patch_report
from moe_patch.integrations.ms_swift import PLUGIN
from moe_patch.integrations.trainer import MoePatchCallback
from tests.support import tiny_models
from tests.support.adapters import EXPERTS, adapt, lora_config

PATCHED = "moe_patch: 2 of 2 MoE blocks patched (2 full), experts on torch, LoRA "
ARGUMENTS = SimpleNamespace(use_liger_kernel=False, n_gpu=0)
STATE = SimpleNamespace(global_step=0)


def lines(caplog, name="moe_patch"):
    return [r.getMessage() for r in caplog.records if r.name == name and "blocks" in r.getMessage()]


@pytest.fixture
def model():
    return tiny_models.build("qwen3_moe")


def test_the_callback_says_once_what_it_patched(model, caplog):
    caplog.set_level(logging.INFO, "moe_patch")
    callback = MoePatchCallback()
    callback.on_init_end(ARGUMENTS, None, None, model=model)
    callback.on_train_begin(ARGUMENTS, STATE, None, model=model)
    assert lines(caplog) == [f"{PATCHED}none"]
    adapted = adapt(model, lora_config(EXPERTS))
    callback.on_train_begin(ARGUMENTS, STATE, None, model=adapted)
    assert lines(caplog)[1:] == [f"{PATCHED}fused (down_proj, gate_up_proj)"]


@pytest.mark.parametrize("value", [("RANK", "1"), ("RANK", "0")])
def test_the_first_rank_speaks(model, caplog, monkeypatch, value):
    monkeypatch.setenv(*value)
    caplog.set_level(logging.INFO, "moe_patch")
    MoePatchCallback().on_init_end(ARGUMENTS, None, None, model=model)
    assert len(lines(caplog)) == (value[1] == "0")


def test_no_line_where_nothing_is_to_be_patched(model, caplog):
    caplog.set_level(logging.INFO, "moe_patch")
    MoePatchCallback(False).on_init_end(ARGUMENTS, None, None, model=model)
    assert not lines(caplog)


def test_refused_blocks_are_in_the_line(model):
    experts = tiny_models.blocks(model)[1][1].experts
    experts.__dict__["forward"] = nn.Linear.forward.__get__(experts)  # another library's
    with pytest.warns(UserWarning, match="leaves 1 of 2"):
        patch_model(model, strict=False)
    assert patch_report(model).summary() == (
        "1 of 2 MoE blocks patched (1 full), experts on torch, LoRA none; 1 left to transformers, "
        f"first model.layers.1.mlp: {patch_report(model)[1].reason}"
    )


def test_the_plugin_of_ms_swift(model, caplog, monkeypatch):
    """Load the plugin as ms-swift loads a file, and call its map with arguments and trainer."""
    swift, callbacks = ModuleType("swift"), ModuleType("swift.callbacks")
    callbacks.callbacks_map = {}
    monkeypatch.setitem(sys.modules, "swift", swift)
    monkeypatch.setitem(sys.modules, "swift.callbacks", callbacks)
    spec = importlib.util.spec_from_file_location("_swift_external", PLUGIN)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    caplog.set_level(logging.INFO, "swift.moe_patch")
    callback = callbacks.callbacks_map["moe_patch"](object(), object())
    callback.on_init_end(ARGUMENTS, None, None, model=model)
    assert lines(caplog, "swift.moe_patch") == [f"{PATCHED}none"]
    # ms-swift puts the folder first on sys.path, so a "transformers.py" there would be imported.
    beside = {path.name for path in Path(PLUGIN).parent.iterdir() if path.suffix == ".py"}
    assert beside == {"__init__.py", Path(PLUGIN).name}
