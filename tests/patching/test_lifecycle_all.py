"""Every recipe: patch, undo, copy, pickle and accelerate's hooks, bit for bit."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from torch import nn

from moe_patch import (
    UnsupportedModelError,
    patch_model,
    patch_report,
    supported_model_types,
    unpatch_model,
)
from tests.support import tiny_models
from tests.support.numerics import assert_bits
from tests.support.snapshots import (
    assert_same_attributes,
    assert_unchanged,
    class_attributes,
    logits,
    snapshot,
    tensors,
)

TIERS = supported_model_types()
PATCHED = tiny_models.patchable()
REFUSED = [name for name in tiny_models.runnable() if name not in PATCHED]


def add_hooks(model: nn.Module) -> None:
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook())


@pytest.fixture(params=PATCHED)
def model(request):
    return tiny_models.build(request.param)


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_changes_nothing(name):
    model = tiny_models.build(name)
    logits(model, tiny_models.inputs(model))
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError):
        patch_model(model)
    assert_unchanged(before, snapshot(model))
    with pytest.warns(UserWarning, match="moe_patch leaves"):
        patch_model(model, strict=False)
    rows = patch_report(model)
    assert {row.tier for row in rows} == {"refused"}
    assert all(row.reason for row in rows)
    unpatch_model(model)
    assert_unchanged(before, snapshot(model))


def test_undo_leaves_no_trace(model):
    batch = tiny_models.inputs(model)
    out = logits(model, batch)
    before, weights, classes = snapshot(model), tensors(model), class_attributes(model)
    patch_model(model)
    assert {row.tier for row in patch_report(model)} <= {"full", "experts"}
    logits(model, batch)
    assert tensors(model) == weights
    assert_same_attributes(classes, class_attributes(model))
    unpatch_model(model)
    assert_unchanged(before, snapshot(model))
    assert tensors(model) == weights
    assert_bits(logits(model, batch), out)


def test_copies_stand_on_their_own(model):
    batch = tiny_models.inputs(model)
    plain = logits(copy.deepcopy(model), batch)
    patch_model(model)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    out = logits(model, batch)
    for twin in twins:
        assert_bits(logits(twin, batch), out)
        assert_bits(logits(unpatch_model(twin), batch), plain)
        patch_model(twin)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.fill_(9.0)
        assert_bits(logits(model, batch), out)


def test_hooks_before_and_after(model):
    batch = tiny_models.inputs(model)
    hooked = copy.deepcopy(model)
    plain = logits(copy.deepcopy(model), batch)
    out = logits(patch_model(model), batch)

    add_hooks(model)
    assert_bits(logits(model, batch), out)
    unpatch_model(model)
    assert not any(key.startswith("_moe_patch") for m in model.modules() for key in m.__dict__)
    assert_bits(logits(model, batch), plain)

    add_hooks(hooked)
    logits(hooked, batch)
    before = snapshot(hooked)
    patch_model(hooked)
    assert_bits(logits(hooked, batch), out)
    unpatch_model(hooked)
    assert_unchanged(before, snapshot(hooked))

    remove_hook_from_module(hooked, recurse=True)
    assert_bits(logits(patch_model(hooked), batch), out)
