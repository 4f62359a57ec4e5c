"""reference() and shadow_check: transformers beside ours, the step unchanged."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_patch import (
    PatchStateError,
    lora_targets,
    patch_model,
    patch_report,
    record,
    reference,
    shadow_results,
    unpatch_model,
)
from moe_patch.runtime import forward
from tests.support import tiny_models
from tests.support.adapters import EXPERTS, adapt, lora_config
from tests.support.debug_cases import (
    FAMILIES,
    assert_same_bits,
    batch_of,
    build,
    probed,
    step,
)


@pytest.mark.parametrize(("model_type", "lora"), [*((f, False) for f in FAMILIES), ("olmoe", True)])
def test_reference_is_the_model_that_was_never_patched(model_type, lora) -> None:
    """Equal the unpatched model bit for bit inside the context, and stay patched outside."""
    never = build(model_type, lora)
    model = patch_model(copy.deepcopy(never), self_check=False)
    batch = batch_of(model)
    before = step(model, batch)
    with reference(model) as same:
        assert same is model
        inside = step(model, batch)
        assert not patch_report(model)
    assert_same_bits(inside, step(never, batch))
    assert_same_bits(step(model, batch), before)
    assert patch_report(model)


def test_reference_ends_well_whatever_happens_inside() -> None:
    model = build("qwen3_moe")
    with pytest.raises(PatchStateError, match="no patched MoE block"), reference(model):
        pass
    expected = step(model, batch_of(model))
    patch_model(model, self_check=False)
    with pytest.raises(KeyError), reference(model):
        raise KeyError
    assert len(patch_report(model)) == 2
    with reference(model), pytest.raises(PatchStateError, match="another `with"), reference(model):
        pass
    with reference(model):
        unpatch_model(model)
    assert not patch_report(model)
    assert_same_bits(step(model, batch_of(model)), expected)


def test_compiled_code_notices_reference(monkeypatch) -> None:
    model = patch_model(build("qwen3_moe"), self_check=False)
    block = tiny_models.blocks(model)[0][1]
    x = torch.randn(1, 5, 32)
    compiled = torch.compile(block, backend="eager")
    calls = []
    original = forward.run_experts

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(forward, "run_experts", torch.compiler.disable(counted))
    for inside, wanted in ((False, 1), (True, 0), (False, 1)):
        calls.clear()
        if inside:
            with reference(model):
                compiled(x)
        else:
            compiled(x)
        assert len(calls) == wanted


@pytest.mark.parametrize("model_type", [*FAMILIES, "muse_spark", "jetmoe"])
def test_every_kind_of_block_is_compared_and_the_step_stays_as_it_was(model_type) -> None:
    plain = patch_model(build(model_type), self_check=False)
    model = patch_model(build(model_type), self_check=False, shadow_check=1)
    assert not probed(plain)
    for seed in range(4):
        batch = batch_of(model, seed)
        state = torch.get_rng_state()
        wanted = step(plain, batch)
        torch.set_rng_state(state)
        assert_same_bits(step(model, batch), wanted)
    results = shadow_results(model)
    compared = [r for r in results if r.role != "router"]
    assert [r.step for r in compared] == [1, 2, 3, 4]
    for result in results:
        assert not result.skipped
        assert result.within, str(result)
        assert result.other_experts == 0
    names = compared[0].errors
    assert "output" in names
    assert "gradient of hidden states" in names
    assert any("proj" in name or "mlp" in name or "linear" in name for name in names)


@pytest.mark.parametrize("model_type", ["llama4", "jetmoe"])
def test_adapters_inside_a_block_that_is_compared_as_a_whole(model_type) -> None:
    """Leave the step's weights alone: PEFT's wrappers write to weights on transformers' path."""
    targets = lora_targets(tiny_models.build(model_type))["target_parameters"]
    batch = tiny_models.inputs(tiny_models.build(model_type))

    def adapted(**options):
        model = adapt(tiny_models.build(model_type), lora_config(targets))
        return patch_model(model, self_check=False, **options)

    plain, model = adapted(), adapted(shadow_check=1)
    before = dict(model.named_parameters())
    for _ in range(3):
        assert_same_bits(step(model, batch), step(plain, batch))
    assert before.keys() == dict(model.named_parameters()).keys()
    assert all(p is before[name] for name, p in model.named_parameters())
    results = shadow_results(model)
    assert [r.step for r in results if r.role != "router"] == [1, 2, 3]
    assert all(r.within and not r.skipped for r in results)


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "checkpoint", "reentrant"])
@pytest.mark.parametrize("order", ["peft first", "patch first"])
def test_adapters_checkpoints_and_recorders(reentrant, order) -> None:
    """Compare once a step, not again in recompute, and record nothing of the comparison."""
    if order == "peft first":
        model = patch_model(build("qwen3_moe", lora=True), self_check=False, shadow_check=1)
    else:  # read through PEFT's parametrization
        model = patch_model(build("qwen3_moe"), self_check=False, shadow_check=1)
        model = adapt(model, lora_config(EXPERTS))
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    batch = batch_of(model)
    fired = []
    for _, block in tiny_models.blocks(model.get_base_model()):
        block.gate.register_forward_hook(lambda *_: fired.append(1))
    with record(model) as recorder:
        for _ in range(3):
            step(model, batch)
    for layer in recorder.layers.values():
        assert int(layer.load.sum()) == 3 * layer.ids.numel()
    assert len(fired) == 3 * 2 * (1 if reentrant is None else 2)
    compared = [r for r in shadow_results(model) if r.role == "experts"]
    assert [r.step for r in compared] == [1, 2, 3]
    assert all(r.within for r in compared)
    assert any("A of adapter 0" in name or "lora" in name for name in compared[0].errors) or (
        order == "patch first"
    )


def test_a_wrong_result_is_logged_and_changes_nothing_else(monkeypatch, caplog) -> None:
    model = patch_model(build("qwen3_moe"), self_check=False, shadow_check=1)
    original = forward.run_experts
    monkeypatch.setattr(forward, "run_experts", lambda *a, **k: 1.01 * original(*a, **k))
    with caplog.at_level(logging.INFO, "moe_patch"):
        step(model, batch_of(model))
    (result,) = (r for r in shadow_results(model) if r.role == "experts")
    assert result.errors["output"] == pytest.approx(0.01, rel=1e-3)
    assert not result.within
    (warning,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert "ABOVE THE LIMIT" in warning.message
    assert result.path in warning.message


def test_one_block_in_every_window_of_steps_in_training_only() -> None:
    model = patch_model(build("qwen3_moe"), self_check=False, shadow_check=3)
    batch = batch_of(model)
    model.eval()
    step(model, batch)
    assert not shadow_results(model)
    model.train()
    for _ in range(15):
        with torch.no_grad():
            model(**batch)
    with torch.inference_mode():  # also not here, where autograd would refuse the tensors
        for _ in range(3):
            model(**batch)
    steps = [r.step for r in shadow_results(model) if r.role == "experts"]
    assert [(s - 1) // 3 for s in steps] == [0, 1, 2, 3, 4]
    assert len({r.path for r in shadow_results(model)}) == 2
    assert len({(s - 1) % 3 for s in steps}) > 1


def test_probes_are_undone_and_travel_with_copies(tmp_path) -> None:
    model = build("qwen3_moe")
    patch_model(
        model, self_check=False, shadow_check=1, debug_nan=True, debug_dir=str(tmp_path / "own")
    )
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        step(twin, batch_of(twin))
        assert shadow_results(twin)
    assert not shadow_results(model)
    unpatch_model(model)
    assert not probed(model)
    patch_model(model, self_check=False)
    assert not probed(model)


def test_what_cannot_be_compared_is_named(caplog) -> None:
    patch_model(build("jetmoe"), self_check=False, shadow_check=1)
    assert "leave out model.layers.0.self_attention.experts" in caplog.text
