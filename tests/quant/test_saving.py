"""Test save_pretrained of packed experts: read by transformers, or only by load_quantized."""

from __future__ import annotations

import copy
import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from moe_patch import (
    UnsupportedModelError,
    UnsupportedOptionError,
    dequantize_experts,
    load_quantized,
    patch_model,
    quantize_experts,
)
from moe_patch.quant import shard_files
from tests.quant.test_fp8_checkpoint import loads_fp8
from tests.quant.test_mxfp4 import checkpoint as mxfp4_checkpoint  # noqa: F401
from tests.quant.test_mxfp4 import ours, theirs
from tests.support import tiny_models
from tests.support.numerics import assert_bits
from tests.support.quant_models import SIZES, adapted, build, logits, quantised

WIDE = {"hidden_size": 64, "moe_intermediate_size": 128}
EAGER = {"attn_implementation": "eager"}


def assert_same(found: Any, expected: Any) -> None:
    state = expected.state_dict()
    assert found.state_dict().keys() == state.keys()
    for name, value in found.state_dict().items():
        assert value.dtype == state[name].dtype, name
        assert_bits(value.view(torch.uint8), state[name].view(torch.uint8), name)


@pytest.mark.parametrize("size", ["100KB", "5GB"])
@pytest.mark.parametrize("model_type", SIZES)
def test_nf4_comes_back_bit_for_bit(model_type: str, size: str, tmp_path: Path) -> None:
    """Save one file or several; the first block's experts are plain."""
    model = quantize_experts(build(model_type), "nf4", exclude=("*layers.0.*",))
    model.save_pretrained(tmp_path / "saved", max_shard_size=size)
    files = sorted(file.name for file in (tmp_path / "saved").glob("*.safetensors"))
    assert (len(files) > 2) == (size == "100KB")
    loaded = load_quantized(str(tmp_path / "saved"), "nf4", dtype=torch.float32, **EAGER)
    assert type(loaded) is type(model)
    assert_same(loaded, model)
    # PEFT nests its wrappers in the order of the parameters.
    assert [n for n, _ in loaded.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert len(quantised(loaded)) == 2
    assert_bits(logits(patch_model(loaded)), logits(patch_model(model)))
    assert "quantization_config" not in loaded.config.to_dict()
    # Save the loaded model again, and read it in another dtype.
    loaded.save_pretrained(tmp_path / "again")
    lower = load_quantized(str(tmp_path / "again"), "nf4", dtype=torch.bfloat16)
    assert {p.dtype for p in quantised(lower)} == {torch.bfloat16}
    assert lower.lm_head.weight.dtype == torch.bfloat16
    lower.save_pretrained(tmp_path / "lower")
    assert_same(load_quantized(str(tmp_path / "lower"), "nf4"), lower)
    assert list(tmp_path.glob(".*")) == []


def test_transformers_raises_on_nf4(tmp_path: Path) -> None:
    """An unknown quant_method would only warn and leave the experts random."""
    model = quantize_experts(build(), "nf4")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="moe_patch_nf4"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    for cls in (type(model), type(model.base_model)):
        with pytest.raises(OSError, match=r"no file named model\.safetensors"):
            cls.from_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="in nf4, not in fp8"):
        load_quantized(str(tmp_path), "fp8")


@loads_fp8
@pytest.mark.parametrize("size", ["100KB", "5GB"])
def test_fp8_is_read_by_transformers(size: str, tmp_path: Path, monkeypatch: Any) -> None:
    """transformers dequantises FP8 without a card, and keeps it for one that computes in FP8."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = quantize_experts(tiny_models.build("qwen3_moe", **WIDE), "fp8")
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert not hasattr(model.config, "quantization_config")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **EAGER)
    assert_same(plain, dequantize_experts(copy.deepcopy(model)))
    assert_same(load_quantized(str(tmp_path), "fp8", dtype=torch.float32, **EAGER), model)
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    assert_same(load_quantized(str(tmp_path), "fp8", dtype=torch.float32, **EAGER), model)


def test_fp8_has_the_names_and_shapes_of_published_checkpoints(tmp_path: Path) -> None:
    quantize_experts(tiny_models.build("qwen3_moe", **WIDE), "fp8").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    assert (tensors[name].dtype, tuple(tensors[name].shape)) == (torch.float8_e4m3fn, (128, 64))
    scale = tensors[f"{name}_scale_inv"]
    assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (1, 1))
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (said["quant_method"], said["weight_block_size"]) == ("fp8", [128, 128])
    assert "model.layers.1.self_attn.q_proj" in said["modules_to_not_convert"]


def test_fp8_that_no_checkpoint_can_hold_is_refused(tmp_path: Path) -> None:
    """Refuse gate and up in one block, and all experts in one tensor: transformers misreads it."""
    for model_type, said in (("qwen3_moe", "64 rows.*share a block"), ("gpt_oss", "one tensor")):
        with pytest.raises(UnsupportedModelError, match=said):
            quantize_experts(build(model_type), "fp8").save_pretrained(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_mxfp4_is_read_by_transformers(mxfp4_checkpoint: Path, tmp_path: Path) -> None:  # noqa: F811
    model = ours(mxfp4_checkpoint)
    model.save_pretrained(tmp_path / "again")
    first, again = (
        load_file(folder / "model.safetensors") for folder in (mxfp4_checkpoint, tmp_path / "again")
    )
    assert first.keys() == again.keys()
    for name, value in first.items():
        assert_bits(again[name], value, name)
    assert_same(ours(tmp_path / "again"), model)
    assert_same(theirs(tmp_path / "again"), theirs(mxfp4_checkpoint))


def test_copies_pickles_and_inner_models_save_too(tmp_path: Path) -> None:
    model = quantize_experts(build(), "nf4")
    torch.save(model, tmp_path / "model.pt")
    read = torch.load(tmp_path / "model.pt", weights_only=False)
    for number, one in enumerate((copy.deepcopy(model), read, model.base_model)):
        one.save_pretrained(tmp_path / str(number))
        loaded = load_quantized(str(tmp_path / str(number)), "nf4", dtype=torch.float32)
        assert_same(loaded, one)
    dequantize_experts(model)
    assert "save_pretrained" not in model.__dict__
    model.save_pretrained(tmp_path / "plain")
    assert (tmp_path / "plain" / "model.safetensors").is_file()


def test_an_adapter_of_a_saved_model_loads_on_it(tmp_path: Path) -> None:
    quantize_experts(build(), "nf4").save_pretrained(tmp_path / "base")

    def base() -> Any:
        return load_quantized(str(tmp_path / "base"), "nf4", dtype=torch.float32, **EAGER)

    model = patch_model(adapted(base()))
    model.save_pretrained(tmp_path / "adapter")
    again = patch_model(PeftModel.from_pretrained(base(), tmp_path / "adapter"))
    assert_bits(logits(again), logits(model))


Usage = namedtuple("Usage", "total used free")


def full(*_: Any) -> Usage:
    return Usage(1, 1, 0)


def test_bad_places_and_models_are_one_sentence(tmp_path: Path, monkeypatch: Any) -> None:
    """Each failed save leaves nothing behind and keeps existing files."""
    model = quantize_experts(build(), "nf4")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.json").write_text("{}")
    with pytest.raises(UnsupportedOptionError, match="taken already holds a model"):
        model.save_pretrained(tmp_path / "taken")
    with pytest.raises(UnsupportedOptionError, match="state_dict is not accepted"):
        model.save_pretrained(tmp_path / "new", state_dict={})
    with pytest.raises(UnsupportedOptionError, match="max_shard_size is 'much'"):
        model.save_pretrained(tmp_path / "new", max_shard_size="much")
    with pytest.raises(UnsupportedModelError, match="holds adapters"):
        adapted(quantize_experts(build(), "nf4")).get_base_model().save_pretrained(tmp_path / "new")
    mixed = quantize_experts(build(), "nf4", exclude=("*layers.0.*",))
    quantize_experts(mixed, "fp8", exclude=("*layers.1.*",))
    with pytest.raises(UnsupportedModelError, match="stored in fp8 and nf4"):
        mixed.save_pretrained(tmp_path / "new")
    tied = build()
    first, second = (block.experts for _, block in tiny_models.blocks(tied))
    second.down_proj = first.down_proj
    with pytest.raises(UnsupportedModelError, match="layers.0.*layers.1.* share one packed"):
        quantize_experts(tied, "nf4").save_pretrained(tmp_path / "new")
    with monkeypatch.context() as patched:
        patched.setattr(shard_files.shutil, "disk_usage", full)
        with pytest.raises(UnsupportedOptionError, match="bytes, but the disk has 0 free"):
            model.save_pretrained(tmp_path / "new")

    def broken(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("safetensors.torch.save_file", broken)
        with pytest.raises(UnsupportedOptionError, match="cannot be written: .*No space left"):
            model.save_pretrained(tmp_path / "new")
    model.save_pretrained(tmp_path / "new", is_main_process=False)
    assert [one.name for one in tmp_path.iterdir()] == ["taken"]
    assert (tmp_path / "taken" / "config.json").read_text() == "{}"


def drop_file(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def cut_file(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-8])


def other_file(folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    shutil.copy(files[0], files[1])


def no_index(folder: Path) -> None:
    (folder / "moe_patch.index.json").unlink()


def another_width(folder: Path) -> None:
    about = json.loads((folder / "config.json").read_text())
    about["config"]["moe_intermediate_size"] *= 2
    (folder / "config.json").write_text(json.dumps(about))


def later_format(folder: Path) -> None:
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"format": 2}))


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (drop_file, UnsupportedOptionError, "missing or broken: .*00002-of"),
        (cut_file, UnsupportedOptionError, "missing or broken"),
        (other_file, UnsupportedOptionError, "is in moe_patch.index.json but not in"),
        (no_index, UnsupportedOptionError, "missing or broken: .*index"),
        (another_width, UnsupportedModelError, "but config.json needs"),
        (later_format, UnsupportedModelError, "format 2 of 'qwen3_moe'"),
    ],
)
def test_a_damaged_nf4_checkpoint_is_one_sentence(
    damage: Any, error: Any, said: str, tmp_path: Path
) -> None:
    quantize_experts(build(), "nf4").save_pretrained(tmp_path, max_shard_size="100KB")
    damage(tmp_path)
    with pytest.raises(error, match=said):
        load_quantized(str(tmp_path), "nf4", dtype=torch.float32)
