"""The window of releases: one sentence at patch time, and differences between PEFT releases."""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager

import pytest
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from moe_patch import UnsupportedModelError, patch_model, patch_report
from moe_patch.patching import window
from moe_patch.runtime.adapters import is_param_wrapper
from moe_patch.runtime.forward import EXPERTS_NAME
from moe_patch.runtime.peft_release import factor_proxies, lora_proxies, swaps_features
from tests.support import tiny_models
from tests.support.adapters import (
    EXPERTS,
    adapt,
    adapted_pair,
    as_in_peft_018,
    assert_adapters_act,
    assert_same_step,
    lora_config,
)
from tests.support.numerics import FP32, assert_close
from tests.support.snapshots import assert_unchanged, snapshot

pytestmark = pytest.mark.versions


@pytest.fixture
def installed(monkeypatch):
    """Make the metadata of a package name another release."""
    real = window.installed_release

    def pretend(package: str, release: str) -> None:
        def version(name: str) -> str:
            return release if name == package else real(name)

        monkeypatch.setattr(window, "installed_release", version)

    return pretend


@pytest.mark.parametrize("release", ["5.8.1", "4.57.6"])
def test_an_older_transformers_is_refused_in_one_sentence(release, installed):
    model = tiny_models.build("qwen3_moe")
    before = snapshot(model)
    installed("transformers", release)
    with pytest.raises(UnsupportedModelError) as caught:
        patch_model(model, strict=False)
    assert str(caught.value) == (
        f"Qwen3MoeForCausalLM: moe_patch needs transformers 5.9 or newer, found {release}; install "
        "a newer transformers, or leave moe_patch out"
    )
    assert_unchanged(before, snapshot(model))


def test_the_name_of_the_experts_is_not_registered_with_an_older_transformers(
    installed, monkeypatch
):
    """Raise no ImportError, which axolotl takes for a plugin that is not there."""
    monkeypatch.delitem(sys.modules, "moe_patch.integrations.transformers", raising=False)
    monkeypatch.delitem(ExpertsInterface._global_mapping, EXPERTS_NAME, raising=False)
    installed("transformers", "5.8.1")
    with pytest.raises(UnsupportedModelError) as caught:
        importlib.import_module("moe_patch.integrations.transformers")
    assert str(caught.value) == (
        'experts_implementation="moe_patch": moe_patch needs transformers 5.9 or newer, found '
        "5.8.1; install a newer transformers, or leave moe_patch out"
    )
    assert EXPERTS_NAME not in ALL_EXPERTS_FUNCTIONS


@pytest.mark.parametrize("release", ["5.9.0", "5.10.0.dev0", "6.0.0"])
def test_the_oldest_release_and_later_ones_are_taken(release, installed):
    installed("transformers", release)
    assert patch_report(patch_model(tiny_models.build("qwen3_moe")))


def test_an_older_peft_is_refused_where_it_matters(installed):
    model = adapt(tiny_models.build("qwen3_moe"), lora_config(EXPERTS))
    installed("peft", "0.17.1")
    assert patch_model(tiny_models.build("qwen3_moe")) is not None
    with pytest.raises(UnsupportedModelError, match=r"needs peft 0\.18 or newer, found 0\.17\.1"):
        patch_model(model)


def test_a_family_of_a_later_release_says_which(monkeypatch):
    """Refuse the whole model and name the release that its entry needs."""
    model = nn.Linear(1, 1)
    model.config = type("Config", (), {"model_type": "toy"})()
    monkeypatch.setattr("moe_patch.patching.resolve.later_release", lambda names: "99.0")
    with pytest.raises(UnsupportedModelError, match=r"entry needs transformers 99\.0 or newer, fo"):
        patch_model(model)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_factors_as_peft_018_has_them_are_fused(model_type):
    """Match PEFT's own forward, with and without the flag that 0.18 does not set."""
    pair = adapted_pair(model_type, EXPERTS)
    for model in pair[:2]:
        as_in_peft_018(model)
    assert {row.lora for row in patch_report(pair.ours)} == {"fused (down_proj, gate_up_proj)"}
    assert_adapters_act(pair.ours, pair.batch)
    assert_same_step(pair)
    for wrapper in filter(is_param_wrapper, pair.ours.modules()):
        del wrapper.__dict__["_did_swap_in_out_features"]
        assert not swaps_features(wrapper)
    assert_same_step(pair)


@contextmanager
def counted(proxy):
    """Yield a list that gets the shape of every merged weight that a proxy of PEFT forms."""
    shapes, forward = [], proxy.forward

    def count(self, weight):
        shapes.append(weight.shape)
        return forward(self, weight)

    proxy.forward = count
    try:
        yield shapes
    finally:
        proxy.forward = forward


def test_merged_weights_of_older_releases_are_read(monkeypatch):
    """Read the merged weight without PEFT's factor proxy, once a call, and report it."""
    layer = pytest.importorskip("peft.tuners.lora.layer")
    if factor_proxies():
        # Release 0.20 parametrizes the merged weight, for a single adapter too.
        def merged(lhs, rhs, scaling):
            return layer._LoraParameterProxy(scaling * lhs @ rhs)

        monkeypatch.setattr(layer, "_LoraFactorsProxy", merged)
        monkeypatch.setattr("moe_patch.runtime.peft_release._FACTORS", "_there_is_no_such_proxy")
    assert not factor_proxies()
    assert [cls.__name__ for cls in lora_proxies()] == ["_LoraParameterProxy"]
    pair = adapted_pair("qwen3_moe", EXPERTS, order="patch first")
    expected = pair.reference(**pair.batch)
    with counted(layer._LoraParameterProxy) as merged_weights:
        found = pair.ours(**pair.batch)
    # In each of two layers PEFT checks each parametrization once, and the experts read it once.
    assert len(merged_weights) == 2 * 2 * 2
    assert_close(found.logits, expected.logits, FP32)
    expected.loss.backward()
    found.loss.backward()
    for (name, theirs), ours in zip(
        pair.reference.named_parameters(), pair.ours.parameters(), strict=True
    ):
        if theirs.requires_grad:
            assert_close(ours.grad, theirs.grad, FP32, name)
    assert {row.lora for row in patch_report(pair.ours)} == {
        "peft (down_proj: PEFT's merged weight is read; call patch_model again with the same "
        "options to fuse); peft (gate_up_proj: PEFT's merged weight is read; call patch_model "
        "again with the same options to fuse)"
    }
    patch_model(pair.ours)
    with counted(layer._LoraParameterProxy) as merged_weights:
        assert_close(pair.ours(**pair.batch).logits, expected.logits, FP32)
    assert not merged_weights
