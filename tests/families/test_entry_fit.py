"""Classes unlike their family entry: only the experts are patched, the rest stays transformers'.

Each change is made to the classes of transformers, as another release would make it.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from moe_patch import (
    UnsupportedModelError,
    patch_model,
    patch_report,
    register_family,
    unpatch_model,
)
from moe_patch.families import families
from tests.support import tiny_models
from tests.support.fit_cases import (
    CHANGES,
    SEEN_BEFORE_A_CALL,
    Experts,
    Router,
    StepRouter,
    doubled_experts,
    doubled_weights,
    experts_without_weights,
    one_expert_more,
    router_with_a_batch,
)
from tests.support.numerics import FP32, assert_bits
from tests.support.parity import Run, assert_parity, run_block, run_model
from tests.support.snapshots import assert_unchanged, snapshot


@pytest.fixture
def change(monkeypatch):
    """Replace functions of the classes for the duration of a test."""

    def put(places: dict[tuple[type, str], Any]) -> None:
        for (cls, name), function in places.items():
            monkeypatch.setattr(function, "__module__", cls.__module__)
            monkeypatch.setattr(cls, name, function)

    return put


def warned(model: nn.Module, **options: Any) -> list[str]:
    """Patch, and return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch_model(model, **options)
    ours = [w for w in caught if "moe_patch" in str(w.message)]
    assert {w.filename for w in ours} <= {__file__}
    return [str(w.message) for w in ours]


def run(model: nn.Module, what: str) -> Run:
    """Outputs and gradients of the first block."""
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1))
    args = (torch.rand(x.shape),) if what == "block with another argument" else ()
    result = run_block(model.model.layers[0].mlp, x, *args)
    model.zero_grad(set_to_none=True)
    return result


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@pytest.mark.parametrize("what", CHANGES)
def test_the_experts_are_patched_alone(change, what, strict) -> None:
    places, reason = CHANGES[what]
    change(places)
    model = tiny_models.build("qwen2_moe")
    expected, before = run(model, what), snapshot(model)
    (message,) = warned(model, strict=strict)
    assert message.startswith(
        "moe_patch patches only the experts of 2 of 2 MoE blocks, first model"
    )
    rows = patch_report(model)
    assert {(row.tier, row.router, row.shared, row.self_check) for row in rows} == {
        ("experts", "transformers", "transformers", "passed")
    }
    assert message.endswith(f": {rows[0].reason}")
    assert {row.reason for row in rows} == {rows[0].reason}
    assert "does not fit this class (transformers" in rows[0].reason
    assert re.search(reason, rows[0].reason), rows[0].reason
    assert_parity(run(model, what), expected, FP32)

    patched = snapshot(model)
    assert warned(model, strict=strict) == []
    assert_unchanged(patched, snapshot(model))
    assert patch_report(model) == rows

    unpatch_model(model)
    assert_unchanged(before, snapshot(model))
    for name, value in run(model, what).items():
        assert_bits(value, expected[name], name)


def test_experts_with_a_bound_forward_are_patched_alone(change) -> None:
    """Keep the reason after the call also for experts that transformers does not decorate."""
    change({(StepRouter, "forward"): router_with_a_batch})
    model = tiny_models.build("step3p7")
    batch = tiny_models.inputs(model)
    expected, before = run_model(model, batch), snapshot(model)
    (message,) = warned(model)
    (row,) = patch_report(model)
    assert (row.tier, row.self_check) == ("experts", "passed")
    assert "it returns (float32 (1, 48, 8), " in row.reason
    assert row.reason.endswith("; " + message.partition("first layers.1.mlp: ")[2])
    assert_parity(run_model(model, batch), expected, FP32)
    assert warned(model) == []
    assert patch_report(model) == [row]
    unpatch_model(model)
    assert_unchanged(before, snapshot(model))


@pytest.mark.parametrize("what", SEEN_BEFORE_A_CALL)
def test_what_a_class_lacks_needs_no_self_check(change, what) -> None:
    places, reason = CHANGES[what]
    change(places)
    model = tiny_models.build("qwen2_moe")
    expected = run(model, what)
    (message,) = warned(model, self_check=False)
    assert re.search(reason, message), message
    assert {(row.tier, row.self_check) for row in patch_report(model)} == {("experts", "off")}
    assert_parity(run(model, what), expected, FP32)


def test_a_patched_block_that_no_longer_fits_gives_its_router_back() -> None:
    """Unbind router and block, and bind only the experts, when an equal patch is applied later."""
    model = tiny_models.build("qwen2_moe")
    patch_model(model)
    for layer in model.model.layers:
        layer.mlp.shared_mlp = layer.mlp._modules.pop("shared_expert")
    (message,) = warned(model)
    assert "has no attribute 'shared_expert'" in message
    rows = patch_report(model)
    assert {row.tier for row in rows} == {"experts"}
    assert all(row.reason and message.endswith(row.reason) for row in rows)
    for layer in model.model.layers:
        assert "forward" not in layer.mlp.__dict__
        assert "forward" not in layer.mlp.gate.__dict__
    unpatch_model(model)
    assert patch_report(model) == []


# --- still refused --------------------------------------------------------------------------------


def refused(model: nn.Module) -> str:
    """Return the message of the refusal: an error if ``strict``, else the reason of a row."""
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError) as error:
        patch_model(model)
    assert_unchanged(before, snapshot(model))
    (warning,) = warned(model, strict=False)
    assert warning.startswith("moe_patch leaves 2 of 2 MoE blocks to transformers, first model")
    rows = patch_report(model)
    assert {row.tier for row in rows} == {"refused"}
    assert rows[0].reason in str(error.value)
    unpatch_model(model)
    assert_unchanged(before, snapshot(model))
    return str(error.value)


@pytest.mark.parametrize("what", ["two values", "another flag"])
def test_experts_that_differ_are_refused_with_both_reasons(change, monkeypatch, what) -> None:
    """Refuse with both reasons, whether the self-check or an earlier check finds the change."""
    places, reason = CHANGES[what]
    change(places)
    monkeypatch.setattr(Experts.forward, "__wrapped__", doubled_experts)
    message = refused(tiny_models.build("qwen2_moe"))
    assert re.search(f"layers.0.mlp: self-check: .*{reason}", message), message
    assert "nor do the experts pass alone: model.layers.0.mlp.experts: self-check" in message
    assert "experts output differs from transformers by" in message


def test_experts_unlike_the_entry_are_refused_and_say_so_once(monkeypatch) -> None:
    monkeypatch.setattr(Experts.forward, "__wrapped__", experts_without_weights)
    message = refused(tiny_models.build("qwen2_moe"))
    assert "Experts: its family entry does not fit this class" in message
    assert "its forward takes (self, hidden_states, top_k_index)" in message
    assert message.count("does not fit") == 1
    assert "random data" not in message


@pytest.mark.parametrize(
    ("router", "what"),
    [
        (doubled_weights, "gate: self-check: routing weights differs from transformers by"),
        (one_expert_more, "self-check: 48 of 48 rows choose other experts"),
    ],
)
def test_other_numbers_are_refused(change, router, what) -> None:
    change({(Router, "forward"): router})
    message = refused(tiny_models.build("qwen2_moe"))
    assert what in message
    assert "does not fit" not in message


def test_a_config_that_cannot_run_keeps_its_own_message() -> None:
    model = tiny_models.build("qwen2_moe")
    for layer in model.model.layers:
        layer.mlp.gate.top_k = 99
    message = refused(model)
    assert "the block does not run on random data" in message
    assert "check the config's values" in message
    assert "does not fit" not in message


@pytest.mark.parametrize("what", ["two values", "another flag"])
def test_an_entry_of_the_users_own_is_refused(change, what) -> None:
    """Refuse a user's entry: patching the experts alone would hide a mistake in the entry."""
    places, reason = CHANGES[what]
    change(places)
    (own,) = (spec for spec in families() if "qwen2_moe" in spec.model_types)
    register_family(dataclasses.replace(own, router_reads_weight=not own.router_reads_weight))
    try:
        message = refused(tiny_models.build("qwen2_moe"))
    finally:
        register_family(own)
    assert re.search(reason, message), message
    assert "random data" not in message


def test_experts_by_themselves_are_patched_without_a_warning() -> None:
    """Patch a lone experts module, as the replay of a stored call rebuilds it."""
    experts = tiny_models.build("qwen3_moe").model.layers[0].mlp.experts
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch_model(experts)
    assert [row.reason for row in patch_report(experts)] == [""]
