"""Signals that record() returns for every family; the decisions are transformers' own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_patch import (
    UnsupportedModelError,
    patch_model,
    patch_report,
    record,
)
from moe_patch.patching.discover import discover
from moe_patch.runtime import taps
from moe_patch.signals.losses import router_logits
from tests.support import tiny_models
from tests.support.numerics import FP32, assert_close
from tests.support.signals_cases import (
    GRADIENTS,
)
from tests.support.toy_family import ToyModel


def test_recorded_decisions_are_those_of_transformers() -> None:
    reference = tiny_models.build("qwen3_moe")
    model = patch_model(copy.deepcopy(reference))
    batch = tiny_models.inputs(model)
    seen: list[tuple[Tensor, ...]] = []
    for _, block in tiny_models.blocks(reference):
        block.gate.register_forward_hook(lambda module, args, out: seen.append((*args, *out)))
    reference(**batch)
    with record(model, router_input=True) as recorder:
        model(**batch)
    assert list(recorder.layers) == [path for path, _ in tiny_models.blocks(model)]
    for layer, (x, logits, weights, ids) in zip(recorder.layers.values(), seen, strict=True):
        assert torch.equal(layer.ids, ids)
        assert_close(layer.logits, logits, FP32, "logits")
        assert_close(layer.weights, weights, FP32, "weights")
        assert_close(layer.router_input, x, FP32, "router input")
        assert torch.equal(layer.tokens_per_expert, torch.bincount(ids.flatten(), minlength=8))
        assert layer.act_norm.dtype == torch.float32


FIELDS = (
    "ids", "weights", "logits", "router_weights", "router_input", "tokens_per_expert", "load",
    "act_norm", *GRADIENTS,
)  # fmt: skip
# Fields that a family cannot provide; every other field of every recipe is recorded.
MISSING = {
    "dbrx": FIELDS,
    "doge": FIELDS,
    "jetmoe": FIELDS,
    "llama4": ("weights", "router_weights"),
    "longcat_flash": ("act_norm", "grad_norm_output"),
}


@pytest.mark.parametrize("model_type", tiny_models.patchable())
def test_every_field_of_every_family_is_recorded_or_named_as_missing(model_type) -> None:
    model = patch_model(tiny_models.build(model_type), self_check=False)
    with record(model, router_input=True) as recorder:
        tiny_models.loss(model(**tiny_models.inputs(model))).backward()
    report = patch_report(model)
    assert len(recorder.layers) == len(report)
    expected = set(MISSING.get(model_type, ()))
    by_block = model_type in tiny_models.block_chosen()
    if {row.tier for row in report} == {"experts"} or by_block:  # a router that is not ours
        expected |= set(FIELDS) & {"logits", "router_weights", "router_input"}
    for layer in recorder.layers.values():
        missing = {name for name in FIELDS if getattr(layer, name) is None}
        assert missing == layer.missing.keys() & set(FIELDS) == expected
        if layer.ids is None:
            continue
        E = layer.tokens_per_expert.shape[0]
        T, K = layer.ids.shape
        if "logits" not in expected:
            assert layer.logits.shape[0] == layer.router_input.shape[0] == T
            assert layer.logits.shape[1] >= E
        assert torch.equal(layer.tokens_per_expert, taps.count_rows(layer.ids, E))
        for name in {"weights", "act_norm", *GRADIENTS} - missing:
            values = getattr(layer, name)
            assert values.shape == (T, K), name
            assert torch.isfinite(values).all(), name
            assert values.any(), name


@pytest.mark.parametrize("model_type", ["phimoe", "inkling", "zaya", "llama4", "deepseek_v4"])
def test_routers_with_a_forward_of_their_own_are_recorded_as_transformers_returns(
    model_type,
) -> None:
    """Record logits and weights as returned; smk_loss refuses to recompute such logits."""
    reference = tiny_models.build(model_type).eval()
    model = patch_model(copy.deepcopy(reference), self_check=False)
    seen: list[Any] = []
    for found in discover(reference):
        for _, router in found.routers:
            router.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    batch = tiny_models.inputs(model)
    tiny_models.loss(reference(**batch)).backward()
    with record(model, router_input=True) as recorder:
        tiny_models.loss(model(**batch)).backward()
    own = 0
    for layer, (hidden, out) in zip(recorder.layers.values(), seen, strict=True):
        logits, weights = (out[1], None) if model_type == "llama4" else out[:2]
        assert_close(layer.logits, logits, FP32, "logits")
        assert_close(layer.router_input, hidden.reshape(layer.router_input.shape), FP32, "input")
        if weights is not None:
            assert_close(layer.router_weights, weights, FP32, "weights")
        if layer.no_logits is not None:
            own += 1
            with pytest.raises(UnsupportedModelError, match="run a forward of their own"):
                router_logits(model, layer)
    assert own


def test_where_transformers_routes_the_experts_are_recorded() -> None:
    model = patch_model(ToyModel(), self_check=False)
    with record(model, router_input=True) as recorder:
        model(torch.randn(2, 5, 8)).loss.backward()
    assert list(recorder.layers) == ["layers.0", "layers.1"]
    for layer in recorder.layers.values():
        assert layer.ids.shape == layer.weights.shape == layer.grad_norm_params.shape == (10, 2)
        assert (layer.grad_norm_params > 0).all()
        assert layer.logits is layer.router_input is None
        assert layer.missing["logits"] == "transformers routes this block"


def test_llama4_rows_come_back_by_token() -> None:
    model = patch_model(tiny_models.build("llama4"), self_check=False)
    with record(model) as recorder:
        tiny_models.loss(model(**tiny_models.inputs(model))).backward()
    layer = next(iter(recorder.layers.values()))
    assert layer.ids.shape == layer.act_norm.shape == layer.grad_norm_params.shape == (14, 2)
    assert (layer.ids[:, 0] != layer.ids[:, 1]).all()
