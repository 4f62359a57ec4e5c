"""Test merging into packed checkpoints: FP8 of 128 x 128 blocks and MXFP4."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from moe_patch.cli import CHECK_FAILED
from moe_patch.formats import fp8, mxfp4
from moe_patch.serving.checkpoint import Checkpoint
from tests.quant.test_fp8_checkpoint import loads_fp8
from tests.support.adapters import EXPERTS
from tests.support.cli_calls import answer
from tests.support.merge_cases import (
    assert_equal_bits,
    by_peft,
    merged,
    save_adapter,
    save_base,
    tensors,
)
from tests.support.numerics import rel_err


def as_fp8(folder):
    """Store the experts of a base as in FP8 checkpoints, and return their values in fp32."""
    found, values = {}, {}
    for name, weight in tensors(folder).items():
        found[name] = weight
        if ".experts." in name:
            packed, scales = fp8.quantize(weight[None], weight.device)
            found[name], found[f"{name}_scale_inv"] = packed[0], scales[0]
            values[name] = fp8.dequantize(packed[0], scales[0], torch.float32)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return values


def as_mxfp4(folder):
    """Store the experts of a gpt-oss base in MXFP4, and return their values in fp32."""
    found, values = {}, {}
    for name, weight in tensors(folder).items():
        if name.endswith("_proj") and weight.dim() == 3:
            packed, scales = mxfp4.quantize(weight.float().transpose(1, 2).contiguous())
            found[f"{name}_blocks"] = packed.unflatten(-1, (-1, 16))
            found[f"{name}_scales"] = scales
            values[name] = (
                mxfp4.dequantize(packed, scales, torch.float32).transpose(1, 2).contiguous()
            )
        else:
            found[name] = weight
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return values


def packed_base(folder, model_type, store, method, over):
    """Save a packed base and an adapter; return the model, the experts' values and the config."""
    model = save_base(model_type, folder / "base", **over)
    save_adapter(model, folder / "adapter", target_parameters=list(EXPERTS))
    values = store(folder / "base")
    path = folder / "base" / "config.json"
    config = json.loads(path.read_text())
    block = {"weight_block_size": [128, 128]} if method == "fp8" else {}
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": method, **block}}))
    return model, values, config


PACKED = {
    "fp8": ("qwen3_moe", as_fp8, "fp8", {}),
    "mxfp4": ("gpt_oss", as_mxfp4, "mxfp4", {"hidden_size": 32, "intermediate_size": 64}),
}


@pytest.mark.parametrize("method", [pytest.param("fp8", marks=loads_fp8), "mxfp4"])
def test_logits_of_packed_results(method, tmp_path, capsys):
    """Mutants: the base in place of the result; a limit that ignores what encoding loses."""
    packed_base(tmp_path, *PACKED[method])
    merged(tmp_path)
    capsys.readouterr()
    argv = ["verify", "--adapter", str(tmp_path / "adapter"), str(tmp_path / "base")]
    argv += ["--device", "cpu", "--merged"]
    said = answer(capsys, *argv, str(tmp_path / "out"))
    assert said["passed"]
    assert said["logits"]["merged"] < 1e-5
    assert said["logits"]["merged"] < said["logits"]["rounding"] < said["logits"]["adapter"]
    wrong = answer(capsys, *argv, str(tmp_path / "base"), status=CHECK_FAILED)
    assert abs(wrong["logits"]["rounding"] - wrong["logits"]["adapter"]) < 1e-5
    assert len(wrong["failed"]) == wrong["weights"]


@pytest.mark.parametrize(
    ("model_type", "store", "method", "over", "limit"),
    [(*PACKED["fp8"], 0.04), (*PACKED["mxfp4"], 0.13)],
)
def test_packed_checkpoints(model_type, store, method, over, limit, tmp_path):
    """Encoding again stays within the reported error; with dtype=bfloat16 the merge is exact."""
    model, values, config = packed_base(tmp_path, model_type, store, method, over)
    shutil.copytree(tmp_path / "base", tmp_path / "wide")
    parts = ("_blocks", "_scales", "_scale_inv")
    wide = {k: v for k, v in tensors(tmp_path / "base").items() if not k.endswith(parts)} | values
    save_file(wide, tmp_path / "wide" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config))
    expected = by_peft(type(model), tmp_path / "wide", tmp_path / "adapter", tmp_path / "ref")

    _, exact = merged(tmp_path, out="bf16", dtype=torch.bfloat16)
    assert_equal_bits(exact, expected)
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())

    done, found = merged(tmp_path)
    assert found.keys() == tensors(tmp_path / "base").keys()
    checkpoint = Checkpoint(tmp_path / "out")
    errors = [rel_err(checkpoint.read(checkpoint.entries[name]), expected[name]) for name in values]
    assert 0.5 * limit < max(errors) < limit
    assert min(errors) <= done.errors[method] <= max(errors)


def test_mxfp4_is_encoded_to_the_nearest(tmp_path):
    """Representable values survive; other values go to the nearest one."""
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0])
    block = torch.cat([magnitudes, -magnitudes, magnitudes, -magnitudes])
    weight = torch.stack([block * 2.0**e for e in (-20, -3, 0, 5)])
    packed, scales = mxfp4.quantize(weight)
    assert torch.equal(mxfp4.dequantize(packed, scales, torch.float32), weight)
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    packed, scales = mxfp4.quantize(weight)
    found = mxfp4.dequantize(packed, scales, torch.float32)
    step = torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
    assert ((found - weight).abs() <= step * 1.0001).all()
    every = step[..., None] * torch.cat([magnitudes, -magnitudes])
    best = (every - weight[..., None]).abs().amin(-1)
    assert torch.allclose((found - weight).abs(), best, rtol=1e-6, atol=0)
    zero, _ = mxfp4.quantize(torch.zeros(1, 32))
    assert not zero.any()
