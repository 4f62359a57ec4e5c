"""FP8 checkpoints on disk, as DeepSeek and Qwen publish them, through load_quantized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from moe_patch import UnsupportedModelError, load_quantized, patch_model, quantize_experts
from moe_patch.cli import main
from moe_patch.formats import fp8
from moe_patch.quant import fp8_loading
from moe_patch.quant.fp8_loading import can_keep_experts
from tests.support import tiny_models
from tests.support.cli_calls import answer
from tests.support.numerics import assert_bits, rel_err
from tests.support.quant_models import logits, quantised

WIDTH = 128  # gate and up have blocks of their own in such a file


# 5.16 fails before it reads a weight: it looks up the experts' implementation, and none is chosen.
loads_fp8 = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.17"),
    reason=f"transformers {transformers.__version__} loads no FP8 checkpoint of experts",
)


@pytest.fixture
def checkpoint(tmp_path: Path, capsys: Any) -> Path:
    """Every projection of experts and attention in e4m3 with ``weight_scale_inv`` beside it."""
    write_fp8(tmp_path, WIDTH)
    capsys.readouterr()  # its progress
    return tmp_path


def write_fp8(tmp_path: Path, width: int, **others: Any) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": width}
    model = tiny_models.build("qwen3_moe", **sizes, **others)
    model.save_pretrained(tmp_path)
    tensors = {}
    for name, value in load_file(tmp_path / "model.safetensors").items():
        tensors[name] = value
        if value.dim() == 2 and "_proj" in name:
            packed, scales = fp8.quantize(value[None] * 1.37, torch.device("cpu"))
            tensors |= {name: packed[0], f"{name}_scale_inv": scales[0]}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
        "fmt": "e4m3",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))


@loads_fp8
@pytest.mark.parametrize("computes", [True, False])
def test_bytes_and_scales_are_those_of_the_file(
    computes: bool, checkpoint: Path, monkeypatch: Any, caplog: Any
) -> None:
    """Keep the file's bytes and scales on a device that computes in FP8 (pretended here) or not."""
    if computes:
        monkeypatch.setattr(
            FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None
        )
    elif not can_keep_experts():
        pytest.skip(f"transformers {transformers.__version__} dequantises all FP8 weights")
    else:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = load_quantized(str(checkpoint), "fp8", dtype=torch.float32)
    assert not [record for record in caplog.records if record.name == "moe_patch"]
    stored = load_file(checkpoint / "model.safetensors")
    for path, block in tiny_models.blocks(model):
        up, down = block.experts.gate_up_proj.weight, block.experts.down_proj.weight
        for e in range(up.shape[0]):
            for name, packed, scales in (
                ("gate", up.packed[e, :WIDTH], up.scales[0][e, :1]),
                ("up", up.packed[e, WIDTH:], up.scales[0][e, 1:]),
                ("down", down.packed[e], down.scales[0][e]),
            ):
                key = f"{path}.experts.{e}.{name}_proj.weight"
                assert_bits(packed.view(torch.uint8), stored[key].view(torch.uint8), key)
                assert_bits(scales, stored[f"{key}_scale_inv"], key)
    if not computes:
        assert_linears_are_dequantised(model, stored)
        return
    assert model.config.quantization_config.quant_method == "fp8"
    # Linear modules of such a model are packed by transformers.
    with pytest.raises(UnsupportedModelError, match="q_proj is a FP8Linear"):
        patch_model(model).save_pretrained(checkpoint / "again")
    assert not (checkpoint / "again").exists()


def assert_linears_are_dequantised(model: Any, stored: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    wide = fp8.dequantize(stored[name], stored[f"{name}_scale_inv"], torch.float32)
    assert_bits(model.get_parameter(name).data, wide)
    assert "quantization_config" not in model.config.to_dict()
    # Every weight of the model takes part in a forward.
    assert logits(patch_model(model)).isfinite().all()


@loads_fp8
def test_a_model_that_transformers_loaded_is_taken_over(checkpoint: Path, monkeypatch: Any) -> None:
    """Refuse the model in patch_model, and name quantize_experts, which takes it over."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with pytest.raises(UnsupportedModelError, match=r"quantize_experts\(model, 'fp8'\)"):
        patch_model(model)
    stored = [block.experts.down_proj.data_ptr() for _, block in tiny_models.blocks(model)]
    patch_model(quantize_experts(model, "fp8"))
    kept = [one.weight.packed.data_ptr() for one in quantised(model)][1::2]
    assert kept == stored


def test_inspect_says_what_is_taken_as_stored(checkpoint: Path, capsys: Any) -> None:
    assert main(["inspect", str(checkpoint)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("experts in")]
    assert [line.partition(":")[0] for line in lines] == [
        "experts in nf4 (quantize_experts)", "experts in fp8 (as stored, load_quantized)",
    ]  # fmt: skip
    assert answer(capsys, "inspect", str(checkpoint))["quantised_with"] == "fp8"


@loads_fp8
@pytest.mark.parametrize("key", ["up_proj.weight_scale_inv", "up_proj.weight"])
def test_a_missing_part_is_named(key: str, checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    for name in [one for one in tensors if one.endswith(key) and "layers.1." in one]:
        del tensors[name]
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    # transformers reports a failed conversion itself.
    with pytest.raises((UnsupportedModelError, RuntimeError), match="no FP8|conversion of the w"):
        load_quantized(str(checkpoint), "fp8")


@loads_fp8
@pytest.mark.parametrize("width", [WIDTH // 2, WIDTH], ids=["shared blocks", "old transformers"])
def test_a_checkpoint_that_is_quantised_again_is_named(
    width: int, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    """Gate and up of 64 rows have scales of their own, but here they would share a block."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if width == WIDTH:
        monkeypatch.setattr(fp8_loading, "can_keep_experts", lambda: False)
    write_fp8(tmp_path, width)
    model = load_quantized(str(tmp_path), "fp8", dtype=torch.float32)
    (line,) = (record for record in caplog.records if record.name == "moe_patch")
    assert "has dequantised this FP8 checkpoint" in line.message
    assert len(quantised(model)) == 4
    plain = tiny_models.build("qwen3_moe", hidden_size=64, moe_intermediate_size=width)
    for name, value in plain.named_parameters():
        if "_proj" in name:
            value.data *= 1.37
    expected = logits(patch_model(quantize_experts(plain, "fp8")))
    assert rel_err(logits(patch_model(model)), expected) < 0.2
