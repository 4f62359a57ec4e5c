"""Copies of a patched model are independent; it saves the same state as an unpatched model."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import moe_patch
from moe_patch import patch_model, patch_report, patched, unpatch_model
from tests.support import tiny_models
from tests.support.adapters import FAMILIES
from tests.support.limits import HANG_S
from tests.support.numerics import assert_bits
from tests.support.snapshots import logits

ROOT = Path(moe_patch.__file__).parents[1]


@pytest.fixture(params=["qwen2_moe", "qwen3_moe"])
def model(request):
    """One family with a bound block (shared expert), one with router and experts alone."""
    return tiny_models.build(request.param)


def test_deepcopy_stands_on_its_own(model):
    batch = tiny_models.inputs(model)
    patch_model(model)
    out = logits(model, batch)
    twin = copy.deepcopy(model)
    assert_bits(logits(twin, batch), out)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.fill_(9.0)
    assert_bits(logits(model, batch), out)
    assert not torch.equal(logits(twin, batch), out)
    unpatch_model(twin)
    assert len(patch_report(model)) == 2
    assert not patch_report(twin)
    assert all(block.experts.config is twin.config for _, block in tiny_models.blocks(twin))
    assert_bits(logits(model, batch), out)


def test_torch_save_round_trip(model, tmp_path):
    batch = tiny_models.inputs(model)
    plain = logits(copy.deepcopy(model), batch)
    patch_model(model)
    torch.save(model, tmp_path / "model.pt")
    out = logits(model, batch)
    twin = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_bits(logits(twin, batch), out)
    assert patch_report(twin) == patch_report(model)
    assert_bits(logits(unpatch_model(twin), batch), plain)


LOAD = """
import pickle, sys, torch
with open(sys.argv[1], "rb") as file:
    model, batch, expected = pickle.load(file)
model.eval()
out = model(**batch).logits
assert torch.equal(out, expected), (out - expected).abs().max()
from moe_patch import patch_report, unpatch_model
assert [row.tier for row in patch_report(model)] == ["full", "full"], patch_report(model)
unpatch_model(model)
assert torch.isfinite(model(**batch).logits).all()
print("equal")
"""


def test_pickle_into_a_fresh_process(tmp_path):
    model = patch_model(tiny_models.build("qwen2_moe"))
    batch = {
        "input_ids": tiny_models.inputs(model)["input_ids"]
    }  # the aux loss needs a model built there
    expected = logits(copy.deepcopy(model), batch)
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps((model, batch, expected)))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, path],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.parametrize("model_type", FAMILIES)
def test_save_pretrained_writes_the_same_files(model_type, tmp_path):
    model = tiny_models.build(model_type)
    batch = tiny_models.inputs(model)
    model.save_pretrained(tmp_path / "plain")
    with patched(model):
        model.save_pretrained(tmp_path / "patched")
        out = logits(model, batch)
    plain, ours = (
        load_file(tmp_path / name / "model.safetensors") for name in ("plain", "patched")
    )
    assert list(plain) == list(ours)
    for key in plain:
        assert_bits(ours[key], plain[key], key)
    configs = [(tmp_path / name / "config.json").read_text() for name in ("plain", "patched")]
    assert configs[0] == configs[1]
    twin = type(model).from_pretrained(
        tmp_path / "patched", attn_implementation="eager", dtype="auto"
    )
    assert_bits(logits(patch_model(twin), batch), out)
