"""A patch changes nothing outside of the model.

Every class and every name of all loaded modeling modules stays the same object while a model is
patched, trained and undone. So do the modules that these build on, and the settings of the process.
"""

from __future__ import annotations

import os
import sys
import warnings

import pytest
import torch
from torch import nn

from moe_patch import patch_model, unpatch_model
from tests.support import tiny_models
from tests.support.adapters import EXPERTS, adapt, lora_config
from tests.support.snapshots import assert_same_attributes, logits, module_globals

FAMILIES = ["qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss", "mixtral", "llama4"]
ALSO = (
    "torch.nn.modules.",
    "transformers.integrations.moe",
    "transformers.modeling_utils",
    "peft.tuners.",
    "accelerate.hooks",
)


def watched():
    """Return by name the loaded modeling modules and those that they and adapters build on."""
    modeling = [n for n in sys.modules if n.startswith("transformers.models.") and "modeling_" in n]
    return modeling + [name for name in sys.modules if name.startswith(ALSO)]


def classes_of(names):
    """Return the attributes of every class in some modules, base classes included."""
    values = [value for name in names for value in vars(sys.modules[name]).values()]
    own = {cls for value in values if isinstance(value, type) for cls in value.__mro__}
    return {cls: dict(vars(cls)) for cls in own if issubclass(cls, nn.Module)}


def settings():
    """Return the settings that a library could change for the whole process."""
    return {
        "environment": dict(os.environ),
        "path": list(sys.path),
        "warnings": list(warnings.filters),
        "generator": torch.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "excepthook": sys.excepthook,
    }


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_no_class_module_or_setting_changes(lora):
    models = [tiny_models.build(name) for name in FAMILIES]
    batches = [tiny_models.inputs(model) for model in models]
    models = [adapt(model, lora_config(EXPERTS)) for model in models] if lora else models
    unpatch_model(patch_model(tiny_models.build("qwen3_moe")))  # the one registry name is there now
    for model, batch in zip(models, batches, strict=True):
        logits(model, batch)  # so that whatever a first forward imports is loaded
    names = watched()
    assert len([name for name in names if "modeling_" in name]) > len(FAMILIES)
    classes, modules, before = classes_of(names), module_globals(*names), settings()
    assert len(classes) > 100
    for model in models:
        patch_model(model)
    assert_same_attributes(classes, classes_of(names))
    assert_same_attributes(modules, module_globals(*names))
    assert settings() == before
    for model, batch in zip(models, batches, strict=True):
        tiny_models.loss(model(**batch)).backward()
    assert_same_attributes(classes, classes_of(names))
    assert_same_attributes(modules, module_globals(*names))
    for model in models:
        unpatch_model(model)
    assert_same_attributes(classes, classes_of(names))
    assert_same_attributes(modules, module_globals(*names))
    assert settings() == before | {"generator": settings()["generator"]}
