"""quantize_experts on models, beside PEFT and transformers."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn

from moe_patch import (
    UnsupportedModelError,
    UnsupportedOptionError,
    dequantize_experts,
    lora_targets,
    patch_model,
    patch_report,
    quantize_experts,
    unpatch_model,
)
from moe_patch.formats.tensor import QuantTensor
from moe_patch.quant.memory import experts_memory
from tests.support import tiny_models
from tests.support.adapters import adapt, adapter_gradients, lora_config, step
from tests.support.numerics import FP32, assert_bits, assert_close
from tests.support.quant_models import (
    SIZES,
    STORAGES,
    adapted,
    build,
    logits,
    quantised,
)


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
        quantize_experts(model, "nf4", include=("*mlp",), exclude=("*mlp",))


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_no_block_is_refused(option: str) -> None:
    model = build(num_hidden_layers=2)
    wrong = {option: ("*mlp", "model.layer.1.*")}
    there = r"'model.layer.1.\*' matches no MoE block; there are 2: 'model.layers.0.mlp'"
    with pytest.raises(UnsupportedOptionError, match=f"quantize_experts: {option} pattern {there}"):
        quantize_experts(model, "nf4", **wrong)
    assert not quantised(model)


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
    """Read a foreign library's bytes through its parametrization, or refuse them."""
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


@pytest.mark.parametrize("storage", ["nf4", "fp8"])
@pytest.mark.parametrize("whole", ["experts", "mlp"])
def test_quantised_experts_are_not_trained_in_silence(storage: str, whole: str) -> None:
    """Raise an error: PEFT marks a copy as trainable, gives it no gradient and saves its bytes."""
    config = lora_config(modules=["q_proj"], modules_to_save=[whole])
    model = adapt(quantize_experts(build(), storage), config)
    with pytest.raises(UnsupportedModelError, match=rf"stored in {storage} are frozen and get no"):
        patch_model(model)
    model = patch_model(quantize_experts(build(), storage))
    logits(model)
    model.requires_grad_(True)
    with pytest.raises(UnsupportedModelError, match=r"Experts\.\w+: requires_grad is True"):
        logits(model)
    trained = patch_model(adapt(dequantize_experts(quantize_experts(build(), storage)), config))
    logits(trained)
