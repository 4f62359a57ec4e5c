"""Special families with adapters, and inside the image-text models that hold their text towers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from moe_patch import patch_model, patch_report, unpatch_model
from tests.support import tiny_models
from tests.support.adapters import adapt, lora_config
from tests.support.numerics import assert_close, probe
from tests.support.parity import Run, assert_parity, run_model
from tests.support.special import LIMIT

PROJECTIONS = ("experts.gate_up_proj", "experts.down_proj")
STACKS = ("input_linear.weight", "output_linear.weight")
TARGETS = {
    "deepseek_v4": PROJECTIONS,
    "diffusion_gemma": PROJECTIONS,
    "gemma4": PROJECTIONS,
    "jetmoe": STACKS,
    "llama4": PROJECTIONS,
    "longcat_flash": PROJECTIONS,
    "muse_spark": PROJECTIONS,
    "step3p7": PROJECTIONS,
}


@pytest.mark.parametrize("order", ["peft first", "patch first", "patch, adapt, patch"])
@pytest.mark.parametrize("name", TARGETS)
def test_adapters_on_the_experts(name, order) -> None:
    reference = adapt(tiny_models.build(name), lora_config(TARGETS[name]))
    batch = tiny_models.inputs(reference.get_base_model())
    model = tiny_models.build(name)
    if order != "peft first":
        patch_model(model)
    model = adapt(model, lora_config(TARGETS[name]))
    if order != "patch first":
        patch_model(model)
        assert all(row.lora.startswith("fused") for row in patch_report(model))
    assert_parity(run_model(model, batch), run_model(reference, batch), LIMIT)
    with model.disable_adapter(), reference.disable_adapter(), torch.no_grad():
        for key, value in model(**batch).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                assert_close(value, reference(**batch)[key], LIMIT, key)


# Parameters and modules that PEFT can adapt in the router and in the block around the experts.
AROUND = {
    "afmoe": ((), ("router.gate",)),
    "dbrx": ((), ("router.layer",)),
    "deepseek_v4": (("gate.weight",), ()),
    "doge": ((), ("router_gate", "down_embed", "up_embed", "gate_proj")),
    "gemma4": ((), ("router.proj",)),
    "inkling": (("gate.weight",), ()),
    "inkling2": (("gate.weight",), ()),
    "jetmoe": ((), ("router.layer",)),
    "llama4": (("router.weight",), ("shared_expert.up_proj",)),
    "muse_spark": (("gate.weight",), ("pre_expert_proj",)),
    "openai_privacy_filter": (("router.weight",), ()),
    "phimoe": (("router.weight",), ()),
    "step3p7": (("gate.weight",), ("shared_experts.up_proj",)),
    "zaya": ((), ("gate.down_proj", "router_mlp.fc1")),
}


@pytest.mark.parametrize("order", ["peft first", "patch first"])
@pytest.mark.parametrize("name", AROUND)
def test_adapters_around_the_experts(name, order) -> None:
    """Read router parameters and call block modules so that their adapters act."""
    config = lora_config(*AROUND[name])
    reference = adapt(tiny_models.build(name), config)
    model = tiny_models.build(name)
    if order == "patch first":
        patch_model(model)
    model = adapt(model, config)
    if order == "peft first":
        patch_model(model)
    batch = tiny_models.inputs(reference.get_base_model())
    wanted = run_model(reference, batch)
    assert_parity(run_model(model, batch), wanted, LIMIT)
    assert any("lora_A" in key and value.any() for key, value in wanted.items() if "grad" in key)


@pytest.mark.parametrize("name", ["llama4", "longcat_flash", "jetmoe"])
def test_merged_adapters(name) -> None:
    reference = adapt(tiny_models.build(name), lora_config(TARGETS[name]))
    model = patch_model(adapt(tiny_models.build(name), lora_config(TARGETS[name])))
    batch = tiny_models.inputs(reference.get_base_model())
    with torch.no_grad():
        expected = reference(**batch).logits
        model.merge_adapter()
        assert_close(model(**batch).logits, expected, LIMIT)


def test_a_second_router_of_gemma4_belongs_to_its_layer() -> None:
    """Patch each layer once, although modules_to_save keeps two routers and no block holds them."""
    config = lora_config(PROJECTIONS, modules_to_save=["router"])
    reference = adapt(tiny_models.build("gemma4"), config)
    model = patch_model(adapt(tiny_models.build("gemma4"), config))
    assert {row.tier for row in patch_report(model)} == {"full"}
    assert len(patch_report(model)) == 2
    batch = tiny_models.inputs(reference.get_base_model())
    assert_parity(run_model(model, batch), run_model(reference, batch), LIMIT)


# --- image-text wrappers --------------------------------------------------------------------------


def vision_language_model(name: str) -> nn.Module:
    """The text tower of a recipe under its family's image-text model, images left out."""
    import transformers

    text = tiny_models.config(name)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "llama4":
        vision = {**small, "intermediate_size": 32, "image_size": 28, "patch_size": 14}
        vision |= {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
        config = transformers.Llama4Config(text_config=text.to_dict(), vision_config=vision)
        cls = transformers.Llama4ForConditionalGeneration
    else:
        config = transformers.Gemma4Config(
            text_config=text.to_dict(), vision_config=None, audio_config=None
        )
        cls = transformers.Gemma4ForConditionalGeneration
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = tiny_models.randomise(cls(config))
    return model.train()


@pytest.mark.parametrize("name", ["llama4", "gemma4"])
def test_inside_the_image_text_model(name) -> None:
    reference = vision_language_model(name)
    model = patch_model(copy.deepcopy(reference))
    assert {row.tier for row in patch_report(model)} == {"full"}
    mine, theirs = run_wrapper(model, name), run_wrapper(reference, name)
    assert_parity(mine, theirs, LIMIT)
    assert any("experts" in key and value.any() for key, value in theirs.items())
    for key, value in run_wrapper(unpatch_model(model), name).items():
        assert torch.equal(value, theirs[key]), key


def run_wrapper(model: nn.Module, name: str) -> Run:
    """Return logits and gradients of a text-only step.

    Llama-4's image-text forward fails in transformers 5.24, after its text model has run: it reads
    ``image_outputs``, which the text model's output lacks. Call its text model instead.
    """
    model.zero_grad()
    ids = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids}
    if name == "gemma4":
        batch |= {"mm_token_type_ids": torch.zeros_like(ids)}
    logits = (model.language_model if name == "llama4" else model)(**batch).logits
    probe(logits).backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}
