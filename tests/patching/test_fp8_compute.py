"""The option compute: accepted values, the report's line, and what other cards compute."""

from __future__ import annotations

import copy
import pickle
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
    unpatch_model,
)
from moe_patch.runtime.fp8 import Copies
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
