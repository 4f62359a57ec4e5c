"""Adapters over time: switched, summed, merged, deleted, copied, saved."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file

from moe_patch import patch_model, patch_report, unpatch_model
from tests.support import tiny_models, window
from tests.support.adapters import (
    EXPERTS,
    FAMILIES,
    ORDERS,
    Pair,
    adapted_pair,
    adapter_gradients,
    assert_same_step,
    attention,
    limit_on,
    lora_config,
    no_factors_left,
    recipe,
    router_parameter,
)
from tests.support.numerics import assert_bits, assert_close, rel_err
from tests.support.snapshots import logits

SOME = ("qwen3_moe", "gpt_oss", "deepseek_v3")


def both(pair: Pair, action) -> None:
    """Apply one change to both models."""
    for model in (pair.reference, pair.ours):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            action(model)


def assert_same_logits(pair: Pair) -> torch.Tensor:
    found = logits(pair.ours, pair.batch)
    assert_close(found, logits(pair.reference, pair.batch), limit_on(pair.batch))
    return found


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model_type", SOME)
def test_disabled_merged_unmerged_and_deleted(model_type, order, device):
    pair = adapted_pair(
        model_type, recipe(model_type), attention(model_type), order=order, device=device
    )
    plain = logits(tiny_models.build(model_type).to(device), pair.batch)
    adapted = assert_same_logits(pair)
    with pair.reference.disable_adapter(), pair.ours.disable_adapter():
        disabled = assert_same_logits(pair)
    assert_close(disabled, plain, limit_on(pair.batch))
    both(pair, lambda model: model.merge_adapter())
    assert_close(assert_same_logits(pair), adapted, 1e-4)
    both(pair, lambda model: model.unmerge_adapter())
    assert_close(assert_same_logits(pair), adapted, 1e-4)
    assert_same_step(pair)
    both(pair, lambda model: model.delete_adapter("default"))
    bare = Pair(pair.reference.base_model.model, pair.ours.base_model.model, pair.batch)
    assert_close(assert_same_logits(bare), plain, 1e-4)
    assert no_factors_left(pair.ours)


@window.second_adapter
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model_type", SOME)
def test_several_adapters(model_type, order, device):
    """Switch and sum adapters of different rank and scaling, and train the sum."""
    pair = adapted_pair(model_type, recipe(model_type), order=order, device=device)
    second = lora_config(recipe(model_type), r=5, lora_alpha=3)
    both(pair, lambda model: model.add_adapter("second", second))
    if order == "patch first, again after":
        patch_model(pair.ours)
    first_only = assert_same_logits(pair)
    both(pair, lambda model: model.set_adapter("second"))
    second_only = assert_same_logits(pair)
    both(pair, lambda model: model.base_model.set_adapter(["default", "second"]))
    summed = assert_same_logits(pair)
    for a, b in ((first_only, second_only), (first_only, summed), (second_only, summed)):
        assert rel_err(a, b) > 1e-3
    assert_same_step(pair)
    both(pair, lambda model: model.base_model.set_adapter(["second", "default"]))
    assert_close(assert_same_logits(pair), summed, limit_on(pair.batch))
    both(pair, lambda model: model.delete_adapter("second"))
    assert_close(assert_same_logits(pair), first_only, limit_on(pair.batch))


@pytest.mark.parametrize("model_type", SOME)
def test_merge_and_unload_leaves_a_patched_base(model_type, device):
    pair = adapted_pair(model_type, recipe(model_type), device=device)
    adapted = logits(pair.ours, pair.batch)
    merged = Pair(pair.reference.merge_and_unload(), pair.ours.merge_and_unload(), pair.batch)
    assert_close(assert_same_logits(merged), adapted, 1e-4)
    assert {(row.tier, row.lora) for row in patch_report(merged.ours)} == {("full", "none")}
    unpatch_model(merged.ours)
    assert not any("_moe_patch" in m.__dict__ for m in merged.ours.modules())
    assert_same_logits(merged)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "minimax_m2"])
def test_router_in_modules_to_save(model_type, order, device):
    name = router_parameter(model_type).split(".")[0]
    pair = adapted_pair(model_type, EXPERTS, order=order, modules_to_save=[name], device=device)
    trained = [
        n for n, p in pair.ours.named_parameters() if p.requires_grad and "modules_to_save" in n
    ]
    assert any(n.endswith("weight") for n in trained)
    assert_same_step(pair)
    both(
        pair,
        lambda model: [
            p.data.mul_(-1) for n, p in model.named_parameters() if "modules_to_save" in n
        ],
    )
    moved = assert_same_logits(pair)
    with pair.reference.disable_adapter(), pair.ours.disable_adapter():
        assert rel_err(assert_same_logits(pair), moved) > 1e-2
    assert_same_step(pair)
    before = len(patch_report(pair.ours))
    assert before == 2, "the second router must not count as a second block"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_adapter_saved_from_patched_loads_into_unpatched(model_type, tmp_path, device):
    base = tiny_models.build(model_type).to(device)
    pair = adapted_pair(model_type, recipe(model_type), attention(model_type), device=device)
    both(
        pair,
        lambda model: model.save_pretrained(
            tmp_path / ("ours" if model is pair.ours else "theirs")
        ),
    )
    files = [
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs")
    ]
    assert list(files[0]) == list(files[1])
    for key, tensor in files[1].items():
        assert_bits(files[0][key], tensor, key)
    loaded = PeftModel.from_pretrained(base, tmp_path / "ours")
    assert_close(logits(loaded, pair.batch), logits(pair.ours, pair.batch), limit_on(pair.batch))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"lora_dropout": 0.1}, "lora_dropout"), ({"use_dora": True}, "use_dora|DoRA")],
)
def test_pefts_own_refusals_reach_the_user(options, message):
    model = tiny_models.build("qwen3_moe")
    with pytest.raises(ValueError, match=message) as theirs:
        get_peft_model(copy.deepcopy(model), lora_config(EXPERTS, **options))
    patch_model(model)
    with pytest.raises(ValueError, match=message) as ours:
        get_peft_model(model, lora_config(EXPERTS, **options))
    assert str(ours.value) == str(theirs.value)


def test_mixed_adapter_batches_reach_pefts_own_error(device):
    pair = adapted_pair("qwen3_moe", EXPERTS, device=device)
    names = ["default"] * 2
    errors = []
    for model in (pair.reference, pair.ours):
        with pytest.raises(ValueError, match="mixed adapter batches") as raised:
            model.eval()(input_ids=pair.batch["input_ids"], adapter_names=names)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]
    assert no_factors_left(pair.ours)


def fill_factors(model: PeftModel, value: float) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.fill_(value)


@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss"])
def test_copies_of_an_adapted_model_stand_on_their_own(model_type, device):
    ours, batch = adapted_pair(
        model_type, recipe(model_type), attention(model_type), device=device
    )[1:]
    out = logits(ours, batch)
    twin = copy.deepcopy(ours)
    assert_bits(logits(twin, batch), out)
    fill_factors(twin, 0.09)
    assert_bits(logits(ours, batch), out)
    moved = logits(twin, batch)
    assert rel_err(moved, out) > 1e-2
    fill_factors(ours, 0.09)
    assert_bits(logits(ours, batch), moved)
    unpatch_model(twin)
    assert {row.lora for row in patch_report(ours)} == {"fused (down_proj, gate_up_proj)"}


@pytest.mark.parametrize("order", ORDERS)
def test_torch_save_of_an_adapted_model(order, tmp_path):
    ours, batch = adapted_pair("qwen2_moe", recipe("qwen2_moe"), order=order)[1:]
    torch.save(ours, tmp_path / "model.pt")
    twin = torch.load(tmp_path / "model.pt", weights_only=False)
    out = logits(ours, batch)
    assert_bits(logits(twin, batch), out)
    fill_factors(twin, 0.09)
    assert rel_err(logits(twin, batch), out) > 1e-2
    assert_bits(logits(ours, batch), out)


@window.single_expert
def test_a_single_expert_is_left_to_peft(device):
    pair = adapted_pair(
        "qwen3_moe", EXPERTS, overrides={"num_experts": 1, "num_experts_per_tok": 1}, device=device
    )
    assert_same_step(pair)
    for row in patch_report(pair.ours):
        assert row.lora.count("a single expert is a plain matrix to PEFT") == 2


@pytest.mark.parametrize("order", ORDERS)
def test_undo_under_adapters_leaves_peft_as_it_is(order, device):
    pair = adapted_pair(
        "qwen2_moe", recipe("qwen2_moe"), attention("qwen2_moe"), order=order, device=device
    )
    unpatch_model(pair.ours)
    assert_bits(logits(pair.ours, pair.batch), logits(pair.reference, pair.batch))
    for theirs, ours in zip(pair.reference.modules(), pair.ours.modules(), strict=True):
        assert theirs.__dict__.keys() == ours.__dict__.keys()


@pytest.mark.parametrize("frozen", ["lora_A", "lora_B"])
def test_one_factor_frozen(frozen, device):
    pair = adapted_pair("gpt_oss", EXPERTS, device=device)
    both(pair, lambda m: [p.requires_grad_(False) for n, p in m.named_parameters() if frozen in n])
    assert_same_step(pair)
    assert all(p.grad is None for n, p in pair.ours.named_parameters() if frozen in n)


@pytest.mark.parametrize("model_type", SOME)
def test_experts_without_tokens_get_zero_adapter_gradients(model_type, device):
    pair = adapted_pair(model_type, EXPERTS, device=device)
    batch = {key: value[:1, :1] for key, value in pair.batch.items()}
    for model in pair[:2]:
        model.zero_grad(set_to_none=True)
        model(input_ids=batch["input_ids"]).logits.square().sum().backward()
    wanted, got = adapter_gradients(pair.reference), adapter_gradients(pair.ours)
    for name, gradient in wanted.items():
        assert_close(got[name], gradient, limit_on(pair.batch), name)
        if ".lora_A." in name:
            rows = got[name].view(8, -1)
            assert (rows == 0).all(-1).sum() == 6, "one token reaches two experts of eight"
