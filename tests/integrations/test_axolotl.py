"""The axolotl plugin against the interface that axolotl documents.

axolotl pins its own transformers and cannot be installed whole beside the one tested here. A
stand-in with the same names and signatures replaces the plugin's base class. If axolotl can be
imported (its wheel alone is enough), the tests use its own base class and plugin manager.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from moe_patch import UnsupportedModelError, UnsupportedOptionError, patch_report
from moe_patch.tools.checkpoint_loading import watching
from tests.support import tiny_models
from tests.support.adapters import EXPERTS, adapt, lora_config

PLUGIN = "moe_patch.integrations.axolotl.MoePatchPlugin"
SHORT = "moe_patch.MoePatchPlugin"


class BasePlugin:
    """The documented hooks that the loader calls around a model, in their order."""

    def register(self, cfg):
        pass

    def get_input_args(self):
        return None

    def pre_model_load(self, cfg):
        pass

    def post_model_build(self, cfg, model):
        pass

    def pre_lora_load(self, cfg, model):
        pass

    def post_lora_load(self, cfg, model):
        pass

    def post_model_load(self, cfg, model):
        pass

    def add_callbacks_pre_trainer(self, cfg, model):
        return []


class Config(dict):
    """A config like axolotl's: keys as attributes, None if absent."""

    def __missing__(self, key):
        return None

    def __getattr__(self, key):
        return self[key]


@pytest.fixture
def plugin(monkeypatch):
    if importlib.util.find_spec("axolotl") is None:
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["axolotl.integrations.base"].BasePlugin = BasePlugin
    module_name, _, class_name = PLUGIN.rpartition(".")
    monkeypatch.delitem(sys.modules, module_name, raising=False)
    yield getattr(importlib.import_module(module_name), class_name)()
    sys.modules.pop(module_name, None)


def load(plugin, cfg, lora=False):
    """Load a model in the order of axolotl's loader, with the plugin's hooks in between."""
    plugin.register(dict(cfg))
    plugin.pre_model_load(cfg)
    model = tiny_models.build("qwen3_moe")
    plugin.post_model_build(cfg, model)
    plugin.pre_lora_load(cfg, model)
    if lora:
        model = adapt(model, lora_config(EXPERTS))
    plugin.post_lora_load(cfg, model)
    plugin.post_model_load(cfg, model)
    return model


@pytest.mark.parametrize("value", [True, None, {"ties": "torch"}])
def test_patches_after_the_adapters(plugin, value):
    rows = patch_report(load(plugin, Config(moe_patch=value), lora=True))
    assert {(r.tier, r.lora) for r in rows} == {("full", "fused (down_proj, gate_up_proj)")}


def lines(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "axolotl.moe_patch"]


def test_the_log_says_what_was_patched(plugin, caplog):
    """Log one line by a logger that axolotl's filter passes; no line means nothing is patched."""
    caplog.set_level(logging.INFO, "axolotl.moe_patch")
    load(plugin, Config(moe_patch=False))
    assert not lines(caplog)
    load(plugin, Config(), lora=True)
    assert lines(caplog) == [
        "moe_patch: 2 of 2 MoE blocks patched (2 full), experts on torch, "
        "LoRA fused (down_proj, gate_up_proj)"
    ]


def test_the_short_name_is_the_plugin(plugin):
    module_name, _, class_name = SHORT.rpartition(".")
    assert getattr(importlib.import_module(module_name), class_name) is type(plugin)
    with pytest.raises(AttributeError, match="no attribute 'MoePatchPlugins'"):
        importlib.import_module(module_name).MoePatchPlugins  # noqa: B018


def test_the_entry_point_acts_on_the_key_alone(plugin, caplog):
    """Act only on the key.

    axolotl 0.21 loads the entry point in every run, also beside the plugin that a file lists.
    """
    caplog.set_level(logging.INFO, "axolotl.moe_patch")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module_name, _, class_name = project["entry-points"]["axolotl.plugins"]["moe-patch"].partition(
        ":"
    )
    by_key = getattr(importlib.import_module(module_name), class_name)()
    by_key.pre_model_load(Config(use_scattermoe=True))
    assert not patch_report(load(by_key, Config()))
    assert not lines(caplog)
    model = load(by_key, Config(moe_patch=True))
    assert patch_report(model)
    plugin.post_model_load(Config(moe_patch=True), model)
    assert len(lines(caplog)) == 1
    names = [each.get_input_args().rpartition(".")[2] for each in (by_key, plugin)]
    args = [getattr(importlib.import_module(module_name), name) for name in names]
    merged = type("Merged", (*args,), {})  # as axolotl merges the keys of all plugins
    assert merged(moe_patch={"ties": "torch"}).moe_patch == {"ties": "torch"}


def test_a_full_fine_tuning_gets_its_checkpoints_back(plugin):
    """By a callback that axolotl's builder of a Trainer takes."""
    model = load(plugin, Config())
    (callback,) = plugin.add_callbacks_pre_trainer(Config(), model)
    callback.on_init_end(None, None, None, model=model)
    assert watching(model) is not None
    assert plugin.add_callbacks_pre_trainer(Config(moe_patch=False), model) == []
    by_key = type(plugin).__subclasses__()[-1]()
    assert by_key.add_callbacks_pre_trainer(Config(), model) == []
    assert len(by_key.add_callbacks_pre_trainer(Config(moe_patch=True), model)) == 1


def test_the_import_registers_the_experts_implementation(plugin):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    assert "moe_patch" in ALL_EXPERTS_FUNCTIONS


def test_absent_key_patches_and_false_does_not(plugin):
    assert patch_report(load(plugin, Config()))
    assert not patch_report(load(plugin, Config(moe_patch=False)))


def test_the_key_is_declared_to_axolotl(plugin):
    module_name, _, class_name = plugin.get_input_args().rpartition(".")
    args = getattr(importlib.import_module(module_name), class_name)
    assert list(args.model_fields) == ["moe_patch"]
    for value in (True, False, None, {"recompute": True, "include": ["model.layers.0.*"]}):
        assert args(moe_patch=value).moe_patch == value


@pytest.mark.parametrize(
    "conflict",
    [
        {"use_scattermoe": True},
        {"use_sonicmoe": True},
        {"expert_backend": "scattermoe"},
        {"experts_implementation": "sonicmoe"},
        {"experts_implementation": "deep_ep_grouped_mm"},
        {"experts_implementation": "expert_parallel"},
        {"expert_parallel_size": 2},
        {"dense_mixer": True},
        {"liger_glu_activation": True},
        {"liger_swiglu": True},
    ],
    ids=str,
)
def test_axolotls_own_expert_kernels_are_a_named_conflict(plugin, conflict):
    ((key, value),) = conflict.items()
    with pytest.raises(UnsupportedOptionError, match=f"{key}: {str(value).lower()}.*both"):
        plugin.pre_model_load(Config(conflict))
    plugin.pre_model_load(Config(conflict, moe_patch=False))


def test_what_a_later_plugin_chooses_is_a_conflict_too(plugin):
    """expert_parallel sets its choice just before the model loads, after our plugin has read it."""
    cfg = Config()
    plugin.pre_model_load(cfg)
    cfg["experts_implementation"] = "deep_ep_grouped_mm"
    with pytest.raises(UnsupportedOptionError, match="experts_implementation: deep_ep"):
        plugin.post_model_load(cfg, tiny_models.build("qwen3_moe"))


def test_wrong_option_is_named_before_the_model_loads(plugin):
    with pytest.raises(UnsupportedOptionError, match="did you mean 'ties'"):
        plugin.pre_model_load(Config(moe_patch={"tie": "torch"}))


def test_a_dense_model_is_an_error(plugin):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    with pytest.raises(UnsupportedModelError, match="no MoE block"):
        plugin.post_model_load(Config(), model)


@pytest.fixture
def own_manager():
    """Yield axolotl's manager, as its loader uses it, without plugins of other tests."""
    base = pytest.importorskip("axolotl.integrations.base", reason="axolotl is not installed")
    base.PluginManager._instance = None
    yield base.PluginManager.get_instance()
    base.PluginManager._instance = None


@pytest.mark.parametrize(("name", "lora"), [(PLUGIN, False), (SHORT, True)])
def test_own_manager_loads_and_calls_the_plugin(own_manager, name, lora):
    from axolotl.utils.dict import DictDefault

    own_manager.register(name)
    assert list(own_manager.plugins) == [name]
    (args,) = own_manager.get_input_args()
    module_name, _, class_name = args.rpartition(".")
    assert hasattr(importlib.import_module(module_name), class_name)
    own_manager.cfg = cfg = DictDefault({"plugins": [PLUGIN], "moe_patch": {"ties": "torch"}})
    own_manager.pre_model_load(cfg)
    model = tiny_models.build("qwen3_moe")
    own_manager.post_model_build(cfg, model)
    own_manager.pre_lora_load(cfg, model)
    model = adapt(model, lora_config(EXPERTS)) if lora else model
    own_manager.post_lora_load(cfg, model)
    assert not patch_report(model)
    own_manager.post_model_load(cfg, model)
    reports = patch_report(model)
    assert {row.tier for row in reports} == {"full"}
    assert all(("fused" in row.lora) == lora for row in reports)


def test_own_manager_passes_a_conflict_on(own_manager):
    from axolotl.utils.dict import DictDefault

    own_manager.register(PLUGIN)
    with pytest.raises(UnsupportedOptionError, match="both run the experts"):
        own_manager.pre_model_load(DictDefault({"use_scattermoe": True}))


@pytest.mark.parametrize("value", [True, False, {"ties": "torch"}], ids=str)
def test_own_manager_adds_the_key_to_axolotls_file(own_manager, value):
    """Accept the key of a YAML file in axolotl's own checks, which drop it without the plugin."""
    from axolotl.utils.config import validate_config
    from axolotl.utils.dict import DictDefault

    raw = {
        "base_model": "none", "datasets": [{"path": "none", "type": "alpaca"}],
        "micro_batch_size": 1, "gradient_accumulation_steps": 1, "learning_rate": 1e-4,
        "moe_patch": value,
    }  # fmt: skip
    machine = {"bf16": True, "fp8": False, "n_gpu": 1, "n_node": 1, "compute_capability": "sm_90"}
    versions = {"torch_version": "2.9.0"}
    own_manager.register(PLUGIN)
    checked = validate_config(DictDefault(raw | {"plugins": [PLUGIN]}), machine, versions)
    assert checked.moe_patch == value
    assert validate_config(DictDefault(raw), machine, versions).moe_patch is None
