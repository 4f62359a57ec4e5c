"""Adapters on experts with every rank, dtype, subset, optimiser and loader.

As in tests/lora/test_lora.py the reference is PEFT's own forward over transformers' eager experts.
"""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from peft import LoHaConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from moe_patch import patch_model, patch_report
from tests.support import tiny_models, window
from tests.support.adapters import (
    DOWN,
    EXPERTS,
    ORDERS,
    SHARED,
    UP,
    Pair,
    adapt,
    adapted_pair,
    adapter_gradients,
    assert_adapters_act,
    assert_same_step,
    attention,
    expert_modules,
    limit_on,
    lora_config,
    no_factors_left,
    recipe,
    step,
)
from tests.support.numerics import assert_close, bf16_rule, rel_err
from tests.support.snapshots import logits
from tests.support.trace import executed, transformers_experts

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def lora_columns(model: nn.Module) -> list[str]:
    return [row.lora for row in patch_report(model)]


@pytest.mark.parametrize("rank", [1, 2, 17, 64, 256])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_ranks_from_1_to_256(model_type, rank, device):
    pair = adapted_pair(model_type, EXPERTS, r=rank, lora_alpha=rank, device=device)
    assert_adapters_act(pair.ours, pair.batch)
    assert_same_step(pair)
    assert set(lora_columns(pair.ours)) == {"fused (down_proj, gate_up_proj)"}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("targets", [EXPERTS, [UP], [DOWN]], ids=["both", "up", "down"])
def test_some_layers_only(targets, order, device):
    """Name the targets by the longer suffix of their path."""
    names = [f"layers.1.mlp.{target}" for target in targets]
    pair = adapted_pair("qwen3_moe", names, order=order, device=device)
    assert_adapters_act(pair.ours, pair.batch, 1e-3)
    assert_same_step(pair)
    first, second = lora_columns(pair.ours)
    assert first == "none"
    assert second.startswith("peft" if order == "patch first" else "fused")


def test_layers_to_transform(device):
    """PEFT applies the option to modules only: attention of one layer, but experts of both."""
    pair = adapted_pair(
        "qwen3_moe", EXPERTS, attention("qwen3_moe"), layers_to_transform=[1], device=device
    )
    assert_same_step(pair)
    adapted = {m for m, _ in pair.ours.named_modules() if m.endswith("q_proj.lora_A")}
    assert len(adapted) == 1
    assert set(lora_columns(pair.ours)) == {"fused (down_proj, gate_up_proj)"}


@pytest.mark.parametrize(
    ("base", "factors"),
    [(BF16, F32), (F32, BF16), (BF16, BF16), (F16, F32), (F32, F16), (F16, F16)],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
@pytest.mark.parametrize("model_type", ["olmoe", "gpt_oss"])
def test_dtypes_of_base_and_factors(model_type, base, factors, device):
    """Results on equal ids are as close to fp64 as PEFT's; gradients keep the factors' dtype."""
    pair = adapted_pair(model_type, EXPERTS, dtype=base, device=device)
    for model in pair[:2]:
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.to(factors)
    exact = copy.deepcopy(pair.reference).double()
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(40, 8, generator=generator).argsort(-1)[:, :2].to(device)
    x, probe = torch.randn(2, 40, 32, generator=generator).to(base).to(device)
    weights = torch.rand(40, 2, generator=generator).to(base).to(device)
    results = []
    for model, dtype in ((pair.reference, base), (pair.ours, base), (exact, torch.float64)):
        wrapper = next(m for name, m in model.named_modules() if name.endswith("mlp.experts"))
        trained = [p for p in wrapper.parameters() if p.requires_grad]
        leaves = [x.to(dtype).requires_grad_(), weights.to(dtype).requires_grad_()]
        out = wrapper(leaves[0], ids, leaves[1])
        results.append([out, *torch.autograd.grad(out, [*leaves, *trained], probe.to(dtype))])
        if model is pair.ours:
            assert {t.dtype for t in results[-1][3:]} == {factors}
    for name, theirs, ours, ref in zip(
        ["out", "x", "weights", "A", "B", "A", "B"], *results, strict=True
    ):
        bf16_rule(ours, theirs, ref, name)


@window.second_adapter
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "llama4"])
def test_loaded_again_under_another_name(model_type, order, tmp_path, device):
    """Follow a renamed adapter after patching: save, load under a new name, delete the old."""
    pair = adapted_pair(model_type, EXPERTS, order=order, device=device)
    expected = logits(pair.ours, pair.batch)
    for name, model in (("theirs", pair.reference), ("ours", pair.ours)):
        model.save_pretrained(tmp_path / name)
        model.load_adapter(tmp_path / name, adapter_name="renamed", is_trainable=True)
        model.set_adapter("renamed")
        model.delete_adapter("default")
    assert_close(logits(pair.ours, pair.batch), expected, limit_on(pair.batch))
    assert_same_step(pair)
    assert all(".renamed." in name for name in adapter_gradients(pair.ours))
    assert no_factors_left(pair.ours)


def test_the_fused_path_ran_and_nothing_of_peft_or_transformers(device):
    """Prove by code objects that the operator ran, not PEFT's delta or transformers' experts."""
    pair = adapted_pair("qwen3_moe", recipe("qwen3_moe"), device=device)
    ran = executed(lambda: step(pair.ours, pair.batch))
    reference_ran = executed(lambda: step(pair.reference, pair.batch))
    merging = {
        inspect.unwrap(f).__code__ for f in (ParamWrapper.get_delta_weight, ParamWrapper.forward)
    }
    from moe_patch.ops.experts.op import experts_mlp

    assert experts_mlp.__code__ in ran
    assert not ran & transformers_experts(pair.ours)
    assert reference_ran & transformers_experts(pair.reference)
    assert reference_ran & merging
    # The router's own adapter is a small 2-D parameter, which PEFT merges.
    alone = adapted_pair("qwen3_moe", EXPERTS, device=device)
    assert not executed(lambda: step(alone.ours, alone.batch)) & merging


def test_another_tuner_around_the_experts(device):
    """LoHa adapts Linear modules only: attention and a shared expert, which run as modules."""
    theirs = tiny_models.build("qwen2_moe").to(device)
    batch = {key: value.to(device) for key, value in tiny_models.inputs(theirs).items()}
    models = []
    for model in (theirs, copy.deepcopy(theirs)):
        torch.manual_seed(3)
        config = LoHaConfig(
            r=2, target_modules=[*attention("qwen2_moe"), *SHARED["qwen2_moe"]], init_weights=False
        )
        models.append(get_peft_model(model, config))
    pair = Pair(models[0], patch_model(models[1]), batch)
    assert set(lora_columns(pair.ours)) == {"none"}
    assert_adapters_act(pair.ours, batch)
    assert_same_step(pair)


class Packed(nn.Module):
    """A storage that no product may read: bytes that are decoded on access."""

    def forward(self, stored: Tensor) -> Tensor:
        return stored.view(F32)


def test_a_quantised_base_that_nothing_here_knows(device):
    """Use the decoded weight behind a parametrization, with adapters on it and around it."""
    theirs = tiny_models.build("qwen3_moe").to(device)
    for experts in expert_modules(theirs):
        for name in ("gate_up_proj", "down_proj"):
            stored = getattr(experts, name).detach().view(torch.uint8)
            delattr(experts, name)
            experts.register_parameter(name, nn.Parameter(stored, requires_grad=False))
            nn.utils.parametrize.register_parametrization(experts, name, Packed(), unsafe=True)
    batch = {key: value.to(device) for key, value in tiny_models.inputs(theirs).items()}
    ours = copy.deepcopy(theirs)
    assert_close(logits(patch_model(ours), batch), logits(theirs, batch), limit_on(batch))
    on_experts = lora_config([f"model.layers.{layer}.mlp.{UP}" for layer in (0, 1)])
    pair = Pair(*(adapt(copy.deepcopy(m), on_experts) for m in (theirs, ours)), batch)
    patch_model(pair.ours)
    assert set(lora_columns(pair.ours)) == {"fused (gate_up_proj)"}
    assert_same_step(pair)
    around = lora_config(["gate.weight"], attention("qwen3_moe"))
    pair = Pair(adapt(theirs, around), patch_model(adapt(ours, around)), batch)
    assert_adapters_act(pair.ours, batch)
    assert_same_step(pair)


@pytest.mark.parametrize("compute", [F32, BF16], ids=["fp32", "bf16"])
def test_4bit_attention_around_float_experts(compute, tmp_path, device):
    """Patch 3-D experts in a 4-bit model: load_in_4bit packs Linear modules only (R34)."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    # bitsandbytes packs blocks of 64 values of one row.
    source = tiny_models.build("qwen3_moe", dtype=BF16, hidden_size=64)
    source.save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=compute)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, attn_implementation="eager", dtype=BF16,
        device_map={"": device}, experts_implementation="eager",
    )  # fmt: skip
    assert any(isinstance(m, bitsandbytes.nn.Linear4bit) for m in theirs.modules())
    assert {p.dtype for e in expert_modules(theirs) for p in e.parameters()} == {BF16}
    batch = {key: value.to(device) for key, value in tiny_models.inputs(source).items()}
    pair = Pair(
        *(adapt(copy.deepcopy(theirs), lora_config(EXPERTS, ["q_proj"])) for _ in "ab"), batch
    )
    patch_model(pair.ours)
    assert {row.tier for row in patch_report(pair.ours)} == {"full"}
    assert set(lora_columns(pair.ours)) == {"fused (down_proj, gate_up_proj)"}
    # Train before any inference: on a CPU, inference repacks Linear4bit without a backward.
    # Both are bf16 (seen in one gradient: 5.02e-2 with the factors of PEFT 0.18; 5.3e-2 on a GPU,
    # which sums in different orders).
    assert_same_step(pair, 6e-2 if device == "cpu" else 1e-1)
    assert_adapters_act(pair.ours, batch)
    assert rel_err(logits(patch_model(copy.deepcopy(theirs)), batch), logits(theirs, batch)) < 2e-2
