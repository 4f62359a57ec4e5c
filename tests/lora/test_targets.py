"""lora_targets and the warning about adapters that miss the experts."""

import copy
import re
import warnings

import pytest
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn

from moe_patch import UnsupportedModelError, lora_targets, patch_model
from moe_patch.runtime.peft_release import rewrites_targets
from tests.support import tiny_models
from tests.support.tiny_recipes import NO_AUX

pytestmark = pytest.mark.versions
FAMILIES = (
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "mixtral",
    "deepseek_v3",
    "glm4_moe",
    "minimax_m2",
    "gpt_oss",
)


def adapted(model: nn.Module) -> set[str]:
    return {name.split(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_part_asked_for_gets_an_adapter(model_type):
    model = tiny_models.build(model_type)
    peft_model = get_peft_model(model, LoraConfig(r=3, **lora_targets(model)))
    names = adapted(peft_model)
    router = "router" if model_type == "gpt_oss" else "gate"
    layer = "base_model.model.model.layers.1"
    wanted = {f"{layer}.mlp.experts", f"{layer}.mlp.experts.base_layer"}
    wanted.add(f"{layer}.self_attn.o_proj")
    # A block that chooses reads its router's bias past PEFT's wrapper: no adapter there.
    by_block = model_type in tiny_models.block_chosen()
    assert (f"{layer}.mlp.{router}" in names) != by_block
    if model_type == "qwen2_moe":
        wanted |= {f"{layer}.mlp.shared_expert.up_proj", f"{layer}.mlp.shared_expert_gate"}
    if model_type in ("deepseek_v3", "glm4_moe"):
        wanted.add(f"{layer}.mlp.shared_experts.up_proj")
    assert wanted <= names
    ranks = {
        module.r["default"]
        for _, module in peft_model.named_modules()
        if "lora_A" in module._modules and "default" in module.r
    }
    assert ranks == {3}, "no target may be rewritten to another rank"


@pytest.mark.parametrize("model_type", tiny_models.patchable())
def test_peft_takes_the_targets_of_every_family(model_type):
    """PEFT rewrites, drops and refuses none of the targets, attention included."""
    model = tiny_models.build(model_type)
    targets = lora_targets(model)
    peft_model = get_peft_model(copy.deepcopy(model), LoraConfig(r=3, **targets))
    config = peft_model.peft_config["default"]
    assert set(config.target_modules or ()) == set(targets["target_modules"])
    assert set(config.target_parameters or ()) == set(targets["target_parameters"])
    names = adapted(peft_model)
    for name in targets["target_modules"]:
        assert any(n.endswith(f".{name}") for n in names), name


# Layers with every kind of attention, and windows that a short sequence fills.
OPTIONS = {
    "deepseek_v4": {
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3},
    },
    # Its auxiliary loss mistakes a router's adapter for the router in transformers 5.16.
    "jamba": NO_AUX,
    "minimax_m3_vl": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
}


@pytest.mark.parametrize("patched", [False, True], ids=["unpatched", "patched"])
@pytest.mark.parametrize("model_type", tiny_models.patchable())
def test_every_adapter_gets_a_gradient(model_type, patched):
    """Every adapter gets a gradient; else DistributedDataParallel stops at the second step."""
    model = tiny_models.build(model_type, **OPTIONS.get(model_type, {}))
    batch = tiny_models.inputs(model)
    peft_model = get_peft_model(model, LoraConfig(r=3, **lora_targets(model)))
    if patched:
        patch_model(peft_model)
    tiny_models.loss(peft_model(**batch)).backward()
    factors = {n: p for n, p in peft_model.named_parameters() if p.requires_grad}
    assert factors
    assert [name for name, p in factors.items() if p.grad is None] == []


@pytest.mark.families("longcat_flash")
def test_what_can_never_train_is_no_target():
    """Omit LongCat's classifier: its router reads the weight of a Linear that it never calls."""
    longcat = lora_targets(tiny_models.build("longcat_flash"))
    names = [*longcat["target_modules"], *longcat["target_parameters"]]
    assert not any("classifier" in name for name in names)


@pytest.mark.parametrize("model_type", ["deepseek_v32", "deepseek_v4", "minimax_m3_vl"])
def test_indexers_are_no_targets(model_type):
    model = tiny_models.build(model_type, **OPTIONS.get(model_type, {}))
    assert any(".indexer." in name for name, _ in model.named_modules())
    targets = lora_targets(model)
    assert not any("indexer." in name or "scorer." in name for name in targets["target_modules"])
    if model_type == "deepseek_v4":
        assert "compressor.kv_proj" in targets["target_modules"]


def test_parts_can_be_left_out():
    model = tiny_models.build("qwen2_moe")
    targets = lora_targets(model, experts=False, router=False, shared=False)
    assert targets["target_parameters"] == []
    assert all(name.startswith("self_attn.") for name in targets["target_modules"])
    targets = lora_targets(model, attention=False, router=False, shared=False)
    assert targets["target_modules"] == []
    assert targets["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]


def test_a_dense_model_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="Sequential.*no MoE block"):
        lora_targets(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize("how", ["get_peft_model", "injected", "modules_to_save"])
def test_a_model_with_adapters_is_refused_by_name(how):
    """Raise an error that names the adapter; accept the model again without it."""
    model = tiny_models.build("qwen2_moe")
    targets = lora_targets(model)
    if how == "injected":
        adapted_model = inject_adapter_in_model(LoraConfig(r=2, **targets), model)
        at = "Linear at model.layers.0.self_attn.q_proj"
    elif how == "modules_to_save":
        config = LoraConfig(r=2, target_modules=["lm_head"], modules_to_save=["gate"])
        adapted_model = get_peft_model(model, config)
        at = "ModulesToSaveWrapper at base_model.model.model.layers.0.mlp.gate"
    else:
        adapted_model = get_peft_model(model, LoraConfig(r=2, **targets))
        at = "Linear at base_model.model.model.layers.0.self_attn.q_proj"
    with pytest.raises(UnsupportedModelError, match=rf"\.{type(adapted_model).__name__}: .*{at};"):
        lora_targets(adapted_model)
    if how != "injected":
        assert lora_targets(adapted_model.unload()) == targets


def test_warning_when_experts_were_asked_for_and_missed():
    model = tiny_models.build("qwen2_moe")
    named = LoraConfig(r=2, target_modules=["gate_proj", "up_proj", "down_proj"])
    missed = get_peft_model(copy.deepcopy(model), named)
    with pytest.warns(UserWarning, match="down_proj.*but no expert of 2 MoE blocks"):
        patch_model(missed)
    reached = get_peft_model(model, LoraConfig(r=2, **lora_targets(model)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch_model(reached)


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("qwen2_moe", ["gate_proj"]),  # attaches to the shared expert
        ("gpt_oss", ["gate_proj"]),
        ("gpt_oss", ["w1", "w2", "w3"]),
        ("gpt_oss", ["experts.0.gate_proj", "experts.1.gate_proj"]),
        ("granitemoe", ["input_linear", "output_linear"]),
    ],
)
def test_warning_when_experts_were_named_as_modules(model_type, names):
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj", *names])
    model = get_peft_model(tiny_models.build(model_type), config)
    with pytest.warns(UserWarning, match=rf"names {', '.join(names)} but no expert of 2 MoE"):
        patch_model(model)


@pytest.mark.parametrize(
    "pattern", [r".*\.(q_proj|gate_proj|up_proj|down_proj)", r".*(self_attn|experts).*_proj"]
)
@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen2_moe"])
def test_warning_when_a_pattern_means_experts(model_type, pattern):
    model = get_peft_model(tiny_models.build(model_type), LoraConfig(r=2, target_modules=pattern))
    said = re.escape(f"names {pattern!r} but no expert of 2 MoE")
    with pytest.warns(UserWarning, match=said):
        patch_model(model)


@pytest.mark.parametrize("order", ["peft first", "patch first"])
@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen2_moe"])
def test_warning_when_all_linear_reaches_no_expert(model_type, order):
    """Warn although PEFT has already replaced "all-linear" by paths."""
    model = tiny_models.build(model_type)
    if order == "patch first":
        patch_model(model)
    model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    assert not any(".experts" in name for name in adapted(model))
    with pytest.warns(UserWarning, match="every Linear module but no expert of 2 MoE blocks"):
        patch_model(model)


@pytest.mark.parametrize(
    ("model_type", "targets"),
    [
        ("qwen3_moe", "all-linear"),  # PEFT rewrites it to reach the experts
        ("gpt_oss", ["q_proj", "k_proj", "v_proj", "o_proj"]),  # all that is Linear, but by name
        ("gpt_oss", "model.layers.0.self_attn.q_proj"),
        ("qwen2_moe", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("qwen2_moe", ["q_proj", "shared_expert.gate_proj"]),  # by name, and not an expert's
        ("deepseek_v4", ["compressor.kv_proj", "compressor.gate_proj"]),
        ("qwen2_moe", r".*(q_proj|shared_expert\.gate_proj)"),
        ("gpt_oss", r".*layers\.\d+\.self_attn\.(q|v)_proj"),
    ],
)
def test_no_warning_where_experts_were_reached_or_not_asked_for(model_type, targets):
    model = get_peft_model(tiny_models.build(model_type), LoraConfig(r=2, target_modules=targets))
    reached = any(".experts" in name for name in adapted(model))
    # PEFT 0.18 rewrites no names and misses the experts, so the warning is right there.
    assert reached == (targets == "all-linear" and rewrites_targets())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch_model(model)
    assert len(caught) == (targets == "all-linear" and not reached)
