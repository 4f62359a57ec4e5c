"""Quantised experts saved, loaded, copied, moved, taken from FP8 checkpoints, left out by DDP."""

from __future__ import annotations

import copy
import io
import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_patch import (
    UnsupportedModelError,
    dequantize_experts,
    load_quantized,
    patch_model,
    quantize_experts,
    unpatch_model,
)
from moe_patch.formats.tensor import QuantTensor
from tests.support import tiny_models
from tests.support.adapters import adapter_gradients, step
from tests.support.numerics import assert_bits
from tests.support.quant_models import (
    SIZES,
    STORAGES,
    adapted,
    build,
    logits,
    quantised,
)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_state_dict_is_plain_tensors_and_comes_back_exactly(storage: str) -> None:
    model = quantize_experts(build(), storage)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert not any(isinstance(value, QuantTensor) for value in saved.values())
    fresh = quantize_experts(tiny_models.randomise(build(), seed=9), storage)
    assert not torch.equal(logits(patch_model(fresh)), logits(patch_model(model)))
    result = fresh.load_state_dict(saved)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert_bits(logits(fresh), logits(model))
    assert saved.keys() == model.state_dict().keys()
    for name, value in fresh.state_dict().items():
        assert_bits(value, saved[name], name)


def test_plain_and_packed_states_do_not_mix() -> None:
    model, plain = quantize_experts(build(), "nf4"), build()
    with pytest.raises(RuntimeError, match="accepted: the same storage"):
        model.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match=r"gate_up_proj\.absmax"):
        plain.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="gate_up_proj"):
        quantize_experts(build(), "fp8").load_state_dict(model.state_dict())


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("own", "given"), [("nf4", ""), ("fp8", ""), ("nf4", "fp8"), ("fp8", "nf4")]
)
def test_assigned_states_do_not_mix_either(own: str, given: str, strict: bool) -> None:
    model = patch_model(quantize_experts(build(), own))
    other = quantize_experts(build(), "fp8" if own == "nf4" else "nf4") if given else build()
    expected = logits(model)
    with pytest.raises(RuntimeError, match=rf"gate_up_proj is stored in {own}, the state dict hol"):
        model.load_state_dict(other.state_dict(), assign=True, strict=strict)
    assert len(quantised(model)) == 4
    assert_bits(logits(model), expected)
    model.load_state_dict(quantize_experts(build(), own).state_dict(), assign=True)
    assert_bits(logits(model), expected)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("model_type", SIZES)
def test_loading_a_checkpoint_packs_what_it_reads(
    model_type: str, storage: str, tmp_path: Any
) -> None:
    model = build(model_type)
    model.save_pretrained(tmp_path)
    loaded = load_quantized(str(tmp_path), storage, dtype=torch.float32)
    expected = quantize_experts(model, storage).state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, value in loaded.state_dict().items():
        assert_bits(value, expected[name], name)
    assert "quantization_config" not in loaded.config.to_dict()


def test_loading_reads_the_config_that_the_options_name(tmp_path: Any) -> None:
    """Read the config that the options name: in the root (FP8), in a subfolder, or passed in."""
    model = build()
    model.save_pretrained(tmp_path / "sub")
    config = json.loads((tmp_path / "sub" / "config.json").read_text())
    fp8 = config | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(fp8))
    with pytest.raises(UnsupportedModelError, match="quantised with fp8, requested storage: nf4"):
        load_quantized(str(tmp_path), "nf4")
    for options in ({}, {"config": model.config}):
        loaded = load_quantized(
            str(tmp_path), "nf4", subfolder="sub", dtype=torch.float32, **options
        )
        expected = quantize_experts(copy.deepcopy(model), "nf4").state_dict()
        for name, value in loaded.state_dict().items():
            assert_bits(value, expected[name], name)


def test_copies_and_moves_keep_the_bytes() -> None:
    model = patch_model(quantize_experts(build(), "nf4"))
    expected = logits(model)
    copied = copy.deepcopy(model)
    for mine, theirs in zip(quantised(copied), quantised(model), strict=True):
        assert isinstance(mine, nn.Parameter)
        assert mine.weight.packed.data_ptr() != theirs.weight.packed.data_ptr()
    assert_bits(logits(copied), expected)
    assert_bits(logits(copied.to("cpu", torch.float32)), expected)
    lower = copied.to(torch.bfloat16)
    assert {p.dtype for p in quantised(lower)} == {torch.bfloat16}
    assert_bits(quantised(lower)[0].weight.packed, quantised(model)[0].weight.packed)


def test_the_experts_of_an_fp8_checkpoint_are_taken_as_they_are() -> None:
    from transformers.integrations.finegrained_fp8 import FP8Experts

    model, bytes_of = build(), {}
    for name, block in tiny_models.blocks(model):
        packed = quantize_experts(copy.deepcopy(block), "fp8").experts
        block.experts = FP8Experts(model.config, block_size=(128, 128))
        for projection in ("gate_up_proj", "down_proj"):
            weight = getattr(packed, projection).weight
            getattr(block.experts, projection).data = weight.packed
            getattr(block.experts, f"{projection}_scale_inv").data = weight.scales[0]
            bytes_of[f"{name}.experts.{projection}"] = weight.packed
    with pytest.raises(
        UnsupportedModelError, match=r"FP8Experts.*quantize_experts\(model, 'fp8'\)"
    ):
        patch_model(model)
    quantize_experts(model, "fp8", include=("*layers.1.*",))
    kinds = [type(block.experts) is FP8Experts for _, block in tiny_models.blocks(model)]
    assert kinds == [True, False]
    quantize_experts(model, "fp8")
    for name, values in bytes_of.items():
        assert model.get_parameter(name).weight.packed.data_ptr() == values.data_ptr()
    assert_bits(logits(patch_model(model)), logits(patch_model(quantize_experts(build(), "fp8"))))


def test_an_fp8_checkpoint_with_other_blocks_is_refused_by_name() -> None:
    from transformers.integrations.finegrained_fp8 import FP8Experts

    model = build()
    for _, block in tiny_models.blocks(model):
        block.experts = FP8Experts(model.config, block_size=(32, 32))
    with pytest.raises(UnsupportedModelError, match="one per 128 x 128 block"):
        quantize_experts(model, "fp8")


def test_data_parallel_leaves_packed_experts_to_each_rank(tmp_path: Any) -> None:
    """patch_model alone lets DDP wrap packed experts; the undo restores what DDP reads."""
    model = build(num_hidden_layers=1)
    batch = tiny_models.inputs(model)
    model = adapted(quantize_experts(model, "nf4"))
    model._ddp_params_and_buffers_to_ignore = ["another.library"]
    expected = step(patch_model(model), batch)
    gradients = {name: g.clone() for name, g in adapter_gradients(model).items()}
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model)
        assert_bits(step(wrapped, batch), expected)
        for name, gradient in adapter_gradients(model).items():
            assert_bits(gradient, gradients[name], name)
        unpatch_model(model)
        assert model._ddp_params_and_buffers_to_ignore == ["another.library"]
        assert not any("_ddp_ignored" in vars(p) for p in quantised(model))
        with pytest.raises(UnsupportedModelError, match="experts stored in 4 or 8 bits"):
            DistributedDataParallel(model)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("storage", ["nf4", "fp8"])
def test_fsdp2_in_a_group_of_one_process(storage: str, tmp_path: Any) -> None:
    """Torch 2.11 to 2.13 gathers only the bytes there; scales loaded in between take effect."""
    model = patch_model(quantize_experts(build(num_hidden_layers=1), storage))
    batch = tiny_models.inputs(model)
    expected = logits(model)
    packed = packed_names(model)
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        fully_shard(model)
        for _ in range(2):
            assert_bits(model(**batch).logits.detach(), expected)
        model.reshard()
        for name, p in model.named_parameters():
            if name in packed:
                p.to_local().held_weight.scales[0].zero_()
        assert not torch.equal(model(**batch).logits, expected)
    finally:
        torch.distributed.destroy_process_group()


def test_data_parallel_follows_adapters_added_after_the_patch() -> None:
    """Rename what DDP ignores when PEFT renames it, and forget it with the packed weights."""
    base = patch_model(quantize_experts(build(num_hidden_layers=1), "nf4"))
    assert set(base._ddp_params_and_buffers_to_ignore) == packed_names(base)
    model = patch_model(adapted(base))
    assert set(model._ddp_params_and_buffers_to_ignore) == packed_names(model)
    dequantize_experts(model)
    assert "_ddp_params_and_buffers_to_ignore" not in vars(model)


def packed_names(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if isinstance(p, QuantTensor)}


def test_fp8_bytes_are_not_copied_as_numbers() -> None:
    """Refuse FP8 bytes: their shape fits, and strict=False would drop their scales silently."""
    packed = quantize_experts(build(), "fp8").state_dict()
    model = dequantize_experts(quantize_experts(build(), "fp8"))
    expected = logits(model)
    for options in ({"strict": False}, {"strict": False, "assign": True}):
        with pytest.raises(RuntimeError, match="the state dict holds it as fp8 with scales"):
            model.load_state_dict(packed, **options)
        assert_bits(logits(model), expected)


@pytest.mark.parametrize("storage", STORAGES)
def test_share_memory(storage: str) -> None:
    model = quantize_experts(build(), storage)
    expected = logits(model)
    model.share_memory()
    for one in quantised(model):
        assert one.packed.is_shared()
        assert all(scale.is_shared() for scale in one.weight.scales)
    assert_bits(logits(model), expected)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        (".experts.2.", r"has shape \(7, .*the config requires \(8,"),
        ("layers.0.mlp.experts.2.down_proj", r"down_proj: the checkpoint has shape \(7,"),
        ("layers.0.mlp.experts.", "the checkpoint has no such weight"),
    ],
)
def test_part_of_a_checkpoint_is_refused(
    storage: str, left_out: str, said: str, tmp_path: Any
) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    kept = {name: value for name, value in tensors.items() if left_out not in name}
    assert len(kept) < len(tensors)
    save_file(kept, file, {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=said):
        load_quantized(str(tmp_path), storage, dtype=torch.float32)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_config_of_another_width_is_refused(storage: str, tmp_path: Any) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["moe_intermediate_size"] *= 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="the config requires"):
        load_quantized(str(tmp_path), storage, dtype=torch.float32)
