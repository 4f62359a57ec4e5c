"""Several adapters at once, as different as PEFT allows: ranks, scalings, layers, dtypes.

As in tests/lora/test_lora.py the reference is PEFT's own forward over transformers' eager experts.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from moe_patch import UnsupportedOptionError, patch_model, patch_report
from moe_patch.runtime.adapters import is_param_wrapper, why_not_fused
from tests.support import tiny_models, window
from tests.support.adapters import (
    DOWN,
    EXPERTS,
    ORDERS,
    Pair,
    adapt,
    adapted_pair,
    adapter_gradients,
    assert_same_step,
    limit_on,
    lora_config,
    no_factors_left,
    step,
)
from tests.support.numerics import assert_close, rel_err
from tests.support.snapshots import logits

MODELS = ("qwen3_moe", "gpt_oss", "llama4")


def mixed_pair(model_type: str, order: str, device: str) -> Pair:
    """Add "rs" (rsLoRA) and "patterns" (other ranks and alphas by layer) to "default"."""
    pair = adapted_pair(model_type, EXPERTS, order=order, device=device)
    by_layer = {
        "rank_pattern": {r".*layers\.1.*gate_up_proj": 2},
        "alpha_pattern": {r".*layers\.0.*": 1},
    }
    for model in pair[:2]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            model.add_adapter("rs", lora_config(EXPERTS, r=5, lora_alpha=3, use_rslora=True))
            model.add_adapter("patterns", lora_config(EXPERTS, r=4, **by_layer))
    if order == ORDERS[2]:
        patch_model(pair.ours)
    return pair


def activate(pair: Pair, *names: str) -> None:
    for model in pair[:2]:
        model.base_model.set_adapter(list(names))


@window.second_adapter
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model_type", MODELS)
def test_adapters_of_different_ranks_and_scalings_sum(model_type, order, device):
    pair = mixed_pair(model_type, order, device)
    found = {
        (name, m.r[name], round(m.scaling[name], 6))
        for m in pair.ours.modules()
        if is_param_wrapper(m)
        for name in m.scaling
    }
    patterns = {("patterns", 4, 0.25), ("patterns", 4, 1.5), ("patterns", 2, 3.0)}
    assert found == {("default", 3, 2.0), ("rs", 5, round(3 / math.sqrt(5), 6))} | patterns
    seen = []
    for names in (["rs"], ["patterns"], ["default", "rs"], ["default", "rs", "patterns"]):
        activate(pair, *names)
        assert_same_step(pair)
        now = logits(pair.ours, pair.batch)
        assert all(rel_err(now, other) > 1e-3 for other in seen), names
        seen.append(now)
    for model in pair[:2]:
        model.set_adapter("patterns")
        model.delete_adapter("default")
    activate(pair, "rs", "patterns")
    assert_same_step(pair)
    names = adapter_gradients(pair.ours)
    assert {name.split(".lora_")[1].split(".")[1] for name in names} == {"rs", "patterns"}
    assert no_factors_left(pair.ours)


@window.second_adapter
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model_type", MODELS)
def test_one_of_several_merged(model_type, order, device):
    """Run PEFT's own path, which omits unmerged adapters, and report why."""
    pair = mixed_pair(model_type, order, device)
    activate(pair, "default", "patterns")
    before = logits(pair.ours, pair.batch)
    for model in pair[:2]:
        model.merge_adapter(["patterns"])
    merged = logits(pair.ours, pair.batch)
    assert_close(merged, logits(pair.reference, pair.batch), limit_on(pair.batch))
    assert rel_err(merged, before) > 1e-3
    for row in patch_report(pair.ours):
        assert row.lora.count("adapters are merged into the weight") == 2
    for model in pair[:2]:
        model.unmerge_adapter()
    assert_close(logits(pair.ours, pair.batch), before, 1e-4)
    assert_same_step(pair, 1e-4)


@window.second_adapter
@pytest.mark.parametrize("order", [ORDERS[0], ORDERS[2]])
@pytest.mark.parametrize("model_type", MODELS)
def test_adapters_of_different_dtypes_sum(model_type, order, device):
    """Multiply bf16 factors beside fp32 factors in fp32, where PEFT rounds a delta to bf16.

    The reference is therefore PEFT's forward in fp64 over the same values.
    """
    pair = mixed_pair(model_type, order, device)
    for model in pair[:2]:
        for name, parameter in model.named_parameters():
            if ".lora_" in name and ".rs." in name:
                parameter.data = parameter.data.bfloat16()
    activate(pair, "default", "rs")
    dtypes = {name: p.dtype for name, p in pair.ours.named_parameters() if p.requires_grad}
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    exact = Pair(pair.reference.double(), pair.ours, pair.batch)
    assert_close(
        step(exact.ours, pair.batch), step(exact.reference, pair.batch), limit_on(pair.batch)
    )
    wanted, got = adapter_gradients(exact.reference), adapter_gradients(exact.ours)
    for name, gradient in wanted.items():
        assert got[name].dtype == dtypes[name], name
        limit = limit_on(pair.batch) if dtypes[name] == torch.float32 else 2.0**-8
        assert_close(got[name], gradient, limit, name)


@window.second_adapter
@pytest.mark.parametrize("patched", [False, True])
def test_pefts_refusal_of_different_targets_stays(patched):
    """Raise PEFT's own error for a second adapter with other parameters, patched or not."""
    model = adapt(tiny_models.build("qwen3_moe"), lora_config(EXPERTS))
    if patched:
        patch_model(model)
    with pytest.raises(ValueError, match="all adapters must target the same set of parameters"):
        model.add_adapter("down", lora_config([DOWN]))
    assert no_factors_left(model)


TARGETS = {"qwen3_moe": EXPERTS, "jetmoe": ("input_linear.weight", "output_linear.weight")}


@pytest.mark.parametrize("several", [False, pytest.param(True, marks=window.second_adapter)])
@pytest.mark.parametrize("model_type", TARGETS)
def test_require_refuses_adapters_added_after_patching(model_type, several, device):
    """Raise an error for calls on PEFT's own path until patch_model is called again."""
    options = {"order": "patch first", "patch": {"fuse_lora": "require"}, "device": device}
    pair = adapted_pair(model_type, TARGETS[model_type], **options)
    if several:
        for model in pair[:2]:
            torch.manual_seed(11)
            model.add_adapter("second", lora_config(TARGETS[model_type], r=5))
            model.base_model.set_adapter(["default", "second"])
    with pytest.raises(UnsupportedOptionError, match="added after patching; call patch_model"):
        pair.ours(**pair.batch)
    with pair.reference.disable_adapter(), pair.ours.disable_adapter():
        found, expected = (logits(model, pair.batch) for model in (pair.ours, pair.reference))
        assert_close(found, expected, limit_on(pair.batch))
    patch_model(pair.ours, fuse_lora="require")
    assert_same_step(pair)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_packed_base_is_named_as_what_stands_in_the_way(dtype):
    def wrapper(stored: torch.dtype) -> nn.Module:
        made = nn.Module()
        made.base_layer = nn.Module()
        made.base_layer.register_buffer("gate_up_proj", torch.empty(8, 4, 4, dtype=stored))
        made.parameter_name, made.num_experts = "gate_up_proj", 8
        return made

    assert why_not_fused(wrapper(dtype)) == f"experts are stored in {dtype}"
    assert why_not_fused(wrapper(torch.bfloat16)) is None
