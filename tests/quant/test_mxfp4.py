"""MXFP4 checkpoints (gpt-oss): values, loading, training, state, against transformers' own."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moe_patch import (
    UnsupportedModelError,
    UnsupportedOptionError,
    dequantize_experts,
    load_quantized,
    patch_model,
    patch_report,
    quantize_experts,
)
from moe_patch.formats import mxfp4
from moe_patch.quant import memory
from moe_patch.quant.memory import experts_memory
from tests.support import tiny_models
from tests.support.adapters import adapter_gradients, limit_on, step
from tests.support.cli_calls import answer
from tests.support.numerics import FP32, assert_bits, assert_close, rel_err
from tests.support.quant_models import adapted, build, logits, quantised

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BF16 = torch.bfloat16
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder as gpt-oss is published: experts in blocks and scales, the rest in bf16."""
    model = build("gpt_oss").to(BF16)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        E, inputs, out = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (E, out, inputs // 32, 16)).to(torch.uint8)
        tensors[f"{name}_blocks"] = blocks
        tensors[f"{name}_scales"] = torch.randint(121, 126, blocks.shape[:3]).to(torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def theirs(folder: Path, dtype: torch.dtype = BF16) -> Any:
    """Load the checkpoint by transformers, which makes plain weights of it on a CPU."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **EAGER)
    # Older releases dequantise to bf16, whatever the dtype requested.
    return model.float() if dtype == torch.float32 else model


def ours(folder: Path, dtype: torch.dtype = BF16, device: str = "cpu") -> Any:
    return load_quantized(str(folder), "mxfp4", dtype=dtype, device=device, **EAGER)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_those_of_transformers(dtype: torch.dtype) -> None:
    """Decode every byte under every scale that fits the dtype, and under the smallest scale."""
    low, high = (112, 136) if dtype == torch.float16 else (2, 250)
    scales = torch.arange(low, high).to(torch.uint8).repeat_interleave(16).view(1, -1, 2)
    rows = scales.shape[1]
    packed = torch.arange(256).to(torch.uint8).repeat(-(-rows * 32 // 256))[: rows * 32]
    blocks = packed.view(1, rows, 2, 16)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    assert_bits(mxfp4.dequantize(blocks.flatten(2), scales, dtype), expected.contiguous())
    smallest = mxfp4.dequantize(packed[:16], torch.zeros(1).byte(), torch.float64)
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert smallest[::2].tolist() == [2.0**-127 * v for v in (*positive, *(-v for v in positive))]


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_a_checkpoint_is_taken_as_it_is(checkpoint: Path, dtype: torch.dtype) -> None:
    model, plain = ours(checkpoint, dtype), theirs(checkpoint, dtype)
    stored = load_file(checkpoint / "model.safetensors")
    assert len(quantised(model)) == 4
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            assert (parameter.weight.storage, parameter.dtype) == ("mxfp4", dtype)
            assert parameter.shape == plain.get_parameter(name).shape
            assert_bits(parameter.weight.packed.view(-1), stored[f"{name}_blocks"].view(-1), name)
            assert_bits(parameter.weight.scales[0], stored[f"{name}_scales"], name)
    # Rounding of products depends on memory layout, and these layouts differ.
    limit = FP32 if dtype == torch.float32 else 2e-2
    assert rel_err(logits(model), logits(plain)) < limit
    assert rel_err(logits(patch_model(model)), logits(patch_model(plain))) < limit
    assert {row.tier for row in patch_report(model)} == {"full"}
    for name, value in dequantize_experts(model).state_dict().items():
        assert_bits(value, plain.state_dict()[name], name)


def test_adapters_train_as_on_the_dequantised_model(checkpoint: Path, device: str) -> None:
    F32 = torch.float32
    both = ours(checkpoint, F32, device), theirs(checkpoint, F32).to(device)
    model, plain = (patch_model(adapted(one)) for one in both)
    batch = {k: v.to(device) for k, v in tiny_models.inputs(model.get_base_model()).items()}
    assert_close(step(model, batch), step(plain, batch), limit_on(batch))
    gradients = adapter_gradients(plain)
    assert gradients
    for name, gradient in adapter_gradients(model).items():
        assert gradient.any(), name
        assert_close(gradient, gradients[name], limit_on(batch), name)
    names = [row.lora for row in patch_report(model)]
    assert set(names) == {"fused (down_proj, gate_up_proj)"}


def test_its_state_dict_has_the_checkpoints_names_and_comes_back(checkpoint: Path) -> None:
    model = ours(checkpoint)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    stored = load_file(checkpoint / "model.safetensors")
    assert set(state) - {"lm_head.weight"} == set(stored) - {"lm_head.weight"}
    for name, value in stored.items():
        assert_bits(state[name], value, name)
    again = ours(checkpoint)
    for parameter in quantised(again):
        parameter.weight.packed.zero_()
    again.load_state_dict(state)
    assert_bits(logits(again), logits(model))
    with pytest.raises(RuntimeError, match="gate_up_proj"):
        again.load_state_dict(theirs(checkpoint).state_dict())


def test_copies_files_and_indices_keep_its_orientation(checkpoint: Path) -> None:
    model = patch_model(ours(checkpoint))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    expected = logits(model)
    assert_bits(logits(copy.deepcopy(model)), expected)
    assert_bits(logits(torch.load(file, weights_only=False)), expected)
    one = quantised(model)[0]
    whole = one.weight.experts(0, one.shape[0])
    assert whole.shape == one.shape
    assert_bits(one[2], whole[2])
    assert_bits(one[1:3], whole[1:3])
    assert_bits(one[torch.tensor([3, 0])], whole[torch.tensor([3, 0])])
    assert {p.dtype for p in quantised(model.to(torch.float32))} == {torch.float32}


def test_compiled_as_one_graph(checkpoint: Path) -> None:
    model = patch_model(ours(checkpoint, torch.float32), self_check=False)
    block = tiny_models.blocks(model)[0][1]
    hidden = torch.randn(1, 7, 64)
    expected = block(hidden)[0]
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    assert_bits(compiled(hidden)[0], expected)


def test_a_config_may_hold_its_quantisation_as_an_object(checkpoint: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoint)
    config.quantization_config = Mxfp4Config()
    loaded = load_quantized(str(checkpoint), "mxfp4", config=config, **EAGER)
    assert_bits(logits(loaded), logits(ours(checkpoint)))
    assert config.quantization_config.quant_method == "mxfp4", "the caller's config stays as it was"


def test_what_cannot_be_read_is_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match="quantised with mxfp4, requested storage: nf4; accepted"
    ):
        load_quantized(str(checkpoint), "nf4")
    with pytest.raises(UnsupportedOptionError, match=r"mxfp4 can only be loaded from checkpoints"):
        quantize_experts(build("gpt_oss"), "mxfp4")
    plain = tmp_path / "plain"
    build("gpt_oss").save_pretrained(plain)
    with pytest.raises(
        UnsupportedModelError, match="not quantised, requested storage: mxfp4; accepted"
    ):
        load_quantized(str(plain), "mxfp4")
    with pytest.raises(
        UnsupportedModelError, match="is stored in mxfp4 already; accepted: nf4, or"
    ):
        quantize_experts(ours(checkpoint), "nf4")


def test_memory_is_that_of_the_checkpoint(checkpoint: Path, capsys: Any) -> None:
    model = ours(checkpoint)
    taken = sum(p.weight.nbytes() for p in quantised(model))
    assert experts_memory(model).stored == taken
    assert taken == sum(memory.packed_bytes(tuple(p.shape), "mxfp4") for p in quantised(model))
    assert (
        taken / sum(2 * p.numel() for p in quantised(model)) == memory.bits_per_value("mxfp4") / 16
    )
    found = answer(capsys, "inspect", str(checkpoint))
    assert found["expert_bytes_quantised"]["mxfp4"] == taken
    assert "mxfp4" not in experts_memory(build("gpt_oss")).quantised


def test_a_scale_that_is_not_there_is_named(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    name = next(n for n in tensors if n.endswith("_scales"))
    del tensors[name]
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=f"the checkpoint has no {name}"):
        ours(checkpoint)
