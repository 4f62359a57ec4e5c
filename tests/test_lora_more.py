"""Adapters over time: switching, merging, saving, training, checkpointing, failing."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file

import moe_patch.experts_module
from moe_patch import patch_model, patch_report, unpatch_model
from moe_patch.lora import HANDED_DOWN
from tests import tiny_models
from tests.adapters import (
    EXPERTS,
    FAMILIES,
    ORDERS,
    UP,
    Pair,
    adapt,
    adapted_pair,
    adapter_gradients,
    assert_same_step,
    attention,
    expert_modules,
    lora_config,
    router_parameter,
    step,
)
from tests.numerics import FP32, assert_bits, assert_close, rel_err
from tests.snapshots import assert_unchanged, logits, snapshot

SOME = ("qwen3_moe", "gpt_oss", "deepseek_v3")


def recipe(model_type: str) -> list[str]:
    return [*EXPERTS, router_parameter(model_type)]


def both(pair: Pair, action) -> None:
    """Do the same to the two models."""
    for model in (pair.reference, pair.ours):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            action(model)


def assert_same_logits(pair: Pair, limit: float = FP32) -> torch.Tensor:
    found = logits(pair.ours, pair.batch)
    assert_close(found, logits(pair.reference, pair.batch), limit)
    return found


def no_factors_left(model) -> bool:
    return not any(HANDED_DOWN in experts.__dict__ for experts in expert_modules(model))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model_type", SOME)
def test_disabled_merged_unmerged_and_deleted(model_type, order):
    plain = logits(tiny_models.build(model_type), tiny_models.inputs(tiny_models.build(model_type)))
    pair = adapted_pair(model_type, recipe(model_type), attention(model_type), order=order)
    adapted = assert_same_logits(pair)
    with pair.reference.disable_adapter(), pair.ours.disable_adapter():
        disabled = assert_same_logits(pair)
    assert_close(disabled, plain, FP32)
    both(pair, lambda model: model.merge_adapter())
    assert_close(assert_same_logits(pair), adapted, 1e-4)
    both(pair, lambda model: model.unmerge_adapter())
    assert_close(assert_same_logits(pair), adapted, 1e-4)
    assert_same_step(pair)
    both(pair, lambda model: model.delete_adapter("default"))
    bare = Pair(pair.reference.base_model.model, pair.ours.base_model.model, pair.batch)
    assert_close(assert_same_logits(bare), plain, 1e-4)
    assert no_factors_left(pair.ours)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model_type", SOME)
def test_several_adapters(model_type, order):
    """Switch, sum, and train the sum; the second has another rank and scaling."""
    pair = adapted_pair(model_type, recipe(model_type), order=order)
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
    assert_close(assert_same_logits(pair), summed, FP32)
    both(pair, lambda model: model.delete_adapter("second"))
    assert_close(assert_same_logits(pair), first_only, FP32)


@pytest.mark.parametrize("model_type", SOME)
def test_merge_and_unload_leaves_a_patched_base(model_type):
    pair = adapted_pair(model_type, recipe(model_type))
    adapted = logits(pair.ours, pair.batch)
    merged = Pair(pair.reference.merge_and_unload(), pair.ours.merge_and_unload(), pair.batch)
    assert_close(assert_same_logits(merged), adapted, 1e-4)
    assert {(row.tier, row.lora) for row in patch_report(merged.ours)} == {("full", "none")}
    unpatch_model(merged.ours)
    assert not any("_moe_patch" in m.__dict__ for m in merged.ours.modules())
    assert_same_logits(merged)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "minimax_m2"])
def test_router_in_modules_to_save(model_type, order):
    name = router_parameter(model_type).split(".")[0]
    pair = adapted_pair(model_type, EXPERTS, order=order, modules_to_save=[name])
    trained = [n for n, p in pair.ours.named_parameters() if p.requires_grad and "modules_to_save" in n]
    assert any(n.endswith("weight") for n in trained)
    assert_same_step(pair)
    both(pair, lambda model: [p.data.mul_(-1) for n, p in model.named_parameters() if "modules_to_save" in n])
    moved = assert_same_logits(pair)
    with pair.reference.disable_adapter(), pair.ours.disable_adapter():
        assert rel_err(assert_same_logits(pair), moved) > 1e-2
    assert_same_step(pair)
    before = len(patch_report(pair.ours))
    assert before == 2, "the second router must not count as a second block"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_adapter_saved_from_patched_loads_into_unpatched(model_type, tmp_path):
    base = tiny_models.build(model_type)
    pair = adapted_pair(model_type, recipe(model_type), attention(model_type))
    both(pair, lambda model: model.save_pretrained(tmp_path / ("ours" if model is pair.ours else "theirs")))
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs")]
    assert list(files[0]) == list(files[1])
    for key, tensor in files[1].items():
        assert_bits(files[0][key], tensor, key)
    loaded = PeftModel.from_pretrained(base, tmp_path / "ours")
    assert_close(logits(loaded, pair.batch), logits(pair.ours, pair.batch), FP32)


@pytest.mark.parametrize(
    ("options", "message"), [({"lora_dropout": 0.1}, "lora_dropout"), ({"use_dora": True}, "use_dora|DoRA")]
)
def test_pefts_own_refusals_reach_the_user(options, message):
    model = tiny_models.build("qwen3_moe")
    with pytest.raises(ValueError, match=message) as theirs:
        get_peft_model(copy.deepcopy(model), lora_config(EXPERTS, **options))
    patch_model(model)
    with pytest.raises(ValueError, match=message) as ours:
        get_peft_model(model, lora_config(EXPERTS, **options))
    assert str(ours.value) == str(theirs.value)


def test_mixed_adapter_batches_reach_pefts_own_error():
    pair = adapted_pair("qwen3_moe", EXPERTS)
    names = ["default"] * 2
    errors = []
    for model in (pair.reference, pair.ours):
        with pytest.raises(ValueError, match="mixed adapter batches") as raised:
            model.eval()(input_ids=pair.batch["input_ids"], adapter_names=names)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]
    assert no_factors_left(pair.ours)


def train(model, batch, steps, lr, only=""):
    parameters = [p for n, p in model.named_parameters() if p.requires_grad and only in n]
    optimizer = torch.optim.SGD(parameters, lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("model_type", FAMILIES)
def test_five_steps_on_expert_factors_reduce_the_loss(model_type):
    pair = adapted_pair(model_type, EXPERTS, init_lora_weights=True, r=8)
    losses = train(pair.ours, pair.batch, steps=6, lr=0.1, only="experts")
    assert losses[-1] < losses[0]
    assert all(torch.isfinite(torch.tensor(losses)))


@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss"])
def test_thirty_steps_follow_peft(model_type):
    pair = adapted_pair(model_type, recipe(model_type), attention(model_type), init_lora_weights=True)
    curves = [torch.tensor(train(m, pair.batch, steps=30, lr=0.05)) for m in (pair.reference, pair.ours)]
    assert curves[0][-1] < 0.9 * curves[0][0], "nothing is learned, the comparison is empty"
    assert ((curves[1] - curves[0]).abs() / curves[0]).max() < 1e-3
    assert_same_logits(pair, 1e-3)


class Boom(Exception):
    pass


@pytest.mark.parametrize("order", ["peft first", "patch first, again after"])
def test_an_exception_leaves_no_factors_behind(order, monkeypatch):
    pair = adapted_pair("qwen3_moe", EXPERTS, order=order)
    expected = logits(pair.ours, pair.batch)
    seen = []

    def fail(*args, lora13=None, lora2=None, **options):
        seen.append((lora13, lora2))
        raise Boom

    with monkeypatch.context() as patching:
        patching.setattr(moe_patch.experts_module, "experts_mlp", fail)
        with pytest.raises(Boom):
            pair.ours(**pair.batch)
    assert seen[0][0] is not None
    assert seen[0][1] is not None
    assert no_factors_left(pair.ours)
    assert_bits(logits(pair.ours, pair.batch), expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss"])
def test_gradient_checkpointing_changes_no_bit(model_type, reentrant, order):
    """Without the auxiliary loss: transformers itself loses its gradient under reentrant recompute."""
    overrides = {"output_router_logits": False}
    targets = [recipe(model_type), attention(model_type)]
    ours, batch = adapted_pair(model_type, *targets, order=order, overrides=overrides)[1:]
    ours.enable_input_require_grads()
    plain = step(ours, batch)
    expected = {name: g.clone() for name, g in adapter_gradients(ours).items()}
    calls = []
    hook = expert_modules(ours)[0].register_forward_pre_hook(lambda *_: calls.append(1))
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    checkpointed = step(ours, batch)
    hook.remove()
    assert len(calls) == 2, "nothing was recomputed"
    assert_bits(checkpointed, plain)
    for name, gradient in adapter_gradients(ours).items():
        assert_bits(gradient, expected[name], name)
    assert no_factors_left(ours)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_with_the_auxiliary_loss_equals_peft(reentrant):
    pair = adapted_pair("qwen3_moe", recipe("qwen3_moe"))
    for model in pair[:2]:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert_same_step(pair)


def close_over(experts, calls):
    """As transformers' expert and tensor parallelism do: a closure of exactly three arguments."""
    inner = experts.forward

    def forward(hidden_states, top_k_index, top_k_weights):
        calls.append(tuple(top_k_index.shape))
        return inner(hidden_states, top_k_index, top_k_weights)

    experts.forward = forward


@pytest.mark.parametrize("when", ["before patching", "after patching"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_a_closure_on_the_experts_forward_still_runs(model_type, when):
    calls = []
    reference = tiny_models.build(model_type)
    ours, batch = copy.deepcopy(reference), tiny_models.inputs(reference)
    if when == "after patching":
        patch_model(ours)
    for experts in expert_modules(ours):
        close_over(experts, calls)
    logits(ours, batch)
    before = snapshot(ours)
    if when == "before patching":
        patch_model(ours)
    reference, ours = (adapt(model, lora_config(EXPERTS)) for model in (reference, ours))
    patch_model(ours)
    calls.clear()
    assert_same_step(Pair(reference, ours, batch))
    assert calls == [(14, 2), (14, 2)]
    assert {row.lora for row in patch_report(ours)} == {"fused (down_proj, gate_up_proj)"}
    base = ours.unload()
    unpatch_model(base)
    assert all(e.forward.__name__ == "forward" and e.forward.__closure__ for e in expert_modules(base))
    if when == "before patching":
        assert_unchanged(before, {**before, **snapshot(base)})
    calls.clear()
    logits(base, batch)
    assert calls == [(14, 2), (14, 2)]


@pytest.mark.parametrize("trainable", [False, True])
def test_adapter_and_unfrozen_experts_train_together(trainable):
    """A trainable base under an adapter gets PEFT's own dense gradient, and only then."""
    pair = adapted_pair("qwen3_moe", [UP])
    for model in (pair.reference, pair.ours):
        for experts in expert_modules(model):
            experts.gate_up_proj.requires_grad_(trainable)
            experts.down_proj.requires_grad_(trainable)
    assert_same_step(pair)
    for experts in expert_modules(pair.ours):
        assert (experts.gate_up_proj.grad is not None) == trainable
