"""Several forwards before one backward with adapters on experts.

An adapter added after patching is registered anew by PEFT in every forward, and torch then
increments the version of the registered weight. The reference is PEFT on transformers' eager
experts.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from moe_patch.ops.experts import torch_backend
from tests.support import window
from tests.support.adapters import (
    EXPERTS,
    ORDERS,
    Pair,
    adapted_pair,
    adapter_gradients,
    expert_modules,
    lora_config,
    no_factors_left,
    router_parameter,
)
from tests.support.numerics import FP32, assert_close, probe

STACKS = ("input_linear.weight", "output_linear.weight")
# A bound block, another layout with biases, identity experts, one projection per module, and a
# module with its own norm and gate between grouped products.
OTHERS = ("qwen2_moe", "gpt_oss", "longcat_flash", "jetmoe", "muse_spark")


@functools.cache
def pair_of(model_type: str, order: str = "patch first") -> Pair:
    """Return a pair that tests share and leave unchanged."""
    parameters = STACKS if model_type == "jetmoe" else EXPERTS
    if model_type in ("qwen3_moe", "qwen2_moe", "gpt_oss"):
        parameters = (*parameters, router_parameter(model_type))
    return adapted_pair(model_type, parameters, order=order)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the model's loss, or for a tower a number that depends on all outputs."""
    out = model(**batch)
    return out.loss if "labels" in batch else probe(out[0])


def flipped(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.flip(-1) for key, value in batch.items()}


def two(model: nn.Module, batch: dict[str, Tensor]) -> None:
    (loss_of(model, batch) - 0.5 * loss_of(model, flipped(batch))).backward()


def reference_pass(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Run a preference step: a forward, the base model without gradients, the flipped batch."""
    first = loss_of(model, batch)
    with torch.no_grad(), model.disable_adapter():
        base = loss_of(model, batch)
    ((first - base).square() - 0.5 * loss_of(model, flipped(batch))).backward()


def evaluation(model: nn.Module, batch: dict[str, Tensor]) -> None:
    loss = loss_of(model, batch)
    model.eval()
    with torch.no_grad():
        model(**flipped(batch))
    model.train()
    loss.backward()


def crossed(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Run two forwards, and their backwards in the same order."""
    first, second = loss_of(model, batch), loss_of(model, flipped(batch))
    first.backward()
    second.backward()


def gradients(model: nn.Module, batch: dict[str, Tensor], order_of_work) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    model.train()
    order_of_work(model, batch)
    return adapter_gradients(model)


def assert_same_gradients(pair: Pair, order_of_work) -> None:
    wanted = gradients(pair.reference, pair.batch, order_of_work)
    got = gradients(pair.ours, pair.batch, order_of_work)
    assert wanted.keys() == got.keys()
    for name, gradient in wanted.items():
        assert gradient.any(), f"{name}: the reference's gradient is zero, the comparison is empty"
        assert_close(got[name], gradient, 2 * FP32, name)
    assert no_factors_left(pair.ours)


def base_weights(model: nn.Module) -> list[Tensor]:
    return [
        p
        for experts in expert_modules(model)
        for name, p in experts._parameters.items()
        if name in ("gate_up_proj", "down_proj")
    ]


@pytest.fixture(params=[False, True], ids=["frozen", "trained"])
def trained(request):
    """Yield a function that trains or freezes a pair's expert weights until the test ends."""
    changed = []

    def apply(pair: Pair) -> None:
        changed.append(pair)
        for model in (pair.reference, pair.ours):
            for weight in base_weights(model):
                weight.requires_grad_(request.param)

    yield apply
    for pair in changed:
        for model in (pair.reference, pair.ours):
            for weight in base_weights(model):
                weight.requires_grad_(False)


@pytest.mark.parametrize("order_of_work", [two, reference_pass, evaluation, crossed])
def test_forwards_before_a_backward(order_of_work, trained):
    pair = pair_of("qwen3_moe")
    trained(pair)
    assert_same_gradients(pair, order_of_work)


@pytest.mark.parametrize("order_of_work", [two, reference_pass])
@pytest.mark.parametrize("model_type", OTHERS)
def test_forwards_before_a_backward_in_other_families(model_type, order_of_work):
    assert_same_gradients(pair_of(model_type), order_of_work)


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen2_moe"])
def test_trained_weights_of_other_families(model_type, trained):
    """Gradients agree; an alias must not drop that of a weight stored transposed."""
    pair = pair_of(model_type)
    trained(pair)
    assert_same_gradients(pair, two)


@pytest.mark.parametrize("order", ["peft first", "patch first, again after"])
def test_forwards_before_a_backward_with_fused_adapters(order, trained):
    """Gradients agree; factors must not be kept from one call to the next."""
    pair = pair_of("qwen3_moe", order)
    trained(pair)
    assert_same_gradients(pair, reference_pass)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_forwards_before_a_backward_under_checkpointing(model_type, reentrant, trained):
    """Gradients agree; an alias must not drop that of a trained weight.

    The auxiliary loss is off: transformers detaches it under reentrant recompute.
    """
    over = {"output_router_logits": False}
    pair = adapted_pair(model_type, EXPERTS, order="patch first", overrides=over)
    trained(pair)
    calls = []
    expert_modules(pair.ours)[0].register_forward_pre_hook(lambda *_: calls.append(1))
    for model in (pair.reference, pair.ours):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": reentrant}
        )
    assert_same_gradients(pair, reference_pass)
    assert len(calls) == 5, "nothing was recomputed"


@pytest.mark.parametrize("order", ORDERS)
def test_layers_that_share_their_weights(order):
    """Gradients agree under layer_replication: two layers register on one saved weight."""
    pair = adapted_pair("qwen3_moe", EXPERTS, order=order, layer_replication=[[0, 2], [1, 2]])
    shared = base_weights(pair.ours)
    assert len({w.data_ptr() for w in shared}) < len(shared), "no weight is shared"
    for work in (lambda model, batch: loss_of(model, batch).backward(), two):
        assert_same_gradients(pair, work)


@window.second_adapter
def test_one_adapter_in_the_first_forward_and_two_in_the_second():
    """Gradients agree if the second forward runs PEFT's merged weight, which registers as well."""
    pair = adapted_pair("qwen3_moe", EXPERTS, order="patch first")
    for model in (pair.reference, pair.ours):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            model.add_adapter("second", lora_config(EXPERTS, r=5))

    def work(model, batch):
        model.base_model.set_adapter("default")
        first = loss_of(model, batch)
        model.base_model.set_adapter(["default", "second"])
        (first - 0.5 * loss_of(model, flipped(batch))).backward()

    assert_same_gradients(pair, work)


@window.factors_in_forward
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "muse_spark"])
def test_no_weight_is_copied_for_backward(model_type, trained):
    """Every saved tensor of a weight's size shares the weight's memory."""
    pair = pair_of(model_type)
    trained(pair)
    weights = base_weights(pair.ours)
    sizes = {w.numel() for w in weights}
    own = {w.untyped_storage().data_ptr() for w in weights}
    saved = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dim() == 3 and tensor.numel() in sizes and tensor.shape[0] == weights[0].shape[0]:
            saved.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(pair.ours, pair.batch)
    assert len(saved) >= len(weights), "no weight was saved: the test looks for the wrong thing"
    assert set(saved) == own


@window.factors_in_forward
@pytest.mark.parametrize("trained", [True], indirect=True)
def test_a_trained_weight_gets_its_gradient_without_a_copy(trained, monkeypatch):
    """Autograd takes the returned gradient without a copy, also through the alias."""
    pair = pair_of("qwen3_moe")
    trained(pair)
    returned, backward = set(), torch_backend.experts_backward

    def watched(*args, **options):
        grads = backward(*args, **options)
        returned.update(g.data_ptr() for g in (grads.w13, grads.w2))
        return grads

    monkeypatch.setattr(torch_backend, "experts_backward", watched)
    gradients(pair.ours, pair.batch, lambda model, batch: loss_of(model, batch).backward())
    assert {w.grad.data_ptr() for w in base_weights(pair.ours)} == returned


@pytest.mark.parametrize("order", ["peft first", "patch first, again after"])
def test_a_weight_that_changes_before_backward_is_an_error(order):
    """Raise autograd's error for a weight changed in place, also with fused adapters."""
    pair = adapted_pair("qwen3_moe", EXPERTS, order=order)
    loss = loss_of(pair.ours, pair.batch)
    with torch.no_grad():
        base_weights(pair.ours)[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("trained", [True], indirect=True)
def test_two_forwards_of_compiled_experts(trained):
    """Make the alias outside of the compiled graph, which saves its own inputs."""
    torch.compiler.reset()
    pair = adapted_pair("qwen3_moe", EXPERTS, order="patch first")
    trained(pair)
    expert_modules(pair.ours)[0].compile(backend="aot_eager")
    assert_same_gradients(pair, two)
