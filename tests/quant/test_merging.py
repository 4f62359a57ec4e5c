"""Merging adapters into packed experts is refused before PEFT has changed any layer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
from peft.tuners.lora import LoraModel
from torch import nn

from moe_patch import (
    UnsupportedModelError,
    dequantize_experts,
    patch_model,
    quantize_experts,
    unpatch_model,
)
from moe_patch.formats.packed import READABLE
from moe_patch.formats.tensor import QuantTensor, parameter
from moe_patch.quant.state import watch
from tests.support.adapters import adapt, lora_config
from tests.support.numerics import FP32, assert_bits, assert_close
from tests.support.quant_cases import packed_like
from tests.support.quant_models import EXPERTS, build, logits
from tests.support.snapshots import assert_unchanged, snapshot

CONFIG = lora_config(EXPERTS, ["q_proj"])
METHODS = ("merge_and_unload", "merge_adapter")


def _quantised(model: nn.Module) -> nn.Module:
    return quantize_experts(model, "nf4")


def _adapted(model: nn.Module) -> nn.Module:
    return adapt(model, CONFIG)


def _bare_tuner(model: nn.Module) -> nn.Module:
    """PEFT's tuner without a PeftModel around it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LoraModel(model, CONFIG, "default")


ORDERS: dict[str, tuple[Callable[[nn.Module], nn.Module], ...]] = {
    "adapters, quantise": (_adapted, _quantised),
    "adapters, quantise, patch": (_adapted, _quantised, patch_model),
    "adapters, patch, quantise": (_adapted, patch_model, _quantised),
    "quantise, adapters, patch": (_quantised, _adapted, patch_model),
    "quantise, patch, adapters, patch": (_quantised, patch_model, _adapted, patch_model),
    "patch, adapters, quantise": (patch_model, _adapted, _quantised),
    "quantise, bare tuner, patch": (_quantised, _bare_tuner, patch_model),
    "bare tuner, quantise": (_bare_tuner, _quantised),
    "copied": (_adapted, _quantised, copy.deepcopy),
    "adapters, quantise, patch, unpatch": (_adapted, _quantised, patch_model, unpatch_model),
}


def _ordered(order: str) -> nn.Module:
    model = build(num_hidden_layers=1)
    for step in ORDERS[order]:
        model = step(model)
    return model


def _refuses(model: nn.Module, method: str, **options: object) -> None:
    """Raise an error naming module, storage, adapter and remedy; leave the model unchanged."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = snapshot(model)
    said = (
        rf"{method}: model\.layers\.0\.mlp\.experts\.(gate_up|down)_proj is stored in \w+, .*"
        r"'default'.*dequantize_experts\(model\) first, or save the adapters"
    )
    with pytest.raises(UnsupportedModelError, match=said):
        getattr(model, method)(**options)
    assert_unchanged(state, snapshot(model))
    found = model.state_dict()
    assert found.keys() == before.keys()
    for name, value in before.items():
        assert_bits(found[name], value, name)
    layers = [module for module in model.modules() if hasattr(module, "merged_adapters")]
    assert len(layers) == 3
    for layer in layers:
        assert (layer.merged_adapters, layer.active_adapters) == ([], ["default"])
        assert not layer.disable_adapters


@pytest.mark.parametrize("order", ORDERS)
def test_a_merge_is_refused_before_any_layer_has_changed(order: str) -> None:
    model = _ordered(order)
    for method in METHODS:
        for safe_merge in (False, True):
            _refuses(model, method, safe_merge=safe_merge)
    _refuses(model, "merge_adapter", adapter_names=["default"])


@pytest.mark.parametrize("storage", READABLE)
def test_every_storage_is_refused(storage: str) -> None:
    model = build("gpt_oss", num_hidden_layers=1)
    experts = model.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        packed = packed_like(getattr(experts, name).data, storage)
        setattr(experts, name, parameter(QuantTensor(packed)))
    watch(experts)
    _refuses(patch_model(_adapted(model)), "merge_and_unload")


@pytest.mark.parametrize("order", ["adapters, quantise, patch", "quantise, adapters, patch"])
def test_dequantised_experts_are_merged(order: str) -> None:
    model = _ordered(order)
    expected = logits(model)
    merged = dequantize_experts(model).merge_and_unload()
    assert not any("lora_" in name for name, _ in merged.named_parameters())
    assert_close(logits(merged), expected, FP32)


def test_adapters_on_other_parts_are_merged() -> None:
    """Merge adapters on other parts while the experts' adapter is inactive."""
    model = _ordered("adapters, quantise, patch")
    model.add_adapter("attention", lora_config([], ["q_proj"]))
    model.set_adapter("attention")
    patch_model(model)
    with pytest.raises(UnsupportedModelError, match="'default'"):
        model.merge_adapter(adapter_names=["attention", "default"])
    expected = logits(model)
    model.merge_adapter()
    layer = model.base_model.model.model.layers[0]
    assert layer.self_attn.q_proj.merged_adapters == ["attention"]
    assert_close(logits(model), expected, FP32)


def test_the_guard_is_undone_with_what_made_it() -> None:
    model = _adapted(_quantised(build(num_hidden_layers=1)))
    logits_hooks = snapshot(model)
    unpatch_model(patch_model(model))
    assert_unchanged(logits_hooks, snapshot(model))
    tuner = model.base_model
    dequantize_experts(_quantised(model))
    assert not set(METHODS) & set(vars(tuner))
    plain = patch_model(_adapted(build(num_hidden_layers=1)))
    assert not set(METHODS) & set(vars(plain.base_model))


def test_merged_experts_are_not_quantised() -> None:
    """Refuse merged experts: unmerging would restore attention but could not restore them."""
    model = _adapted(build(num_hidden_layers=1))
    model.merge_adapter()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    said = r"mlp\.experts\S* \(Qwen3MoeExperts\): cannot be quantised: adapters 'default' are"
    with pytest.raises(UnsupportedModelError, match=said):
        _quantised(model)
    for name, value in model.state_dict().items():
        assert_bits(value, before[name], name)
    model.unmerge_adapter()
    _quantised(model)
