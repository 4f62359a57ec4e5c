"""Families whose router, experts or block are called unlike the rule: what holds for every one.

Parity with other inputs and with adapters is in test_all_families.py, what is special in each
in test_irregular_contracts.py.
"""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from packaging.version import Version
from torch import Tensor, nn

from moe_patch import UnsupportedModelError, patch_model, patch_report, unpatch_model
from moe_patch.families import families, lookup
from moe_patch.types import RouteSpec
from tests.support import tiny_models
from tests.support.numerics import assert_bits, assert_close, bf16_rule
from tests.support.parity import Run, assert_parity, run_block, run_model
from tests.support.snapshots import assert_unchanged, snapshot
from tests.support.special import LIMIT, pair, seeded
from tests.support.trace import executed

SPECIAL = (
    "afmoe", "cohere2_moe", "dbrx", "deepseek_v4", "diffusion_gemma", "doge", "dots3_note_vision",
    "gemma4", "inkling", "inkling2", "inkling2_loop", "jetmoe", "llama4", "longcat_flash",
    "muse_spark", "openai_privacy_filter", "phimoe", "step3p7", "zaya",
)  # fmt: skip
# Classes whose own forward decides or computes; none of it may run in a patched model.
DECIDE = {
    "DbrxFFN": ("route_tokens_to_experts",),
    "DogeCDMoE": ("forward",),
    "JetMoeMoE": ("forward",),
    "JetMoeParallelExperts": ("forward",),
    "Llama4TextMoe": ("forward",),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_a_step_in_train_mode_and_what_ran(name) -> None:
    model, reference = pair(name)
    forbidden = {
        getattr(type(m), method).__code__
        for m in reference.modules()
        for method in (*DECIDE.get(type(m).__name__, ()), *_hf_role_methods(m))
    }
    runs: list[Run] = []
    ran = executed(lambda: runs.append(seeded(model)))
    assert_parity(runs[0], seeded(reference), LIMIT)
    assert forbidden
    assert not ran & forbidden, sorted(code.co_qualname for code in ran & forbidden)
    assert {(row.tier, row.self_check) for row in patch_report(model)} == {("full", "passed")}


def _hf_role_methods(module: nn.Module) -> tuple[str, ...]:
    """Return "forward" for routers, and for experts without transformers' decorator."""
    found = lookup(module)
    own = found is not None and found[1] in ("router", "experts")
    return ("forward",) if own and not hasattr(type(module).forward, "__wrapped__") else ()


@pytest.mark.parametrize("name", SPECIAL)
def test_undo_is_exact(name) -> None:
    model = tiny_models.build(name)
    first = seeded(model)
    model.zero_grad()
    before = snapshot(model)
    unpatch_model(patch_model(model))
    model.zero_grad()
    assert_unchanged(before, snapshot(model))
    for key, value in seeded(model).items():
        assert value is None or torch.equal(value, first[key]), key


@pytest.mark.parametrize("name", SPECIAL)
def test_copies_run_their_own_weights(name) -> None:
    """Copies by deepcopy and pickle stay patched and use their own parameters."""
    model, _ = pair(name)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    expected = seeded(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for twin in copies:
        assert len(patch_report(twin)) == len(patch_report(model))
        for key, value in seeded(twin).items():
            if value is not None:
                assert_bits(value, expected[key], key)


@pytest.mark.parametrize("name", SPECIAL)
def test_ties_as_torch_breaks_them(name) -> None:
    """Choose as transformers does with ``ties="torch"``, although all scores tie."""
    reference = tiny_models.build(name)
    with torch.no_grad():
        for path, p in [*reference.named_parameters(), *reference.named_buffers()]:
            if not p.is_floating_point() or path.endswith("scale"):
                continue
            inside = {"gate", "router", "router_gate"} & {*path.split(".")[:-1]}
            if inside or path.endswith(tiny_models.CORRECTION_BIASES):
                p.zero_()
    model = patch_model(copy.deepcopy(reference), ties="torch", self_check=False)
    assert_close(seeded(model)["out"], seeded(reference)["out"], LIMIT)


@pytest.mark.parametrize("order", ["hooks first", "patch first"])
@pytest.mark.parametrize("name", SPECIAL)
def test_under_accelerate_hooks(name, order) -> None:
    """Hooks on every module, set before or after patching, can be removed in either order."""
    reference = tiny_models.build(name)
    model = copy.deepcopy(reference)
    if order == "patch first":
        patch_model(model)
    for module in list(model.modules()):
        add_hook_to_module(module, ModelHook())
    if order == "hooks first":
        patch_model(model)
    expected = seeded(reference)
    assert_parity(seeded(model), expected, LIMIT)
    unpatch_model(model)
    for module in list(model.modules()):
        remove_hook_from_module(module)
    for key, value in seeded(model).items():
        assert value is None or torch.equal(value, expected[key]), key


@pytest.mark.parametrize("name", SPECIAL)
def test_bf16_is_finite_and_near(name) -> None:
    """bf16 outputs are finite and close in norm; ids may differ at ties, so rows do not compare."""
    if name == "deepseek_v4" and Version(transformers.__version__) < Version("5.18"):
        pytest.skip("transformers' own model fails in bf16 before 5.18")
    reference = tiny_models.build(name, torch.bfloat16)
    model = patch_model(copy.deepcopy(reference))
    ours, theirs = (run_model(m, cast_batch(tiny_models.inputs(m))) for m in (model, reference))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert (ours[key] is None) == (value is None), key
        if value is not None:
            assert ours[key].dtype == value.dtype, key
            assert torch.isfinite(ours[key]).all(), key
    assert_close(ours["out"].norm(), theirs["out"].norm(), 3e-2)


def cast_batch(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Floating inputs in bf16."""
    return {k: t.bfloat16() if t.is_floating_point() else t for k, t in batch.items()}


ALL_EXPERTS = {
    "afmoe": {"num_experts_per_tok": 8},
    "cohere2_moe": {"num_experts_per_tok": 8},
    "inkling": {"num_experts_per_tok": 8},
    "llama4": {"num_experts_per_tok": 8},
    "longcat_flash": {"num_experts_per_tok": 10},
    "muse_spark": {"num_experts_per_tok": 8},
    "openai_privacy_filter": {"num_experts_per_tok": 8},
    "step3p7": {"num_experts_per_tok": 8},
}


@pytest.mark.parametrize("name", ALL_EXPERTS)
def test_block_in_bf16_with_every_expert_chosen(name) -> None:
    """The bf16 rule holds for the whole block if K = E, where no tie can change the choice."""
    reference = tiny_models.build(name, torch.bfloat16, **ALL_EXPERTS[name])
    models = patch_model(copy.deepcopy(reference)), reference, copy.deepcopy(reference).double()
    blocks = [tiny_models.blocks(m)[-1][1] for m in models]
    x = tiny_models.hidden(blocks[1], 2, 16).detach()
    runs = [run_block(b, x.double() if b is blocks[2] else x) for b in blocks]
    for key in ("out.0", "dx"):
        bf16_rule(runs[0][key], runs[1][key], runs[2][key], key)


# --- block self-check -----------------------------------------------------------------------------


@pytest.mark.families("dbrx")
def test_a_wrong_block_is_caught_before_anything_is_bound(monkeypatch) -> None:
    off = functools.partial(RouteSpec, scale=1.001)
    monkeypatch.setattr("moe_patch.families.dbrx.RouteSpec", off)
    base = tiny_models.FAMILIES["dbrx"].over["ffn_config"]
    model = tiny_models.build("dbrx", ffn_config=base | {"moe_normalize_expert_weights": None})
    before, state = snapshot(model), torch.get_rng_state()
    with pytest.raises(UnsupportedModelError, match="self-check: block output"):
        patch_model(model)
    assert_unchanged(before, snapshot(model))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", ["llama4", "jetmoe", "zaya", "deepseek_v4"])
def test_the_block_check_fires_no_hooks_and_touches_nothing(name) -> None:
    model = tiny_models.build(name)
    fired: list[str] = []
    for path, module in model.named_modules():
        if path.endswith(("experts.act_fn", "gate.score_fn")):
            continue  # called by the forwards of transformers that the check compares with
        module.register_forward_hook(lambda *_, path=path: fired.append(path))
    state = torch.get_rng_state()
    patch_model(model)
    assert not fired
    assert torch.equal(state, torch.get_rng_state())
    assert all(m.training for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


# --- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nllb_moe", "switch_transformers", "vitpose_backbone"])
def test_refused_by_name_and_left_alone(name) -> None:
    model = tiny_models.build(name)
    spec = next(s for s in families() if s.module == name)
    with pytest.raises(UnsupportedModelError, match=spec.reason[:40].replace("(", r"\(")):
        patch_model(model)
    with pytest.warns(UserWarning, match="leaves"):
        patch_model(model, strict=False)
    rows = patch_report(model)
    assert rows
    assert {(row.tier, row.reason) for row in rows} == {("refused", spec.reason)}
