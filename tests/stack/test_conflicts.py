"""Other libraries that want the same modules: one sentence when the model is patched."""

from __future__ import annotations

import functools
import importlib.util
import logging
import subprocess
import sys
from pathlib import Path
from types import MethodType

import pytest
import torch
from torch import nn

from moe_patch import UnsupportedModelError, patch_model, patch_report, unpatch_model
from tests.support import tiny_models
from tests.support.numerics import FP32, assert_bits, assert_close
from tests.support.snapshots import assert_unchanged, logits, snapshot


class LigerExperts(nn.Module):
    """Stand-in for a replacement of the kind that Liger and the kernels library bind."""

    def forward(self, hidden_states, *args):
        return hidden_states * 0


LigerExperts.__module__ = "liger_kernel.transformers.swiglu"


def bind(module):
    """Bind a method of another class, as functions of Liger and the kernels library do."""
    module.__dict__["forward"] = LigerExperts.forward.__get__(module, type(module))


def target(model, which):
    block = tiny_models.blocks(model)[1][1]
    return block if which == "block" else block.experts


@pytest.mark.parametrize("which", ["experts", "block"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_moe", "gpt_oss"])
def test_a_replaced_forward_is_refused_by_name(model_type, which):
    model = tiny_models.build(model_type)
    bind(target(model, which))
    before = snapshot(model)
    name = type(target(model, which)).__name__
    with pytest.raises(UnsupportedModelError, match=rf"layers\.1\.mlp.*{name}.*LigerExperts"):
        patch_model(model)
    assert_unchanged(before, snapshot(model))


def test_replaced_experts_are_named_through_adapters():
    """Name Liger's module, which replaces the experts, not PEFT's wrapper around it."""
    from peft import LoraConfig, get_peft_model

    model = tiny_models.build("qwen3_moe")
    for _, block in tiny_models.blocks(model):
        experts = LigerExperts()
        experts.gate_up_proj = block.experts.gate_up_proj
        experts.down_proj = block.experts.down_proj
        block.experts = experts
    lora = LoraConfig(r=2, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    with pytest.raises(UnsupportedModelError, match=r"its experts are liger_kernel.*LigerExperts"):
        patch_model(get_peft_model(model, lora))


def dense_forward(self, hidden_states, *args):
    """Stand-in for the forward that densemixer and others assign to a class."""
    return hidden_states * 0


@pytest.mark.parametrize("which", ["experts", "block"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_a_forward_replaced_on_the_class_is_refused_by_name(model_type, which, monkeypatch):
    model = tiny_models.build(model_type)
    cls = type(target(model, which))
    monkeypatch.setattr(cls, "forward", dense_forward)
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match=rf"layers\.0\.mlp.*{cls.__name__}.*dense_f"):
        patch_model(model)
    assert_unchanged(before, snapshot(model))


def scaled(factor):
    """Return a stand-in with a closure, which does not hold the forward that it replaces."""

    def scaled_forward(self, hidden_states, *args):
        return hidden_states * factor

    return scaled_forward


FORMS = {
    "closure": scaled(0),
    "compiled": torch.compile(dense_forward),
    "decorated": torch.no_grad()(dense_forward),
    "partialmethod": functools.partialmethod(dense_forward),
}


@pytest.mark.parametrize("which", ["block", "experts", "router"])
@pytest.mark.parametrize("form", FORMS)
def test_a_replaced_forward_is_refused_in_whichever_form(form, which, monkeypatch):
    """A compiled kernel, or one made by a function, on the class; the block has no own entry."""
    model = tiny_models.build("qwen3_moe")
    block = tiny_models.blocks(model)[0][1]
    cls = type({"block": block, "experts": block.experts, "router": block.gate}[which])
    monkeypatch.setattr(cls, "forward", FORMS[form])
    name = "scaled_forward" if form == "closure" else "dense_forward"
    said = rf"layers\.0\.mlp.* \({cls.__name__}\) runs .*{name} instead.*or leave moe_patch out"
    with pytest.raises(UnsupportedModelError, match=said):
        patch_model(model)


@pytest.mark.parametrize("which", ["block", "experts"])
@pytest.mark.parametrize("form", ["partial", "closure"])
def test_a_forward_bound_on_a_module_is_refused_in_whichever_form(form, which):
    """Unpatched it runs alone, so that a report of a patched block would be untrue."""
    model = tiny_models.build("qwen3_moe")
    module = target(model, which)
    bound = functools.partial(dense_forward, module)
    module.forward = bound if form == "partial" else lambda *args: bound(*args)
    before = snapshot(model)
    said = rf"{type(module).__name__}\) runs .*(dense_forward|lambda).* or leave moe_patch out"
    with pytest.raises(UnsupportedModelError, match=said):
        patch_model(model)
    assert_unchanged(before, snapshot(model))


@pytest.mark.parametrize("where", ["class", "module"])
def test_a_wrapper_of_a_blocks_own_forward_is_no_conflict(where, monkeypatch):
    """The wrapper holds the original; nothing of this block is bound, so both run."""
    model = tiny_models.build("qwen3_moe")
    batch = tiny_models.inputs(model)
    expected, block = logits(model, batch), target(model, "block")
    own = torch.compiler.disable(type(block).forward if where == "class" else block.forward)
    owner = type(block) if where == "class" else block
    monkeypatch.setattr(owner, "forward", lambda *args: own(*args))
    patch_model(model)
    assert {row.tier for row in patch_report(model)} == {"full"}
    assert_close(logits(model, batch), expected, FP32)


@pytest.mark.parametrize(("which", "tier"), [("router", "full"), ("experts", "refused")])
def test_a_class_forward_replaced_after_patching(which, tier, monkeypatch):
    """Report a replaced class forward where it runs; behind our bound forward it never runs."""
    model = patch_model(tiny_models.build("qwen3_moe"))
    batch = tiny_models.inputs(model)
    out = logits(model, batch)
    block = tiny_models.blocks(model)[0][1]
    other = block.gate if which == "router" else block.experts
    monkeypatch.setattr(type(other), "forward", dense_forward)
    assert {row.tier for row in patch_report(model)} == {tier}
    if tier == "full":
        assert_bits(logits(model, batch), out)


def test_a_forward_replaced_after_patching_shows_in_the_report():
    """Report that our forward no longer runs, as when Trainer applies Liger at the start."""
    model = patch_model(tiny_models.build("qwen3_moe"))
    bind(target(model, "experts"))
    first, second = patch_report(model)
    assert first.tier == "full"
    assert second.tier == "refused"
    assert "use_liger_kernel" in second.reason
    with pytest.raises(UnsupportedModelError, match="liger_kernel_config"):
        patch_model(model)
    del target(model, "experts").__dict__["forward"]
    batch = tiny_models.inputs(model)
    out = logits(model, batch)
    assert_bits(logits(patch_model(model), batch), out)


def test_experts_of_another_class_are_refused_by_name():
    """Name Liger's class, which replaces transformers' own if applied before the model is built."""
    model = tiny_models.build("qwen3_moe")
    tiny_models.blocks(model)[0][1].experts = LigerExperts()
    with pytest.raises(UnsupportedModelError, match=r"no Qwen3MoeExp.*LigerExp.*leave moe_patch"):
        patch_model(model)


def test_data_parallel_is_refused_with_what_to_use_instead():
    model = tiny_models.build("qwen3_moe")
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match=r"DataParallel.*DistributedDataParallel"):
        patch_model(nn.DataParallel(model))
    assert_unchanged(before, snapshot(model))


def test_hub_kernels_outside_of_moe_blocks_stay():
    """Keep the norms and rotary embeddings that use_kernels binds; they are no conflict."""
    model = tiny_models.build("qwen3_moe")
    norm = model.model.norm
    norm.forward = MethodType(type(norm).forward, norm)
    bound = norm.forward
    patch_model(model)
    assert {row.tier for row in patch_report(model)} == {"full"}
    unpatch_model(model)
    assert norm.forward is bound


@pytest.mark.parametrize("chosen", ["batched_mm", "sonicmoe"])
def test_an_experts_implementation_of_the_user_is_named(chosen, caplog):
    model = tiny_models.build("qwen3_moe")
    model.config._experts_implementation_internal = chosen
    with caplog.at_level(logging.WARNING, logger="moe_patch"):
        patch_model(model)
    (line,) = caplog.records
    assert line.message == (
        f"moe_patch: experts_implementation={chosen!r} was set on the model, and the patch runs "
        f"the experts in its place until unpatch_model; to keep {chosen!r}, leave moe_patch out"
    )


def wrap_as_expert_parallelism(router, experts):
    """Make ids local and replace those of other ranks, as releases before ep_size do."""
    inner = router.forward

    def tp_forward(*args):
        logits_TE, weights_TK, ids_TK = inner(*args)
        away = ids_TK >= experts.num_experts // 2
        return logits_TE, weights_TK.masked_fill(away, 0.0), ids_TK.masked_fill(away, 8)

    tp_forward.__module__ = "transformers.distributed.tensor_parallel"
    router.forward = tp_forward


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_moe"])
def test_a_router_inside_expert_parallelism_stays_its_own(model_type):
    model = tiny_models.build(model_type)
    model.set_experts_implementation("grouped_mm")
    for _, block in tiny_models.blocks(model):
        wrap_as_expert_parallelism(block.gate, block.experts)
        block.experts._is_expert_parallel = True
    batch = tiny_models.inputs(model)
    expected, before = logits(model, batch), snapshot(model)
    patch_model(model)
    rows = patch_report(model)
    assert {(row.tier, row.router) for row in rows} == {("experts", "transformers")}
    assert all("wraps the router" in row.reason for row in rows)
    assert_close(logits(model, batch), expected, FP32)
    patch_model(model)
    unpatch_model(model)
    assert_unchanged(before, snapshot(model))


LIGER = """
from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance
model = tiny_models.build("qwen3_moe")
_apply_liger_kernel_to_instance(model, rope=False, rms_norm=False, swiglu=True,
                                fused_linear_cross_entropy=False)
"""
KERNELS = """
import kernels
from torch import nn
class MegaBlocksMoeMLP(nn.Module):
    can_torch_compile, has_backward = False, True
    def forward(self, hidden_states):
        return hidden_states * 0, None
class Repository(kernels.LocalLayerRepository):
    def load(self):
        return MegaBlocksMoeMLP
model = tiny_models.build("gpt_oss")
# As transformers' decorator does with the releases of kernels that it knows.
kernels.replace_kernel_forward_from_hub(type(model.model.layers[0].mlp), "MegaBlocksMoeMLP")
found = {"MegaBlocksMoeMLP": {"cpu": Repository("none", layer_name="MegaBlocksMoeMLP")}}
with kernels.use_kernel_mapping(found, inherit_mapping=False):
    kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu", use_fallback=True)
"""
REFUSED = """
from moe_patch import UnsupportedModelError, patch_model
try:
    patch_model(model)
except UnsupportedModelError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("library", "code", "named"),
    [("liger_kernel", LIGER, "LigerExperts"), ("kernels", KERNELS, "MegaBlocksMoeMLP")],
    ids=["liger", "kernels"],
)
def test_own_library(library, code, named):
    """Refuse a forward bound by the real library, in a process of its own: it changes classes."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", f"from tests.support import tiny_models\n{code}{REFUSED}"],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (sentence,) = done.stdout.strip().splitlines()
    assert named in sentence
    assert "layers.0.mlp" in sentence
