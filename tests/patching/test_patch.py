"""patch_model's contract: in place, all or nothing, never silent."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from moe_patch import (
    PatchConfig,
    PatchStateError,
    UnsupportedModelError,
    UnsupportedOptionError,
    patch_model,
    patch_report,
    patched,
    unpatch_model,
)
from tests.support import tiny_models
from tests.support.adapters import EXPERTS, adapt, lora_config
from tests.support.numerics import FP32, assert_bits, assert_close
from tests.support.snapshots import assert_unchanged, logits, snapshot

pytestmark = pytest.mark.versions


@pytest.fixture
def model():
    return tiny_models.build("qwen2_moe")


def test_returns_the_same_object_patched_in_place(model):
    modules = dict(model.named_modules())
    assert patch_model(model) is model
    assert dict(model.named_modules()) == modules
    assert unpatch_model(model) is model
    with patched(model) as inside:
        assert inside is model


def test_false_leaves_the_model_alone(model):
    before = snapshot(model)
    assert patch_model(model, False) is model
    assert_unchanged(before, snapshot(model))


def test_patching_again_equally_is_a_noop_with_one_log_line(model, caplog):
    patch_model(model, ties="torch")
    before = snapshot(model)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="moe_patch"):
        assert patch_model(model, {"ties": "torch"}) is model
        assert_unchanged(before, snapshot(model))
    (line,) = caplog.records
    assert "already patched" in line.message
    unpatch_model(model)
    assert patch_report(model) == []


def test_patching_differently_is_an_error(model):
    patch_model(model)
    before = snapshot(model)
    with pytest.raises(PatchStateError, match="already patched with .*unpatch_model first"):
        patch_model(model, ties="torch")
    assert_unchanged(before, snapshot(model))


def test_the_error_names_the_options_that_differ_and_both_ways_on(model):
    options = {"recompute": True, "exclude": "*.0.*", "ties": "torch"}
    wrapped = adapt(patch_model(model, **options), lora_config(EXPERTS))
    with pytest.raises(PatchStateError) as raised:
        patch_model(wrapped, ties="torch")
    assert str(raised.value) == (
        "PeftModel is already patched with recompute=True, exclude=('*.0.*',); this call has "
        "recompute=False, exclude=(); call patch_model with the same options as before (it binds "
        "what is new), or unpatch_model first"
    )
    (row,) = patch_report(patch_model(wrapped, **options))
    assert row.lora == "fused (down_proj, gate_up_proj)"
    assert len(patch_report(patch_model(unpatch_model(wrapped), ties="torch"))) == 2


def test_unpatching_an_unpatched_model_is_an_error(model):
    with pytest.raises(PatchStateError, match="not patched; call patch_model first"):
        unpatch_model(model)
    patch_model(model)
    unpatch_model(model)
    with pytest.raises(PatchStateError):
        unpatch_model(model)


def test_context_manager_undoes_also_after_an_exception(model):
    batch = tiny_models.inputs(model)
    out, before = logits(model, batch), snapshot(model)

    def fail_inside() -> None:
        with patched(model, recompute=True):
            assert {row.tier for row in patch_report(model)} == {"full"}
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert_unchanged(before, snapshot(model))
    assert_bits(logits(model, batch), out)


def test_context_manager_leaves_the_patch_that_was_there(model):
    patch_model(model)
    before = snapshot(model)
    with patched(model):
        pass
    assert_unchanged(before, snapshot(model))
    assert {row.tier for row in patch_report(model)} == {"full"}


def test_context_manager_with_nothing_to_undo(model):
    before = snapshot(model)
    with patched(model, False) as inside:
        assert inside is model
    with patched(model):
        unpatch_model(model)
    assert_unchanged(before, snapshot(model))


@pytest.mark.parametrize(
    ("options", "patched_layers"),
    [
        ({"include": "*.layers.0.*"}, [0]),
        ({"exclude": ["*.layers.0.*"]}, [1]),
        ({"include": ["*.layers.0.*", "*.layers.1.*"], "exclude": "*.1.mlp"}, [0]),
        ({"include": "model.layers.?.mlp"}, [0, 1]),
    ],
    ids=str,
)
def test_include_and_exclude(model, options, patched_layers):
    before = snapshot(model)
    patch_model(model, **options)
    assert [row.path for row in patch_report(model)] == [
        f"model.layers.{i}.mlp" for i in patched_layers
    ]
    touched = {path for path, state in snapshot(model).items() if "_moe_patch" in state.entries}
    assert {int(path.split(".")[2]) for path in touched} == set(patched_layers)
    unpatch_model(model)
    assert_unchanged(before, snapshot(model))


PATHS = r"2: 'model\.layers\.0\.mlp', 'model\.layers\.1\.mlp'"
SELECTS_NOTHING = (
    rf"no MoE block found among the selected paths \(include \['\*\.0\.\*'\], exclude \['\*'\]\); "
    rf"there are {PATHS}; change the patterns"
)


def test_patterns_that_select_nothing_are_an_error(model):
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match=f"{SELECTS_NOTHING}$"):
        patch_model(model, include="*.0.*", exclude="*")
    assert_unchanged(before, snapshot(model))


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_no_block_is_an_error(model, option):
    before = snapshot(model)
    wrong = rf"{option} pattern '\*\.7\.\*' matches no MoE block; there are {PATHS}; correct"
    with pytest.raises(UnsupportedOptionError, match=wrong):
        patch_model(model, **{option: ["*.layers.0.*", "*.7.*"]})
    assert_unchanged(before, snapshot(model))


def test_the_error_about_a_pattern_quotes_three_paths_at_most():
    model = tiny_models.build("qwen2_moe", num_hidden_layers=4)
    with pytest.raises(UnsupportedOptionError, match=r"4: [^;]*'model\.layers\.2\.mlp', \.\.\.;"):
        patch_model(model, exclude="layers.0.mlp")


@pytest.mark.parametrize(
    ("options", "warning", "tiers"),
    [
        ({"exclude": "*.7.*"}, "exclude pattern .* matches no MoE block", ["full", "full"]),
        ({"include": ["*.0.*", "*.7.*"]}, "include pattern .* matches no MoE block", ["full"]),
        ({"include": "*.0.*", "exclude": "*"}, SELECTS_NOTHING, ["refused"]),
        ({"include": "*.7.*"}, "among the selected paths", ["refused"]),
    ],
    ids=str,
)
def test_not_strict_a_pattern_that_matches_no_block_is_one_warning(model, options, warning, tiers):
    with pytest.warns(UserWarning, match=warning) as caught:
        patch_model(model, strict=False, **options)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert [row.tier for row in patch_report(model)] == tiers


def test_a_pattern_holds_after_adapters_were_added(model):
    options = {"exclude": "model.layers.0.*"}
    wrapped = adapt(patch_model(model, **options), lora_config(EXPERTS))
    patch_model(wrapped, **options)
    (row,) = patch_report(wrapped)
    assert (row.path, row.lora) == (
        "base_model.model.model.layers.1.mlp",
        "fused (down_proj, gate_up_proj)",
    )


def test_no_part_of_a_path_is_left_out_for_its_name_alone(model):
    """A model's own children may be called as a wrapper's are."""
    own = nn.ModuleDict({"module": nn.ModuleDict({"base_model": model})})
    with pytest.raises(
        UnsupportedOptionError, match=r"'module\.base_model\.model\.layers\.0\.mlp'"
    ):
        patch_model(own, exclude="model.layers.0.*")
    patch_model(own, exclude="module.base_model.model.layers.0.*")
    assert len(patch_report(own)) == 1


@pytest.mark.parametrize(
    ("model_type", "overrides", "sparse"),
    [
        ("deepseek_v3", {"first_k_dense_replace": 1}, [1]),
        ("glm4_moe", {"first_k_dense_replace": 1}, [1]),
        ("qwen3_moe", {"mlp_only_layers": [0]}, [1]),
        ("qwen3_moe", {"decoder_sparse_step": 2}, [1]),
    ],
    ids=str,
)
def test_dense_layers_are_left_alone(model_type, overrides, sparse):
    model = tiny_models.build(model_type, **overrides)
    batch = tiny_models.inputs(model)
    out, before = logits(model, batch), snapshot(model)
    patch_model(model)
    assert [row.path for row in patch_report(model)] == [f"model.layers.{i}.mlp" for i in sparse]
    dense = {
        p: s
        for p, s in snapshot(model).items()
        if not p.startswith(f"model.layers.{sparse[0]}.mlp")
    }
    assert_unchanged({path: before[path] for path in dense}, dense)
    assert_close(logits(model, batch), out, FP32)


@pytest.mark.parametrize(
    ("name", "level"),
    [("batched_mm", logging.WARNING), ("eager", logging.INFO), ("grouped_mm", logging.INFO)],
)
def test_another_experts_implementation_set_before_is_logged(model, caplog, name, level):
    model.set_experts_implementation(name)
    with caplog.at_level(logging.INFO, logger="moe_patch"):
        patch_model(model)
    (line,) = [line for line in caplog.records if "in its place" in line.message]
    assert name in line.message
    assert line.levelno == level
    unpatch_model(model)
    assert {b.experts.config._experts_implementation for _, b in tiny_models.blocks(model)} == {
        name
    }


def test_config_object_mapping_and_options_reach_the_model(model):
    config = PatchConfig(ties="torch", recompute=True)
    patch_model(model, config)
    patch_model(model, {"ties": "torch", "recompute": True})
    patch_model(model, ties="torch", recompute=True)
    assert {m._moe_patch.config for m in model.modules() if "_moe_patch" in m.__dict__} == {config}


@pytest.mark.parametrize("act", [nn.SiLU, nn.Tanh], ids=["fused", "in steps"])
@pytest.mark.parametrize("of", ["hidden", "weights"])
def test_a_forward_mode_derivative_is_a_named_error(model, act, of):
    """Raise an error: without a rule of the operators, torch would take the tangent for zero."""
    experts = tiny_models.blocks(patch_model(model))[0][1].experts
    experts.act_fn = act()
    inputs = {"hidden": torch.randn(3, experts.down_proj.shape[1]), "weights": torch.rand(3, 2)}
    ids = torch.tensor([[0, 1], [2, 3], [1, 0]])

    def run(value):
        given = inputs | {of: value}
        return experts(given["hidden"], ids, given["weights"])

    with pytest.raises(UnsupportedOptionError, match="forward-mode derivative.*unpatch_model"):
        torch.func.jvp(run, (inputs[of],), (torch.ones_like(inputs[of]),))


@pytest.mark.parametrize("act", [nn.SiLU, nn.Tanh], ids=["fused", "in steps"])
def test_a_second_derivative_is_a_named_error_and_the_first_is_not_disturbed(model, act):
    for _, block in tiny_models.blocks(model):
        block.experts.act_fn = act()
    weight = tiny_models.blocks(patch_model(model))[0][1].experts.down_proj
    batch = tiny_models.inputs(model)
    (plain,) = torch.autograd.grad(model(**batch).loss, weight)
    (gradient,) = torch.autograd.grad(model(**batch).loss, weight, create_graph=True)
    assert_close(gradient, plain, FP32)
    with pytest.raises(UnsupportedOptionError, match="second derivative.*unpatch_model"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("given", ["Qwen/Qwen3-30B-A3B", None, {"a": 1}], ids=str)
def test_what_is_no_model_is_named(given):
    with pytest.raises(UnsupportedModelError, match=f"given {type(given).__name__} .*accepted: a"):
        patch_model(given)
