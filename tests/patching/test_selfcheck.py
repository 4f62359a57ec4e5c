"""The patch-time self-check: faults caught, state preserved, checks reported as skipped."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from moe_patch import (
    UnsupportedModelError,
    lora_targets,
    patch_model,
    patch_report,
    register_family,
)
from moe_patch.families import families, logits
from moe_patch.ops.routing import softmax_topk
from moe_patch.patching import selfcheck
from moe_patch.patching.discover import discover
from moe_patch.runtime.spec import Const, FamilySpec, GluRule
from moe_patch.types import Glu, Routing
from tests.support import tiny_models
from tests.support.numerics import assert_bits
from tests.support.parity import run_model
from tests.support.snapshots import assert_unchanged, snapshot

EIGHT = (
    "qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "deepseek_v3", "glm4_moe", "minimax_m2", "gpt_oss"
)  # fmt: skip


def entry(model_type: str) -> FamilySpec:
    return next(spec for spec in families() if model_type in spec.model_types)


@pytest.fixture
def mutate() -> Iterator[Callable[..., None]]:
    """Register a changed entry for the duration of a test."""
    originals: list[FamilySpec] = []

    def change(model_type: str, **values: Any) -> None:
        originals.append(entry(model_type))
        register_family(dataclasses.replace(entry(model_type), **values))

    yield change
    for original in originals:
        register_family(original)


def params(model_type: str, **values: Any) -> dict[str, dict[str, Any]]:
    """Return the entry's routing parameters with some replaced by constants."""
    changed = {name: Const(value) for name, value in values.items()}
    return {"params": {**entry(model_type).params, **changed}}


def doubled(router: nn.Module, hidden: Tensor) -> Tensor:
    return 2 * logits.linear_fp32(router, hidden)


@functools.wraps(softmax_topk)
def detached(*args: Any, **kwargs: Any) -> Routing:
    """Return right ids and weights, without a gradient through the weights."""
    routing = softmax_topk(*args, **kwargs)
    return dataclasses.replace(routing, weights_TK=routing.weights_TK.detach())


WRONG = [
    ("qwen3_moe", lambda: params("qwen3_moe", renormalize=False), "gate.*routing weights"),
    ("qwen2_moe", lambda: params("qwen2_moe", renormalize=True), "gate.*routing weights"),
    ("mixtral", lambda: params("mixtral", renormalize=False), "gate.*routing weights"),
    ("olmoe", lambda: params("olmoe", top_k=1), "gate"),
    ("deepseek_v3", lambda: params("deepseek_v3", scale=1.0), "gate.*routing weights"),
    ("deepseek_v3", lambda: params("deepseek_v3", top_groups=2), "gate.*other experts"),
    ("deepseek_v3", lambda: {"bias": None}, "gate.*other experts"),
    ("glm4_moe", lambda: {"logits": doubled}, "gate.*router logits"),
    ("minimax_m2", lambda: params("minimax_m2", scale=2.0), "gate.*routing weights"),
    ("deepseek_v3", lambda: params("deepseek_v3", group_fill=0.0), "gate.*other experts"),
    ("qwen3_moe", lambda: {"routing": detached}, "gate.*hidden-state gradient"),
    ("gpt_oss", lambda: {"logits": logits.linear}, "router.*router logits"),
    ("gpt_oss", lambda: {"glu": GluRule("silu")}, "experts.*experts output"),
    ("gpt_oss", lambda: {"glu": GluRule("swiglu_oai", limit="limit")}, "experts.*experts output"),
]


@pytest.mark.routers
@pytest.mark.parametrize(("model_type", "change", "message"), WRONG)
def test_a_wrong_entry_is_caught_and_nothing_is_bound(mutate, model_type, change, message) -> None:
    mutate(model_type, **change())
    model = tiny_models.build(model_type)
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match=rf"model\.layers\.0\.mlp\.{message}") as error:
        patch_model(model)
    assert "self-check" in str(error.value)
    assert_unchanged(before, snapshot(model))


def test_a_wrong_gradient_alone_is_caught(monkeypatch) -> None:
    """Catch a wrong backward behind right outputs by its gradients."""
    from moe_patch.ops.experts import torch_backend

    backward = torch_backend.experts_backward

    def halved(*args: Any, **options: Any) -> Any:
        grads = backward(*args, **options)
        return grads._replace(x=grads.x / 2)

    monkeypatch.setattr(torch_backend, "experts_backward", halved)
    with pytest.raises(UnsupportedModelError, match="experts.*hidden-state gradient"):
        patch_model(tiny_models.build("qwen3_moe"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", EIGHT)
def test_right_entries_pass_in_every_dtype(model_type, dtype) -> None:
    model = patch_model(tiny_models.build(model_type, dtype))
    assert {row.self_check for row in patch_report(model)} == {"passed"}


# --- left alone -----------------------------------------------------------------------------------


def states() -> tuple:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()


@pytest.mark.parametrize("model_type", EIGHT)
def test_the_model_and_every_rng_are_as_before(model_type) -> None:
    model = tiny_models.build(model_type)
    run_model(model, tiny_models.inputs(model))
    for i, module in enumerate(model.modules()):
        module.training = i % 3 != 0
    torch.randn(5)
    flags = [module.training for module in model.modules()]
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: t.detach().clone() for name, t in tensors.items()}
    grads = {name: (t.grad, t.grad.clone()) for name, t in model.named_parameters()}
    versions = {name: t._version for name, t in tensors.items()}
    before, rng = snapshot(model), states()
    with mock.patch("torch.cuda.manual_seed_all") as seed_all:
        for found in discover(model):
            assert selfcheck.check(found, "auto") == "passed"
    assert not seed_all.called, "CUDA would start from this seed, not the user's"
    assert_unchanged(before, snapshot(model))
    assert torch.equal(states()[0], rng[0])
    assert states()[1:] == rng[1:]
    assert [module.training for module in model.modules()] == flags
    for name, t in tensors.items():
        assert_bits(t, values[name], name)
        assert t._version == versions[name]
    for name, p in model.named_parameters():
        assert p.grad is grads[name][0]
        assert_bits(p.grad, grads[name][1], name)


@pytest.mark.parametrize("model_type", EIGHT)
def test_no_hook_fires(model_type) -> None:
    model = tiny_models.build(model_type)
    fired: list[str] = []

    def note(module: nn.Module, *_: Any) -> None:
        fired.append(type(module).__name__)

    for module in model.modules():
        module.register_forward_hook(note)
        module.register_forward_pre_hook(note)
        module.register_full_backward_hook(note)
    for p in model.parameters():
        p.register_hook(lambda grad: fired.append("gradient"))
    everywhere = nn.modules.module.register_module_forward_hook(
        lambda module, *_: note(module) if module is not None and watched(module) else None
    )
    own = {id(module) for module in model.modules()}

    def watched(module: nn.Module) -> bool:
        return id(module) in own

    patch_model(model)
    everywhere.remove()
    # transformers' own experts forward calls the activation as a module.
    assert {name for name in fired if "SiLU" not in name} == set()


@pytest.mark.parametrize("where", ["no_grad", "autocast", "default dtype"])
def test_the_surrounding_state_does_not_matter(where) -> None:
    model = tiny_models.build("deepseek_v3")
    if where == "no_grad":
        with torch.no_grad():
            patch_model(model)
    elif where == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            patch_model(model)
    else:
        torch.set_default_dtype(torch.float64)
        try:
            patch_model(model)
        finally:
            torch.set_default_dtype(torch.float32)
    assert {row.self_check for row in patch_report(model)} == {"passed"}


# --- skipped or off -------------------------------------------------------------------------------


def self_checks(model: nn.Module) -> set[str]:
    return {row.self_check for row in patch_report(patch_model(model))}


def test_meta_weights_are_skipped_and_said_so() -> None:
    with torch.device("meta"):
        model = tiny_models._model_class("qwen3_moe")(tiny_models.config("qwen3_moe"))
    assert self_checks(model) == {"skipped: meta weights"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", ["gate.weight", "experts.down_proj"])
def test_weights_that_are_not_finite_are_skipped_and_said_so(which, value) -> None:
    model = tiny_models.build("qwen3_moe")
    for layer in (0, 1):
        with torch.no_grad():
            model.get_parameter(f"model.layers.{layer}.mlp.{which}").view(-1)[3] = value
    assert self_checks(model) == {"skipped: weights hold NaN or Inf"}


def test_a_bad_layer_does_not_speak_for_the_others() -> None:
    model = tiny_models.build("qwen3_moe")
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj[0, 0, 0] = float("nan")
    rows = patch_report(patch_model(model))
    assert [row.self_check for row in rows] == ["skipped: weights hold NaN or Inf", "passed"]


def test_accelerate_hooks_are_skipped_and_said_so() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = tiny_models.build("qwen3_moe")
    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeExperts":
            add_hook_to_module(module, ModelHook())
    assert self_checks(model) == {"skipped: an accelerate hook moves the weights"}


def test_off_is_off(monkeypatch) -> None:
    monkeypatch.setattr(selfcheck, "check", lambda *_: pytest.fail("the self-check ran"))
    model = patch_model(tiny_models.build("qwen3_moe"), self_check=False)
    assert {row.self_check for row in patch_report(model)} == {"off"}


def test_each_kind_of_block_is_checked_once(monkeypatch) -> None:
    checked: list[str] = []
    check = selfcheck.check

    def noted(found: Any, *args: Any) -> str:
        checked.append(found.path)
        return check(found, *args)

    monkeypatch.setattr(selfcheck, "check", noted)
    patch_model(tiny_models.build("qwen3_moe", num_hidden_layers=4))
    assert checked == ["model.layers.0.mlp"]
    checked.clear()
    model = tiny_models.build("qwen3_moe", num_hidden_layers=4)
    model.model.layers[2].mlp.gate.norm_topk_prob = False
    model.model.layers[3].mlp.experts.act_fn = nn.ReLU()
    patch_model(model)
    assert checked == [f"model.layers.{i}.mlp" for i in (0, 2, 3)]


@pytest.mark.parametrize("kind", ["gelu", "relu"])
def test_the_error_names_module_error_and_limit(mutate, kind) -> None:
    assert kind in Glu.KINDS
    mutate("qwen3_moe", glu=GluRule(kind))
    with pytest.raises(UnsupportedModelError) as error:
        patch_model(tiny_models.build("qwen3_moe"))
    message = str(error.value)
    for part in ("model.layers.0.mlp.experts", "(relative)", "limit 1e-05", "self_check=False"):
        assert part in message


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4"])
def test_a_config_that_transformers_own_block_cannot_run_is_named(name) -> None:
    """Raise our error for more experts per token than exist, and bind nothing."""
    model = tiny_models.build(name, **tiny_models.with_experts(name, 4, 5))
    with pytest.raises(UnsupportedModelError, match=r"does not run on random data: .*; check"):
        patch_model(model)
    assert not patch_report(model)
    with pytest.warns(match="does not run on random data"):
        patch_model(model, strict=False)
    assert {row.tier for row in patch_report(model)} == {"refused"}


def test_an_adapter_of_a_large_scaling_on_a_router_passes() -> None:
    """Keep random logits small: scores that underflow would tie, and ties are not compared."""
    model = tiny_models.build("hunyuan_v1_moe")
    targets = lora_targets(model, experts=False, attention=False, shared=False)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=1024, **targets))
    assert {row.self_check for row in patch_report(patch_model(adapted))} == {"passed"}
