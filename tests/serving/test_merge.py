"""Test moe-patch merge: bit for bit PEFT's merge into the fp32 base, cast to each dtype."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from moe_patch import convert_adapter
from moe_patch.runtime.peft_release import rewrites_targets
from moe_patch.serving.checkpoint import INDEX, Checkpoint
from moe_patch.serving.proof import ulp
from tests.support import tiny_models, window
from tests.support.adapters import EXPERTS
from tests.support.cli_calls import answer
from tests.support.merge_cases import (
    LAYOUTS,
    assert_equal_bits,
    by_peft,
    merged,
    save_adapter,
    save_base,
    tensors,
)

# PEFT 0.21 loses adapters of these when it loads them. A merge before saving is correct.
LOST_BY_PEFT = ("laguna", "mistral_large4")
CASES = [
    pytest.param(name, marks=() if name in LAYOUTS else pytest.mark.slow)
    for name in tiny_models.patchable()
    if name not in LOST_BY_PEFT
]


@pytest.mark.parametrize("model_type", CASES)
def test_every_layout_is_bit_for_bit_that_of_peft(model_type, tmp_path):
    """Mutants: the scale omitted, gate and up swapped, experts in another order."""
    model = save_base(model_type, tmp_path / "base")
    before = tensors(tmp_path / "base")
    save_adapter(model, tmp_path / "adapter")
    done, found = merged(tmp_path)
    expected = by_peft(type(model), tmp_path / "base", tmp_path / "adapter", tmp_path / "ref")
    changed = {name for name in found if not torch.equal(found[name], before[name])}
    assert len(changed) == done.changed > 0
    assert found.keys() == before.keys() == expected.keys()
    assert_equal_bits({k: found[k] for k in changed}, {k: expected[k] for k in changed})
    assert all(found[name].dtype == before[name].dtype for name in found)
    config = (tmp_path / "out" / "config.json").read_bytes()
    assert config == (tmp_path / "base" / "config.json").read_bytes()


@pytest.mark.parametrize("model_type", LOST_BY_PEFT)
def test_adapters_that_peft_loses_are_merged_whole(model_type, tmp_path):
    """Reference: PEFT's merge of the adapter before it is saved."""
    model = save_base(model_type, tmp_path / "base", torch.float32)
    adapter = save_adapter(model, tmp_path / "adapter")
    _, found = merged(tmp_path)
    adapter.merge_and_unload().save_pretrained(tmp_path / "ref")
    assert_equal_bits(found, tensors(tmp_path / "ref"))


ATTENTION = ["q_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_a_device_computes_the_same_values(model_type, device, tmp_path, capsys):
    """Compare with the sums on the CPU: equal bits there, elsewhere one rounding may differ."""
    model = save_base(model_type, tmp_path / "base")
    save_adapter(model, tmp_path / "adapter")
    _, expected = merged(tmp_path, out="cpu")
    _, found = merged(tmp_path, device=device)
    differ = {name for name in found if not torch.equal(found[name], expected[name])}
    if device == "cpu":
        assert not differ
    for name in differ:
        wide, other = found[name].float(), expected[name].float()
        assert ((wide - other).abs() <= ulp(other, found[name].dtype)).all(), name
        assert (wide != other).float().mean() < 0.01, name
    capsys.readouterr()
    argv = ["verify", "--adapter", str(tmp_path / "adapter"), str(tmp_path / "base")]
    said = answer(capsys, *argv, "--merged", str(tmp_path / "out"), "--device", device)
    assert said["passed"]
    assert said["logits"]["merged"] < 1e-5
    print(f"{model_type} on {device}: {len(differ)} of {len(found)} tensors differ")


SPECIAL = {
    "dora": ({}, {"target_modules": ATTENTION, "use_dora": True}),
    "rslora and patterns": (
        {},
        {
            "target_modules": ATTENTION,
            "target_parameters": list(EXPERTS),
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2, "down_proj": 5},
            "alpha_pattern": {"v_proj": 7, "gate_up_proj": 3},
        },
    ),
    "tied embedding": (
        {"tie_word_embeddings": True},
        {"target_modules": [*ATTENTION, "embed_tokens"]},
    ),
    "tied head, saved whole": (
        {"tie_word_embeddings": True},
        {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]},
    ),
    "modules saved whole": (
        {},
        {"target_modules": ATTENTION, "modules_to_save": ["norm", "lm_head"]},
    ),
    "trained tokens": ({}, {"target_modules": ATTENTION, "trainable_token_indices": [3, 11]}),
    "trained tokens, tied": (
        {"tie_word_embeddings": True},
        {"target_modules": ATTENTION, "trainable_token_indices": [3, 11]},
    ),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_every_kind_of_adapter(name, tmp_path):
    over, options = SPECIAL[name]
    model = save_base("qwen3_moe", tmp_path / "base", **over)
    adapter = save_adapter(model, tmp_path / "adapter", **options)
    if "modules_to_save" in options or "trainable_token_indices" in options:
        stir(adapter, tmp_path / "adapter")
    done, found = merged(tmp_path)
    expected = by_peft(type(model), tmp_path / "base", tmp_path / "adapter", tmp_path / "ref")
    assert_equal_bits(found, expected)
    assert bool(done.notes) == bool(over)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    # PEFT 0.18 leaves a tie in the config that its own merge has broken.
    assert config["tie_word_embeddings"] == (bool(over) and "modules_to_save" not in options)
    assert ("lm_head.weight" in found) != config["tie_word_embeddings"]


def stir(adapter, folder):
    """Set random values in the modules that are saved whole, and save the adapter."""
    with torch.no_grad():
        for name, value in adapter.named_parameters():
            if "modules_to_save" in name or "trainable_tokens" in name:
                value.copy_(torch.randn(value.shape))
    adapter.save_pretrained(folder)


def test_the_layout_of_another_release_of_peft(tmp_path):
    """Mutant: a reader that does not rewrite the file's layout (see test_adapter_files)."""
    model = save_base("qwen3_moe", tmp_path / "base")
    save_adapter(model, tmp_path / "adapter", target_parameters=list(EXPERTS))
    other = "0.18.1" if rewrites_targets() else "0.21.2"
    convert_adapter(tiny_models.build("qwen3_moe"), tmp_path / "adapter", tmp_path / "other", other)
    _, here = merged(tmp_path)
    _, there = merged(tmp_path, "other", "out2")
    assert_equal_bits(there, here)


@pytest.mark.versions
@window.old_names
def test_an_adapter_of_single_experts(tmp_path):
    """Use the layout of transformers 4: one pair of factors per expert and projection."""
    model = save_base("qwen3_moe", tmp_path / "base")
    save_adapter(model, tmp_path / "adapter", target_modules=ATTENTION)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config["target_modules"] = ["gate_proj", "up_proj", "down_proj"]
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    factors = {}
    for name, weight in tensors(tmp_path / "base").items():
        if ".experts." in name:
            path = f"base_model.model.{name.removesuffix('.weight')}"
            factors[f"{path}.lora_A.weight"] = torch.randn(3, weight.shape[1])
            factors[f"{path}.lora_B.weight"] = torch.randn(weight.shape[0], 3)
    save_file(factors, tmp_path / "adapter" / "adapter_model.safetensors")
    done, found = merged(tmp_path)
    assert done.changed == len(factors) // 2
    before = tensors(tmp_path / "base")
    for name in (name for name in found if ".experts." in name):
        a, b = (
            factors[f"base_model.model.{name.removesuffix('weight')}lora_{x}.weight"] for x in "AB"
        )
        expected = before[name].float() + 2 * b @ a
        assert torch.equal(found[name], expected.bfloat16()), name


def test_files_of_a_size_and_of_another_dtype(tmp_path):
    model = save_base("qwen3_moe", tmp_path / "base")
    save_adapter(model, tmp_path / "adapter")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    _, whole = merged(tmp_path)
    assert not (tmp_path / "out" / INDEX).exists()
    _, parts = merged(tmp_path, out="parts", max_shard_size=20_000)
    files = Checkpoint(tmp_path / "parts").files
    assert len(files) > 3
    assert all((tmp_path / "parts" / file).stat().st_size < 30_000 for file in files)
    assert_equal_bits(parts, whole)
    assert (tmp_path / "parts" / "tokenizer.json").read_text() == "{}"
    again = type(model).from_pretrained(tmp_path / "parts")
    assert torch.equal(again.lm_head.weight, whole["lm_head.weight"])
    _, wide = merged(tmp_path, out="wide", dtype=torch.float32)
    expected = by_peft(type(model), tmp_path / "base", tmp_path / "adapter", tmp_path / "ref")
    assert_equal_bits(wide, expected)
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"
