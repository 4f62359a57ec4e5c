"""Adapters on experts act or raise an error, whatever was put between adapter and experts."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from moe_patch import (
    UnsupportedModelError,
    UnsupportedOptionError,
    patch_model,
    unpatch_model,
)
from moe_patch.runtime.adapters import adapted_twice, is_param_wrapper
from tests.support import tiny_models
from tests.support.adapters import (
    DOWN,
    EXPERTS,
    UP,
    adapt,
    adapted_pair,
    assert_adapters_act,
    assert_same_step,
    expert_modules,
    lora_config,
    no_factors_left,
    step,
)
from tests.support.numerics import FP32, assert_close
from tests.support.window import second_wrapper


@pytest.mark.versions
def test_two_wrappers_of_one_parameter_are_named() -> None:
    """Several parameters of one experts module, or one of two modules, are no conflict."""
    model = adapt(tiny_models.build("qwen3_moe"), lora_config(EXPERTS))
    wrappers = [(path, m) for path, m in model.named_modules() if is_param_wrapper(m)]
    assert adapted_twice(wrappers) is None
    said = adapted_twice([*wrappers, ("another.path", wrappers[0][1])])
    assert said is not None
    assert said.startswith(
        f"two adapters wrap {wrappers[0][1].parameter_name}, one attached to {wrappers[0][0]} and "
        "one to another.path; accepted: one PeftModel "
    )


@pytest.mark.versions
@second_wrapper
def test_a_parameter_adapted_before_and_after_is_refused_by_name() -> None:
    """A call would lose one of the two; with fuse_lora="off", PEFT runs both."""
    plain = tiny_models.build("qwen3_moe")
    batch = tiny_models.inputs(plain)
    ours = patch_model(adapt(copy.deepcopy(plain), lora_config((UP,))))
    ours = adapt(ours, lora_config((UP,)), seed=6)
    reference = adapt(adapt(plain, lora_config((UP,))), lora_config((UP,)), seed=6)
    path = r"base_model\.model\.\S+\.experts"
    said = (
        rf"two adapters wrap gate_up_proj, one attached to {path} and one to {path}\.base_layer; "
        r"accepted: one PeftModel .*, or fuse_lora='off'"
    )
    with pytest.raises(UnsupportedModelError, match=said):
        patch_model(ours)
    patch_model(unpatch_model(ours), fuse_lora="off")
    assert_close(step(ours, batch), step(reference, batch), FP32)
    named = dict(ours.named_parameters())
    for name, parameter in reference.named_parameters():
        if "lora_" in name and parameter.requires_grad:
            assert parameter.grad.any()
            assert_close(named[name].grad, parameter.grad, FP32, name)


def around_experts(model: Any, wrap: Any) -> None:
    """Put a module around the experts, below PEFT's wrappers."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if child in expert_modules(model):
                setattr(module, name, wrap(child))


@pytest.mark.parametrize("parameters", [EXPERTS, (UP,), (DOWN,)])
@pytest.mark.parametrize("wrap", [checkpoint_wrapper, torch.compile], ids=["checkpoint", "compile"])
def test_wrapped_experts_end_as_they_do_unpatched(wrap: Any, parameters: tuple[str, ...]) -> None:
    """Raise PEFT's error for a missing parameter; never return the base model's loss."""
    pair = adapted_pair("qwen3_moe", parameters)
    for model in (pair.reference, pair.ours):
        around_experts(model, wrap)
        with pytest.raises(ValueError, match="does not have a parameter"):
            model(**pair.batch)
        assert no_factors_left(model)


@pytest.mark.parametrize("parameters", [EXPERTS, (UP,), (DOWN,)])
def test_experts_unpatched_alone_run_with_their_adapters(parameters: tuple[str, ...]) -> None:
    pair = adapted_pair("qwen3_moe", parameters)
    for experts in expert_modules(pair.ours):
        unpatch_model(experts)
    assert_adapters_act(pair.ours, pair.batch)
    assert_same_step(pair)


@pytest.mark.parametrize("how", ["wrapped", "unpatched"])
def test_require_says_what_came_between(how: str) -> None:
    pair = adapted_pair("qwen3_moe", EXPERTS, patch={"fuse_lora": "require"})
    if how == "wrapped":
        around_experts(pair.ours, checkpoint_wrapper)
    else:
        unpatch_model(expert_modules(pair.ours)[1])
    with pytest.raises(UnsupportedOptionError, match="require' cannot hold: the experts below"):
        pair.ours(**pair.batch)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "qwen2_moe"])
@pytest.mark.parametrize("parameters", [EXPERTS, (UP,), (DOWN,)])
def test_a_forward_that_takes_no_factors_is_an_error(
    model_type: str, parameters: tuple[str, ...]
) -> None:
    pair = adapted_pair(model_type, parameters)
    before = step(pair.ours, pair.batch)
    experts = expert_modules(pair.ours)[1]

    def eager(self: Any, *args: Any) -> Any:
        return type(self).forward.__wrapped__(self, *args)

    experts.forward = MethodType(eager, experts)
    said = (
        r"Experts\.(gate_up|down)_proj: the adapter was left out, .* forward that .*<locals>\.eager"
    )
    with pytest.raises(UnsupportedModelError, match=said):
        pair.ours(**pair.batch)
    assert no_factors_left(pair.ours)
    del experts.forward
    assert torch.equal(step(pair.ours, pair.batch), before)


@pytest.mark.parametrize("compiled", ["block", "experts"])
@pytest.mark.parametrize("first", ["disabled", "enabled"])
def test_compiled_code_notices_that_adapters_are_on_again(compiled: str, first: str) -> None:
    """Compile the experts by themselves if a printing hook breaks the graph in front of them."""
    torch.compiler.reset()
    one_layer = {"num_hidden_layers": 1}
    pair = adapted_pair("qwen3_moe", EXPERTS, patch={"fuse_lora": "require"}, overrides=one_layer)

    def losses(model: Any) -> dict[str, Tensor]:
        found = {}
        for state in (first, *({"disabled", "enabled"} - {first}), first):
            with model.disable_adapter() if state == "disabled" else nullcontext():
                found[state] = model(**pair.batch).loss
        return found

    with torch.no_grad():
        expected = losses(pair.reference)
        for experts in expert_modules(pair.ours):
            experts.register_forward_hook(lambda *_: print(end=""))
            if compiled == "experts":
                experts.compile(backend="eager")
        if compiled == "block":
            for _, block in tiny_models.blocks(pair.ours.get_base_model()):
                block.compile(backend="eager")
        for state, loss in losses(pair.ours).items():
            assert_close(loss, expected[state], FP32, state)
    assert abs(expected["enabled"] - expected["disabled"]) > 1e-3
