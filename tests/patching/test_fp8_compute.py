"""The option compute: accepted values, the report's line, and what other cards compute."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_patch import (
    PatchConfig,
    UnsupportedModelError,
    UnsupportedOptionError,
    patch_model,
    patch_report,
    quantize_experts,
    shadow_results,
    unpatch_model,
)
from moe_patch.ops.experts.op import experts_mlp
from moe_patch.patching import fp8_check
from moe_patch.runtime import experts
from moe_patch.runtime import fp8 as runtime
from moe_patch.runtime.fp8 import Copies, in_fp8
from moe_patch.runtime.module_patch import patch_of
from tests.support import quant_models, tiny_models
from tests.support.numerics import assert_bits


def test_unknown_values_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedOptionError, match="compute is 'int8'; accepted: decoded, fp8"):
        PatchConfig(compute="int8")


@pytest.mark.parametrize("compute", ["fp8", "fp8_copy"])
def test_elsewhere_experts_are_decoded_with_a_line_in_the_report(compute: str) -> None:
    model = quantize_experts(quant_models.build(), "fp8")
    patch_model(model)
    assert not patch_report(model)[0].reason
    plain = quant_models.logits(model)
    unpatch_model(model)
    patch_model(model, compute=compute)
    for row in patch_report(model):
        assert f"compute={compute!r} has no effect: experts on the torch backend" in row.reason
    assert_bits(quant_models.logits(model), plain)


def test_experts_in_another_storage_are_named() -> None:
    model = patch_model(tiny_models.build("qwen3_moe"), compute="fp8")
    assert "not stored in FP8" in patch_report(model)[0].reason


def test_copies_of_a_model_start_without_transposed_weights() -> None:
    model = patch_model(quantize_experts(quant_models.build(), "fp8"), compute="fp8_copy")
    for _, block in tiny_models.blocks(model):
        patch = patch_of(block.experts)
        assert patch is not None
        patch.copies.made["w13_EHD"] = (torch.empty(1), 0, (torch.empty(1), torch.empty(1)))
        for copied in (copy.deepcopy(patch.copies), pickle.loads(pickle.dumps(patch.copies))):
            assert isinstance(copied, Copies)
            assert not copied.made


def test_loading_a_state_dict_discards_transposed_weights() -> None:
    """Also if the values change in place, which compiled code cannot see."""
    model = patch_model(quantize_experts(quant_models.build(), "fp8"), compute="fp8_copy")
    made = [patch_of(block.experts).copies.made for _, block in tiny_models.blocks(model)]
    for one in made:
        one["w13_EHD"] = (torch.empty(1), 0, (torch.empty(1), torch.empty(1)))
    model.load_state_dict(model.state_dict())
    assert made == [{}, {}]


def test_training_of_the_base_is_refused_by_name() -> None:
    model = patch_model(quantize_experts(quant_models.build(), "fp8"), compute="fp8")
    model.requires_grad_(True)
    with pytest.raises(UnsupportedModelError, match=r"Experts\.\w+: requires_grad is True"):
        quant_models.logits(model)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offload_experts": True}, "offload_experts=True with compute='fp8'"),
        ({"chunk_tokens": 64}, "chunk_tokens=64 with compute='fp8'"),
    ],
)
def test_options_that_fp8_products_exclude_are_refused_by_name(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedOptionError, match=said):
        PatchConfig(compute="fp8", **options)


def bent(*args: Any) -> Any:
    """FP8 products of a weight that is larger by an eighth."""
    w: Any = in_fp8(*args)
    if args[1] == "decoded":
        return w
    scales = w.w2_EDF.scales[0] * 1.125, *w.w2_EDF.scales[1:]
    return w._replace(w2_EDF=replace(w.w2_EDF, scales=scales))


def test_the_self_check_has_a_limit_for_fp8_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with decoded weights where products are in FP8; refuse what is too far away."""
    model = quantize_experts(quant_models.build(), "fp8")
    monkeypatch.setattr(fp8_check, "decoded_reason", lambda *_: "")
    patch_model(model, compute="fp8")
    said = "skipped: experts stored in fp8; FP8 products passed"
    assert {row.self_check for row in patch_report(model)} == {said}
    unpatch_model(model)
    monkeypatch.setattr(fp8_check, "in_fp8", bent)
    with pytest.raises(
        UnsupportedModelError, match=r"output differs .* by 1.25e-01 .* limit 8e-02"
    ):
        patch_model(model, compute="fp8")
    patch_model(model, compute="decoded")
    assert {row.self_check for row in patch_report(model)} == {"skipped: experts stored in fp8"}


def test_shadow_checks_allow_for_fp8_products() -> None:
    model = quantize_experts(quant_models.build(), "fp8")
    for compute, limit in (("decoded", 5e-5), ("fp8", 0.16)):
        patch_model(model, compute=compute, shadow_check=1)
        model.train()(**tiny_models.inputs(model))
        found = [each for each in shadow_results(model) if each.role == "experts"]
        assert [each.limit for each in found] == [pytest.approx(limit)]
        unpatch_model(model)


def test_long_contexts_run_in_chunks_unless_products_are_in_fp8(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def noted(*args: Any, chunk_tokens: Any, **options: Any) -> Any:
        seen.append(chunk_tokens)
        return experts_mlp(*args, **options)

    monkeypatch.setattr(experts, "experts_mlp", noted)
    for storage, hopper, chunk in (("", True, "auto"), ("fp8", False, "auto"), ("fp8", True, 0)):
        model = quant_models.build(num_hidden_layers=1)
        model = patch_model(quant_models.store(model, storage), compute="fp8", self_check=False)
        monkeypatch.setattr(runtime, "_is_hopper", lambda *_, hopper=hopper: hopper)
        quant_models.logits(model)
        assert (storage, hopper, seen.pop()) == (storage, hopper, chunk)
