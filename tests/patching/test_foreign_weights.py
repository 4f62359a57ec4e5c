"""Expert weights changed by another library: refused by name, or run as that library left them.

``Scaled`` stands for torchao's tensors: a wrapper subclass that implements only the few operators
that transformers' own loop over experts needs.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from moe_patch import (
    UnsupportedModelError,
    patch_model,
    patch_report,
    quantize_experts,
    unpatch_model,
)
from moe_patch.patching.discover import discover
from tests.support import tiny_models
from tests.support.numerics import FP32, assert_close
from tests.support.snapshots import assert_unchanged, logits, snapshot

aten = torch.ops.aten


class Scaled(Tensor):
    """int8 values with one scale per row; indexed by expert or transposed, it gives numbers."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=scale.dtype, device=values.device
        )

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        self.values_, self.scale_ = values, scale

    def __repr__(self) -> str:
        return f"Scaled({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (aten.detach.default, aten.alias.default):
            return Scaled(args[0].values_, args[0].scale_)
        if func in (aten.select.int, aten.index.Tensor, aten.t.default):
            values, scale = args[0].values_, args[0].scale_
            return func(values * scale, *args[1:])
        raise NotImplementedError(f"{cls.__name__}: {func}")


def scaled(weight: Tensor) -> nn.Parameter:
    scale = weight.detach().abs().amax(-1, keepdim=True) / 127
    return nn.Parameter(
        Scaled((weight.detach() / scale).round().to(torch.int8), scale), requires_grad=False
    )


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [experts for block in discover(model) for _, experts in block.experts]


def store(model: nn.Module, names: tuple[str, ...]) -> None:
    for experts in experts_of(model):
        for name in names:
            owner, _, last = name.rpartition(".")
            module = experts.get_submodule(owner)
            setattr(module, last, scaled(getattr(module, last)))


STACKS = [
    ("qwen3_moe", ("gate_up_proj", "down_proj")),
    ("qwen3_moe", ("down_proj",)),
    ("gpt_oss", ("gate_up_proj",)),
    ("gpt_oss", ("down_proj_bias",)),
    ("dbrx", ("mlp.v1",)),
]


@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize(("family", "names"), STACKS)
def test_a_foreign_tensor_is_refused_by_name_before_patching_and_in_the_call(
    family, names, self_check
):
    model = tiny_models.build(family)
    model.set_experts_implementation("eager")
    batch = tiny_models.inputs(model)
    patch_model(model, self_check=self_check)
    store(model, names)
    with torch.no_grad(), pytest.raises(UnsupportedModelError, match="Scaled.*unpatch_model"):
        model(**batch)
    unpatch_model(model)
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match=r"0\.\w+\.experts .*stored in tests.*Scaled"):
        patch_model(model, self_check=self_check)
    assert_unchanged(before, snapshot(model))
    assert patch_report(model) == []


@pytest.mark.parametrize("self_check", [True, False])
def test_not_strict_leaves_a_foreign_tensor_to_transformers(self_check):
    model = tiny_models.build("qwen3_moe")
    model.set_experts_implementation("eager")
    store(model, ("gate_up_proj", "down_proj"))
    batch = tiny_models.inputs(model)
    with torch.no_grad():
        expected = model(**batch).logits
        with pytest.warns(UserWarning, match="leaves 2 of 2 MoE blocks.*Scaled"):
            patch_model(model, strict=False, self_check=self_check)
        assert torch.equal(model(**batch).logits, expected)
    assert {row.tier for row in patch_report(model)} == {"refused"}
    assert all("Scaled" in row.reason for row in patch_report(model))


def test_a_foreign_tensor_in_compiled_code_is_refused_by_name():
    model = patch_model(tiny_models.build("qwen3_moe"))
    store(model, ("gate_up_proj", "down_proj"))
    experts = experts_of(model)[0]
    x_TD = torch.randn(3, experts.down_proj.shape[1])
    ids_TK, weights_TK = torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
    with torch.no_grad(), pytest.raises(Exception, match="Scaled, a tensor subclass"):
        torch.compile(experts, backend="eager")(x_TD, ids_TK, weights_TK)
    torch.compiler.reset()


def test_a_foreign_shared_expert_is_only_left_out_of_the_self_check():
    """Skip the self-check only, where torchao converts every Linear but no expert stack."""
    model = tiny_models.build("qwen2_moe")
    for _, block in tiny_models.blocks(model):
        block.shared_expert.up_proj.weight = scaled(block.shared_expert.up_proj.weight)
    batch = tiny_models.inputs(model)
    with torch.no_grad():
        expected = model(**batch).logits
        patch_model(model)
        assert_close(model(**batch).logits, expected, FP32)
    assert {row.tier for row in patch_report(model)} == {"full"}
    assert all("skipped" in r.self_check and "Scaled" in r.self_check for r in patch_report(model))


def test_quantize_experts_refuses_a_foreign_tensor_before_any_change():
    model = tiny_models.build("qwen3_moe")
    experts = experts_of(model)[-1]
    experts.down_proj = scaled(experts.down_proj)
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match=r"experts.down_proj: Scaled on cpu cannot be"):
        quantize_experts(model, "fp8")
    assert_unchanged(before, snapshot(model))


class Plain(Tensor):
    """A subclass without its own dispatch, with the memory of a plain tensor."""


def test_a_subclass_without_a_dispatch_of_its_own_runs():
    model = tiny_models.build("qwen3_moe")
    batch = tiny_models.inputs(model)
    expected = logits(model, batch)
    for experts in experts_of(model):
        experts.down_proj = nn.Parameter(experts.down_proj.detach().as_subclass(Plain))
    patch_model(model)
    assert_close(logits(model, batch).as_subclass(Tensor), expected, FP32)
    assert {row.self_check for row in patch_report(model)} == {"passed"}


# --- computed weights -----------------------------------------------------------------------------


class Rounded(nn.Module):
    """Fake quantisation, gradients straight through."""

    def forward(self, weight: Tensor) -> Tensor:
        step = weight.detach().abs().amax(-1, keepdim=True) / 7
        return weight + ((weight / step).round() * step - weight).detach()


def pruned(experts: nn.Module, name: str) -> None:
    prune.l1_unstructured(experts, name, amount=0.4)


def old_weight_norm(experts: nn.Module, name: str) -> None:
    nn.utils.weight_norm(experts, name, dim=0)


def fake_quantised(experts: nn.Module, name: str) -> None:
    parametrize.register_parametrization(experts, name, Rounded())


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("order", ["before patching", "after patching"])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (pruned, "is computed before each call"),
        (old_weight_norm, "is computed before each call"),
        (fake_quantised, "a parametrization is active"),
    ],
)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4"])
def test_a_computed_weight_is_patched_and_its_gradients_are_right(family, change, why, order):
    reference = tiny_models.build(family)
    patched = copy.deepcopy(reference)
    if order == "after patching":
        patch_model(patched)
    for model in (reference, patched):
        for experts in experts_of(model):
            for name in ("gate_up_proj", "down_proj"):
                change(experts, name)
    if order == "before patching":
        patch_model(patched)
        assert all(row.self_check.startswith("skipped") for row in patch_report(patched))
        assert all(why in row.self_check for row in patch_report(patched))
    assert {row.tier for row in patch_report(patched)} == {"full"}
    batch = tiny_models.inputs(reference)
    for model in (reference, patched):
        tiny_models.loss(model(**batch)).backward()
    grads = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert any("gate_up_proj" in name for name in grads)
    for name, p in patched.named_parameters():
        if name in grads:
            assert_close(p.grad, grads[name], FP32, name)


@pytest.mark.parametrize("order", ["before patching", "after patching"])
def test_experts_that_were_taken_apart_are_refused_for_what_they_are(order):
    model = tiny_models.build("qwen3_moe")
    batch = tiny_models.inputs(model)
    if order == "after patching":
        patch_model(model)
    for experts in experts_of(model):
        experts.up_list = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        del experts.gate_up_proj, experts.down_proj
    with pytest.raises(UnsupportedModelError, match="no stacked weight.*up_list") as error:
        model(**batch) if order == "after patching" else patch_model(model)
    assert "were split" in str(error.value)
    assert "update moe_patch" not in str(error.value)
