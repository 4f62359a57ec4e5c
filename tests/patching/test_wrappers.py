"""Wrappers around patched blocks: DDP, compile, PEFT, offload, a vision-language model."""

from __future__ import annotations

import accelerate
import pytest
import torch
from peft import PromptTuningConfig, get_peft_model, inject_adapter_in_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_patch import patch_model, patch_report, patched, unpatch_model
from tests.support import tiny_models
from tests.support.adapters import EXPERTS, adapt, lora_config, recipe
from tests.support.numerics import FP32, assert_bits, assert_close
from tests.support.snapshots import assert_unchanged, experts_setting, logits, snapshot


@pytest.fixture
def model():
    return tiny_models.build("qwen2_moe")


@pytest.fixture
def process_group():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def gradients(model, batch):
    model.zero_grad(set_to_none=True)
    model(**batch).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("patch_first", [False, True])
def test_inside_ddp(model, process_group, patch_first):
    batch = tiny_models.inputs(model)
    with patched(model):
        expected = gradients(model, batch)
    if patch_first:
        patch_model(model)
    wrapped = DistributedDataParallel(model, find_unused_parameters=False)
    if not patch_first:
        assert patch_model(wrapped) is wrapped
    assert [row.tier for row in patch_report(wrapped)] == ["full", "full"]
    for found, wanted in zip(gradients(wrapped, batch), expected, strict=True):
        assert_bits(found, wanted)
    unpatch_model(wrapped)
    assert patch_report(model) == []


@pytest.mark.parametrize("order", ["patch first", "shard first"])
@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss"])
def test_fsdp2_units_with_adapters(model_type, order, process_group):
    mesh = init_device_mesh("cpu", (1,))
    reference = adapt(tiny_models.build(model_type), lora_config(EXPERTS))
    ours = adapt(tiny_models.build(model_type), lora_config(EXPERTS))
    batch = tiny_models.inputs(reference.base_model.model)
    expected = gradients(reference, batch)
    if order == "patch first":
        patch_model(ours)
    for layer in ours.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(ours, mesh=mesh)
    patch_model(ours)
    check = "passed" if order == "patch first" else "skipped: DTensor weights"
    assert {(r.tier, r.lora, r.self_check) for r in patch_report(ours)} == {
        ("full", "fused (down_proj, gate_up_proj)", check)
    }
    found = [gradient.full_tensor() for gradient in gradients(ours, batch)]
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine, theirs, FP32)
    unpatch_model(ours)
    assert not any("_moe_patch" in module.__dict__ for module in ours.modules())


def test_inside_a_compiled_wrapper(model):
    batch = tiny_models.inputs(model)
    with patched(model):
        expected = gradients(model, batch)
    wrapped = torch.compile(model, backend="eager")
    assert patch_model(wrapped) is wrapped
    assert [row.path for row in patch_report(wrapped)] == [
        f"_orig_mod.model.layers.{i}.mlp" for i in range(2)
    ]
    for found, wanted in zip(gradients(wrapped, batch), expected, strict=True):
        assert_close(found, wanted, FP32)
    unpatch_model(wrapped)
    assert patch_report(model) == []


def compiled_layers(model):
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="eager")
    return model


def offloaded_blocks(model):
    for layer in model.model.layers:
        layer.mlp = offload_wrapper(layer.mlp)
    return model


def checkpointed_layers(model):
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer)
    return model


def with_lora(model):
    return adapt(model, lora_config(EXPERTS))


def with_prompt(model):
    """Wrap the model for prompt tuning: PEFT adds one level here, not two."""
    return get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


def compiled_ddp(model):
    ddp = DistributedDataParallel(with_lora(model), find_unused_parameters=True)
    return torch.compile(ddp, backend="eager")


@pytest.mark.parametrize("pattern", ["as on the bare model", "as it is"])
@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (with_lora, "base_model.model.model.layers.{}.mlp"),
        (with_prompt, "base_model.model.layers.{}.mlp"),
        (torch.compile, "_orig_mod.model.layers.{}.mlp"),
        (compiled_layers, "model.layers.{}._orig_mod.mlp"),
        (checkpointed_layers, "model.layers.{}._checkpoint_wrapped_module.mlp"),
        (offloaded_blocks, "model.layers.{}.mlp._checkpoint_wrapped_module"),
        (compiled_ddp, "_orig_mod.module.base_model.model.model.layers.{}.mlp"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_patterns_hold_inside_wrappers(model, process_group, wrap, path, pattern):
    wrapped = wrap(model)
    own = path if pattern == "as it is" else "model.layers.{}.mlp"
    for options in ({"exclude": own.format(0)}, {"include": own.format(1)}):
        patch_model(wrapped, **options)
        assert [row.path for row in patch_report(wrapped)] == [path.format(1)]
        unpatch_model(wrapped)


def test_inside_a_peft_model(model):
    wrapped = adapt(model, lora_config(EXPERTS))
    logits(wrapped, tiny_models.inputs(model))
    before = snapshot(wrapped)
    assert patch_model(wrapped) is wrapped
    assert {row.lora for row in patch_report(wrapped)} == {"fused (down_proj, gate_up_proj)"}
    unpatch_model(wrapped)
    assert_unchanged(before, snapshot(wrapped))


@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss"])
def test_a_block_by_itself(model_type):
    """Patch a model that is the MoE block alone, adapters included."""
    block = tiny_models.blocks(tiny_models.build(model_type))[0][1]
    x = tiny_models.hidden(block, 2, 5)
    inject_adapter_in_model(lora_config(recipe(model_type)), block)
    before = snapshot(block)
    (expected, *_) = out if isinstance(out := block(x), tuple) else (out,)
    patch_model(block)
    (row,) = patch_report(block)
    assert (row.path, row.tier, row.lora) == ("", "full", "fused (down_proj, gate_up_proj)")
    (found, *_) = out if isinstance(out := block(x), tuple) else (out,)
    assert_close(found, expected, FP32)
    unpatch_model(block)
    assert before.keys() == snapshot(block).keys()
    assert not any("_moe_patch" in module.__dict__ for module in block.modules())


@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss"])
def test_inside_inference_mode(model_type):
    model = tiny_models.build(model_type).eval()
    batch = tiny_models.inputs(model)
    with torch.inference_mode():
        expected = model(**batch).logits
        patch_model(model)
        assert {row.self_check for row in patch_report(model)} == {"passed"}
        assert_close(model(**batch).logits.clone(), expected.clone(), FP32)
        unpatch_model(model)
        made_there = tiny_models.build(model_type).eval()
        patch_model(made_there)
        assert {row.self_check for row in patch_report(made_there)} == {
            "skipped: weights were made in inference mode"
        }
        assert_close(made_there(**batch).logits.clone(), expected.clone(), FP32)


@pytest.mark.parametrize("order", ["patch first", "offload first"])
@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss"])
def test_cpu_offload(model_type, order):
    model = tiny_models.build(model_type)
    batch = tiny_models.inputs(model)
    plain = logits(model, batch)
    with patched(model):
        expected = logits(model, batch)
    if order == "patch first":
        patch_model(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    patch_model(model)
    assert all(p.is_meta for p in model.parameters())
    assert {row.tier for row in patch_report(model)} == {"full"}
    assert_bits(logits(model, batch), expected)
    unpatch_model(model)
    assert_bits(logits(model, batch), plain)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_generate(implementation):
    """Keep the patch active although transformers may switch the implementation for decoding."""
    model = tiny_models.build("qwen3_moe").eval()
    model.set_experts_implementation(implementation)
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    model.config.output_router_logits = False  # older releases fail on it once a cache is there
    ids = tiny_models.inputs(model)["input_ids"]
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    patch_model(model)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected)
    experts = [block.experts for _, block in tiny_models.blocks(model)]
    assert {e.config._experts_implementation for e in experts} == {"moe_patch"}
    assert model.config._experts_implementation == implementation


@pytest.fixture
def vision_language_model():
    """Qwen3-VL-MoE: the MoE text tower sits two levels down, beside a vision tower."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
        "out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size",
        "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "num_experts", "num_experts_per_tok",
    )  # fmt: skip
    text = {name: tiny_models.SIZES[name] for name in names}
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
    }
    special = {
        "image_token_id": 95,
        "video_token_id": 96,
        "vision_start_token_id": 97,
        "vision_end_token_id": 98,
    }
    config = Qwen3VLMoeConfig(
        text_config=text, vision_config=vision, **special, attn_implementation="eager"
    )
    model = tiny_models.randomise(Qwen3VLMoeForConditionalGeneration(config))
    model.set_experts_implementation("eager")
    return model


def test_text_tower_of_a_vision_language_model(vision_language_model):
    model = vision_language_model
    batch = tiny_models.inputs(model)
    out, before = logits(model, batch), snapshot(model)
    expected = gradients(model, batch)
    model.zero_grad(set_to_none=True)
    settings = experts_setting(model)
    patch_model(model)
    assert [row.path for row in patch_report(model)] == [
        f"model.language_model.layers.{i}.mlp" for i in range(2)
    ]
    assert {row.model_type for row in patch_report(model)} == {"qwen3_vl_moe_text"}
    assert all(row.tier in ("full", "experts") for row in patch_report(model))
    assert experts_setting(model) == settings
    vision = {p: s for p, s in snapshot(model).items() if p.startswith("model.visual")}
    assert_unchanged({path: before[path] for path in vision}, vision)
    assert_close(logits(model, batch), out, FP32)
    for found, wanted in zip(gradients(model, batch), expected, strict=True):
        assert_close(found, wanted, FP32)
    model.zero_grad(set_to_none=True)
    unpatch_model(model)
    assert_unchanged(before, snapshot(model))
    assert_bits(logits(model, batch), out)
