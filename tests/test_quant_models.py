"""quantize_experts on models: beside PEFT and transformers, saved, loaded, and undone."""

from __future__ import annotations

import copy
import io
import json
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moe_patch import (
    UnsupportedModelError,
    UnsupportedOptionError,
    dequantize_experts,
    load_quantized,
    lora_targets,
    patch_model,
    patch_report,
    quantize_experts,
    unpatch_model,
)
from moe_patch.quant.memory import experts_memory
from moe_patch.quant.surgery import ignore_in_ddp
from moe_patch.quant.tensor import QuantTensor
from tests import tiny_models
from tests.adapters import adapt, adapter_gradients, lora_config, step
from tests.numerics import FP32, assert_bits, assert_close

STORAGES = ("nf4", "fp8")
SIZES = {
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 64},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 64},
}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def build(model_type: str = "qwen3_moe", **overrides: Any) -> nn.Module:
    return tiny_models.build(model_type, **SIZES[model_type], **overrides)


def quantised(model: nn.Module) -> list[QuantTensor]:
    return [p for p in model.parameters() if isinstance(p, QuantTensor)]


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**tiny_models.inputs(model)).logits


def adapted(model: nn.Module) -> nn.Module:
    return adapt(model, lora_config(EXPERTS, []))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("model_type", SIZES)
def test_adapters_train_as_on_the_dequantised_model(model_type: str, storage: str) -> None:
    model = quantize_experts(build(model_type), storage)
    plain = dequantize_experts(copy.deepcopy(model))
    assert len(quantised(model)) == 2 * model.config.num_hidden_layers
    assert not quantised(plain)
    batch = tiny_models.inputs(model)
    model, plain = adapted(model), adapted(plain)
    for one in (model, plain):
        patch_model(one, fuse_lora="require")
    assert_bits(step(model, batch), step(plain, batch))
    found, expected = adapter_gradients(model), adapter_gradients(plain)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.any(), name
        assert_bits(found[name], gradient, name)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("model_type", SIZES)
def test_patched_is_what_transformers_computes_from_the_same_bytes(
    model_type: str, storage: str
) -> None:
    model = quantize_experts(build(model_type), storage)
    model.set_experts_implementation("eager")
    expected = logits(model)
    assert_close(logits(patch_model(model)), expected, FP32)
    assert_close(logits(unpatch_model(model)), expected, 0)


def test_an_adapter_goes_from_the_quantised_model_to_the_plain_one() -> None:
    model = adapted(quantize_experts(build(), "nf4"))
    plain = patch_model(adapted(build()))
    saved = get_peft_model_state_dict(model)
    assert not any("absmax" in name for name in saved)
    for value in saved.values():
        value.normal_()
    loaded = set_peft_model_state_dict(plain, saved)
    assert not loaded.unexpected_keys
    for name, value in get_peft_model_state_dict(plain).items():
        assert_bits(value, saved[name], name)
    before = logits(adapted(build()))
    assert (logits(plain) - before).norm() > 0.1 * before.norm()


def test_disabled_adapters_are_the_base_and_a_merge_is_refused() -> None:
    base = logits(patch_model(quantize_experts(build(), "nf4")))
    model = patch_model(adapted(quantize_experts(build(), "nf4")))
    with model.disable_adapter():
        assert_bits(logits(model), base)
    with pytest.raises(UnsupportedModelError, match="dequantize_experts"):
        model.merge_adapter()


def test_quantised_after_patching_and_under_adapters() -> None:
    expected = logits(patch_model(adapted(quantize_experts(build(), "fp8"))))
    model = quantize_experts(patch_model(adapted(build())), "fp8")
    assert_bits(logits(model), expected)
    assert_bits(logits(quantize_experts(model, "fp8")), expected)
    (row,) = {row.self_check for row in patch_report(model)}
    assert row == "passed"


def test_the_report_says_why_nothing_was_checked() -> None:
    model = patch_model(quantize_experts(build(), "nf4"))
    assert {row.self_check for row in patch_report(model)} == {
        "skipped: experts stored in nf4",
    }


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
    """An FP8 config in the folder's root, another in a subfolder, a third handed in."""
    model = build()
    model.save_pretrained(tmp_path / "sub")
    config = json.loads((tmp_path / "sub" / "config.json").read_text())
    fp8 = config | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(fp8))
    with pytest.raises(UnsupportedModelError, match="quantised with fp8, asked for nf4"):
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


def test_every_other_operation_is_refused_by_name() -> None:
    (up, *_) = quantised(quantize_experts(build(), "nf4"))
    x = torch.randn(3, 64)
    for operation in (
        lambda: x @ up,
        lambda: up + 1,
        lambda: up.mT,
        lambda: up.sum(),
        lambda: up.float() * 2,
        lambda: up[:, 0],
        lambda: up[::2],
        lambda: up[:, torch.tensor([0])],
        lambda: up[torch.tensor([0]), torch.tensor([0])],
        lambda: torch.nn.functional.linear(x, up),
    ):
        with pytest.raises(UnsupportedModelError, match="experts stored in"):
            operation()
    assert_bits(up[1], up.weight[1])
    assert_bits(up[torch.tensor([2, 0])], torch.stack([up.weight[2], up.weight[0]]))
    assert_bits(up[1:3], up.weight.stored_experts(1, 3))
    last = up.shape[0] - 1
    assert_bits(up[-1], up.weight[last])
    assert_bits(up[torch.tensor([-1])], up.weight[last][None])
    for outside in (lambda: up[last + 1], lambda: up[torch.tensor([-last - 2])]):
        with pytest.raises(IndexError):
            outside()
    assert not up.requires_grad


def test_adapters_added_after_patching_ask_for_another_patch() -> None:
    model = adapted(patch_model(quantize_experts(build(), "nf4")))
    with pytest.raises(UnsupportedModelError, match="call it again after adding adapters"):
        logits(model)
    expected = logits(patch_model(adapted(quantize_experts(build(), "nf4"))))
    assert_bits(logits(patch_model(model)), expected)


def test_some_blocks_only() -> None:
    model = quantize_experts(build(num_hidden_layers=3), "nf4", exclude=("*layers.1.*",))
    layers = model.model.layers
    packed = [isinstance(layer.mlp.experts.down_proj, QuantTensor) for layer in layers]
    assert packed == [True, False, True]
    with pytest.raises(UnsupportedModelError, match="no MoE block to quantise"):
        quantize_experts(model, "nf4", include=("nothing",))


def test_what_cannot_be_quantised_leaves_the_model_as_it_was() -> None:
    model = tiny_models.build("qwen3_moe", hidden_size=64, moe_intermediate_size=48)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UnsupportedModelError, match=r"experts\.down_proj: nf4 needs rows of"):
        quantize_experts(model, "nf4")
    assert not quantised(model)
    assert model.state_dict().keys() == before.keys()
    with pytest.raises(UnsupportedOptionError, match="storage is 'int4'; accepted: nf4, fp8"):
        quantize_experts(model, "int4")
    with pytest.raises(UnsupportedModelError, match="stored in nf4 already"):
        quantize_experts(quantize_experts(build(), "nf4"), "fp8")
    with pytest.raises(UnsupportedModelError, match="no quantised experts"):
        dequantize_experts(model)
    with pytest.raises(UnsupportedModelError, match="cannot be quantised"):
        quantize_experts(model.to("meta"), "fp8")


def test_bytes_under_a_parametrization_never_enter_a_product() -> None:
    """What a foreign library stores as bytes is seen through its parametrization, or refused."""
    model = build()
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj = nn.Parameter(
            torch.zeros(4, 128, 32, dtype=torch.uint8), requires_grad=False
        )
    with pytest.raises(UnsupportedModelError, match=r"stored in torch\.uint8"):
        patch_model(model)


@pytest.mark.parametrize("model_type", SIZES)
def test_memory_that_quantising_would_save(model_type: str) -> None:
    model = build(model_type)
    expected = experts_memory(copy.deepcopy(model).to("meta"))
    assert expected == experts_memory(model)
    for storage in STORAGES:
        packed = quantize_experts(copy.deepcopy(model), storage)
        assert experts_memory(packed).stored == expected.quantised[storage]
        saved = sum(t.numel() * t.element_size() for p in quantised(packed) for t in
                    (p.weight.packed, *p.weight.scales))  # fmt: skip
        assert saved == expected.quantised[storage]


def test_lora_targets_know_quantised_experts() -> None:
    assert lora_targets(quantize_experts(build(), "nf4")) == lora_targets(build())


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
    with pytest.raises(UnsupportedModelError, match="FP8Experts, which quantize_experts"):
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


def test_compiled_as_one_graph() -> None:
    model = build(num_hidden_layers=1)
    batch = tiny_models.inputs(model)
    model = patch_model(adapted(quantize_experts(model, "nf4")))
    expected = step(model, batch)
    gradients = {name: g.clone() for name, g in adapter_gradients(model).items()}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    # Before 5.24 transformers' auxiliary loss counts with bincount, which torch 2.9 takes into a
    # graph only so.
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert_bits(step(compiled, batch), expected)
    for name, gradient in adapter_gradients(model).items():
        assert_bits(gradient, gradients[name], name)


def test_data_parallel_leaves_packed_experts_to_each_rank(tmp_path: Any) -> None:
    model = build(num_hidden_layers=1)
    batch = tiny_models.inputs(model)
    model = patch_model(adapted(quantize_experts(model, "nf4")))
    expected = step(model, batch)
    gradients = {name: g.clone() for name, g in adapter_gradients(model).items()}
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        with pytest.raises(UnsupportedModelError, match="experts stored in 4 or 8 bits"):
            DistributedDataParallel(model)
        ignore_in_ddp(model)
        wrapped = DistributedDataParallel(model)
        assert_bits(step(wrapped, batch), expected)
        for name, gradient in adapter_gradients(model).items():
            assert_bits(gradient, gradients[name], name)
    finally:
        torch.distributed.destroy_process_group()
