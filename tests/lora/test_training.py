"""Adapters in training: the loss falls as with PEFT, checkpointing and failures change nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from peft.tuners.lora import layer as peft_layer

import moe_patch.runtime.experts
from moe_patch import UnsupportedModelError, patch_model, patch_report, unpatch_model
from moe_patch.runtime.peft_release import lora_proxies
from tests.support import tiny_models
from tests.support.adapters import (
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
    no_factors_left,
    recipe,
    step,
)
from tests.support.numerics import assert_bits, assert_close, bf16_rule
from tests.support.snapshots import assert_unchanged, logits, snapshot


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
def test_five_steps_on_expert_factors_reduce_the_loss(model_type, device):
    pair = adapted_pair(model_type, EXPERTS, init_lora_weights=True, r=8, device=device)
    losses = train(pair.ours, pair.batch, steps=6, lr=0.1, only="experts")
    assert losses[-1] < losses[0]
    assert all(torch.isfinite(torch.tensor(losses)))


@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss"])
def test_thirty_steps_follow_peft(model_type, device):
    pair = adapted_pair(
        model_type, recipe(model_type), attention(model_type), init_lora_weights=True, device=device
    )
    curves = [
        torch.tensor(train(m, pair.batch, steps=30, lr=0.05)) for m in (pair.reference, pair.ours)
    ]
    assert curves[0][-1] < 0.9 * curves[0][0], "nothing is learned, the comparison is empty"
    assert ((curves[1] - curves[0]).abs() / curves[0]).max() < 1e-3
    assert_close(*(logits(model, pair.batch) for model in (pair.ours, pair.reference)), 1e-3)


class Boom(Exception):
    pass


@pytest.mark.parametrize("order", ["peft first", "patch first, again after"])
def test_an_exception_leaves_no_factors_behind(order, monkeypatch, device):
    pair = adapted_pair("qwen3_moe", EXPERTS, order=order, device=device)
    expected = logits(pair.ours, pair.batch)
    seen = []

    def fail(*args, lora13=None, lora2=None, **options):
        seen.append((lora13, lora2))
        raise Boom

    with monkeypatch.context() as patching:
        patching.setattr(moe_patch.runtime.experts, "experts_mlp", fail)
        with pytest.raises(Boom):
            pair.ours(**pair.batch)
    assert seen[0][0] is not None
    assert seen[0][1] is not None
    assert no_factors_left(pair.ours)
    assert_bits(logits(pair.ours, pair.batch), expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss"])
def test_gradient_checkpointing_changes_no_bit(model_type, reentrant, order, device):
    """Checkpointing changes no bit.

    The auxiliary loss is off: transformers loses its gradient under reentrant recompute.
    """
    overrides = {"output_router_logits": False}
    targets = [recipe(model_type), attention(model_type)]
    ours, batch = adapted_pair(
        model_type, *targets, order=order, overrides=overrides, device=device
    )[1:]
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


@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant", "of h alone"])
def test_recompute_merges_nothing(recompute, monkeypatch, device):
    """Run PEFT's proxies, which add a delta to a weight, neither in forward nor in recompute."""
    theirs, ours, batch = adapted_pair(
        "qwen3_moe", EXPERTS, overrides={"output_router_logits": False},
        patch={"recompute": recompute == "of h alone"}, device=device,
    )  # fmt: skip
    if recompute != "of h alone":
        ours.enable_input_require_grads()
        ours.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": recompute == "reentrant"}
        )

    def merge(self, weight):
        raise AssertionError("a merged weight was evaluated")

    for proxy in lora_proxies():
        monkeypatch.setattr(proxy, "forward", merge)
    monkeypatch.setattr(peft_layer.ParamWrapper, "get_delta_weight", merge)
    step(ours, batch)
    adapter_gradients(ours)
    with pytest.raises(AssertionError, match="merged"):
        step(theirs, batch)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_with_the_auxiliary_loss_equals_peft(reentrant, device):
    pair = adapted_pair("qwen3_moe", recipe("qwen3_moe"), device=device)
    for model in pair[:2]:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": reentrant}
        )
    assert_same_step(pair)


def close_over(experts, calls):
    """Wrap forward in a closure of exactly three arguments.

    transformers' expert and tensor parallelism do the same.
    """
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
    base.__dict__.pop("peft_config", None)  # PEFT 0.18 leaves it there
    unpatch_model(base)
    assert all(
        e.forward.__name__ == "forward" and e.forward.__closure__ for e in expert_modules(base)
    )
    if when == "before patching":
        assert_unchanged(before, {**before, **snapshot(base)})
    calls.clear()
    logits(base, batch)
    assert calls == [(14, 2), (14, 2)]


@pytest.mark.parametrize("trainable", [False, True])
def test_adapter_and_unfrozen_experts_train_together(trainable, device):
    """Give the base under an adapter PEFT's own dense gradient, only if the base is trainable."""
    pair = adapted_pair("qwen3_moe", [UP], device=device)
    for model in (pair.reference, pair.ours):
        for experts in expert_modules(model):
            experts.gate_up_proj.requires_grad_(trainable)
            experts.down_proj.requires_grad_(trainable)
    assert_same_step(pair)
    for experts in expert_modules(pair.ours):
        assert (experts.gate_up_proj.grad is not None) == trainable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype, device):
    """Match PEFT under bf16 autocast on equal ids; gradients keep the factors' dtype."""
    pair = adapted_pair("qwen3_moe", EXPERTS, dtype=dtype, device=device)
    exact = copy.deepcopy(pair.reference).double()
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(40, 8, generator=generator).argsort(-1)[:, :2].to(device)
    x, probe = torch.randn(2, 40, 32, generator=generator).bfloat16().float().to(device)
    weights = torch.rand(40, 2, generator=generator).bfloat16().float().to(device)
    results = []
    for model in (pair.reference, pair.ours, exact):
        wrapper = next(m for name, m in model.named_modules() if name.endswith("mlp.experts"))
        factors = [p for p in wrapper.parameters() if p.requires_grad]
        with torch.autocast(device, torch.bfloat16, enabled=model is not exact):
            wide = torch.float64 if model is exact else torch.float32
            out = wrapper(x.to(wide), ids, weights.to(wide))
        gradients = torch.autograd.grad(out, factors, probe.to(out.dtype))
        assert [g.dtype for g in gradients] == [p.dtype for p in factors]
        results.append([out, *gradients])
    for name, theirs, ours, ref in zip(["out", "A", "B", "A", "B"], *results, strict=True):
        bf16_rule(ours, theirs, ref, name)


@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_a_compiled_block_with_adapters_is_one_graph(model_type, device):
    ours = adapted_pair(model_type, EXPERTS, device=device).ours
    block = next(m for name, m in ours.named_modules() if name.endswith(".mlp"))
    x = tiny_models.hidden(block, 2, 5)
    factors = [p for p in block.parameters() if p.requires_grad]

    def run(module):
        out = module(x)
        out = out[0] if isinstance(out, tuple) else out
        return out, *torch.autograd.grad(out.sum(), [x, *factors])

    torch._dynamo.reset()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(run(compiled), run(block), strict=True):
        assert_close(found, wanted, 1e-6)


def test_factors_that_do_not_fit_the_local_weight_are_a_named_error(device):
    """Raise an error naming both shapes.

    Under expert parallelism the module holds a slice of the weight that the adapter was made for.
    """
    pair = adapted_pair("qwen3_moe", [UP], device=device)
    experts = expert_modules(pair.ours)[0]
    experts.gate_up_proj.data = experts.gate_up_proj.data[:4]
    with pytest.raises(
        UnsupportedModelError, match=r"Qwen3MoeExperts\.gate_up_proj.*\(8, 32, 32\).*\(4, 32, 32\)"
    ):
        pair.ours(**pair.batch)
    assert no_factors_left(pair.ours)
