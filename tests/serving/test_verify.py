"""Test moe-patch verify --adapter: a correct merge passes, and each kind of wrong merge fails."""

from __future__ import annotations

import re
import shutil

import pytest
from safetensors.torch import save_file

from moe_patch.cli import CHECK_FAILED
from moe_patch.serving.adapter import read_adapter
from moe_patch.serving.checkpoint import Checkpoint
from moe_patch.serving.merge import merge
from moe_patch.serving.proof import weights
from tests.support.cli_calls import answer, error_of
from tests.support.merge_cases import plain, save_adapter, save_base, tensors

GATE, UP = "gate_proj", "up_proj"


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Folder with a base whose experts are square, an adapter and their merge."""
    folder = tmp_path_factory.mktemp("verify")
    model = save_base("qwen3_moe", folder / "base", moe_intermediate_size=32)
    save_adapter(model, folder / "adapter")
    empty = plain(folder / "base", folder / "adapter")
    merge(folder / "adapter", folder / "base", folder / "out", empty)
    return folder


def next_expert(name):
    """Return the name of the same tensor in the layer's next expert."""
    return re.sub(r"experts\.(\d+)", lambda m: f"experts.{(int(m[1]) + 1) % 8}", name)


def other_half(name):
    """Swap gate and up in a name."""
    swap = {GATE: UP, UP: GATE}
    return re.sub(f"{GATE}|{UP}", lambda m: swap[m[0]], name)


MUTANTS = {
    "transposed": lambda deltas, name: deltas[name].T,
    "gate and up swapped": lambda deltas, name: deltas[other_half(name)],
    "experts permuted": lambda deltas, name: deltas[next_expert(name)],
    "wrongly scaled": lambda deltas, name: deltas[name] * 1.5,
    "left out": lambda deltas, name: deltas[name] * 0,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_results_are_caught(mutant, result, tmp_path):
    before, after = tensors(result / "base"), tensors(result / "out")
    names = [
        n
        for n in after
        if ".experts." in n and (mutant != "gate and up swapped" or "down" not in n)
    ]
    deltas = {name: after[name].float() - before[name].float() for name in names}
    wrong = {
        name: (before[name].float() + MUTANTS[mutant](deltas, name)).bfloat16().contiguous()
        for name in names
    }
    shutil.copytree(result / "out", tmp_path / "wrong")
    save_file(after | wrong, tmp_path / "wrong" / "model.safetensors", metadata={"format": "pt"})
    adapter = read_adapter(result / "adapter", plain(result / "base", result / "adapter"))
    found = list(weights(adapter, Checkpoint(result / "base"), Checkpoint(tmp_path / "wrong")))
    experts = [one for one in found if "experts" in one.name]
    if mutant == "gate and up swapped":
        experts = [one for one in experts if GATE.replace("gate", "gate_up") in one.name]
    assert experts
    assert not any(one.passed for one in experts)
    assert all(one.passed for one in found if "experts" not in one.name)


def test_the_command(capsys, result, tmp_path):
    argv = ["verify", "--adapter", str(result / "adapter"), str(result / "base"), "--device", "cpu"]
    found = answer(capsys, *argv, "--merged", str(result / "out"))
    assert found["passed"]
    assert found["weights"] == 2 * (2 * 8 + 4 + 1)
    assert found["worst_ulps"] <= 0.51
    assert found["logits"]["merged"] < 1e-5
    assert found["logits"]["rounding"] < found["logits"]["adapter"] / 5
    base = str(result / "base")
    wrong = answer(capsys, *argv, "--merged", base, "--no-logits", status=CHECK_FAILED)
    assert len(wrong["failed"]) == wrong["weights"]
    assert abs(wrong["least_share"]) < 1e-6
    assert "exactly one of --merged DIR and --exported DIR" in error_of(capsys, *argv)
    assert "name MODEL, or --adapter DIR" in error_of(capsys, "verify")
