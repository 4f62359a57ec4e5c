"""reference(), shadow_check, debug_nan, replay_file: transformers beside ours, step unchanged."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from moe_patch import (
    PatchStateError,
    UnsupportedOptionError,
    forward,
    patch_model,
    patch_report,
    record,
    reference,
    replay_file,
    shadow_results,
    unpatch_model,
)
from moe_patch.patch_record import record_of
from tests import tiny_models
from tests.adapters import EXPERTS, adapt, lora_config
from tests.numerics import assert_bits
from tests.signals_cases import experts_below

# The rule; a shared expert; experts with biases; blocks and experts with forwards of their own.
FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "llama4", "longcat_flash", "doge", "dbrx")


def build(model_type: str, lora: bool = False) -> Any:
    model = tiny_models.build(model_type)
    return adapt(model, lora_config(EXPERTS)) if lora else model


def batch_of(model: Any, seed: int = 0) -> dict[str, Tensor]:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return tiny_models.inputs(inner, seed=seed)


def step(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """Loss and every gradient."""
    model.zero_grad(set_to_none=True)
    loss = tiny_models.loss(model(**batch))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_same_bits(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        assert_bits(mine, theirs)


def probed(model: Any) -> list[Any]:
    records = [record_of(m) for m in model.modules()]
    return [r for r in records if r is not None and r.probe is not None]


@pytest.mark.parametrize(("model_type", "lora"), [*((f, False) for f in FAMILIES), ("olmoe", True)])
def test_reference_is_the_model_that_was_never_patched(model_type, lora) -> None:
    """Bit for bit, gradients and adapters included; outside it is patched as before."""
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


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "checkpoint", "reentrant"])
@pytest.mark.parametrize("order", ["peft first", "patch first"])
def test_adapters_checkpoints_and_recorders(reentrant, order) -> None:
    """One comparison a step, not one more for the recompute; nothing of it is recorded."""
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
    steps = [r.step for r in shadow_results(model) if r.role == "experts"]
    assert [(s - 1) // 3 for s in steps] == [0, 1, 2, 3, 4]
    assert len({r.path for r in shadow_results(model)}) == 2
    assert len({(s - 1) % 3 for s in steps}) > 1


def plant(model: Any, layer: int = 0, expert: int | None = None) -> int:
    """A NaN in the down projection of an expert that the batch uses (most, if not given)."""
    _, block = tiny_models.blocks(model)[layer]
    experts_below(block).down_proj.data[expert, 1, 1] = float("nan")
    return layer


def most_used(model: Any, layer: int) -> int:
    with record(model) as recorder, torch.no_grad():
        model(**batch_of(model))
    counts = list(recorder.layers.values())[layer].tokens_per_expert
    return int(torch.where(counts < counts.sum() // 2, counts, 0).argmax())


@pytest.mark.parametrize(("model_type", "lora"), [("qwen3_moe", True), ("gpt_oss", False)])
def test_the_first_block_with_a_nan_is_written_and_replayed(
    model_type, lora, tmp_path, caplog
) -> None:
    """The last layer holds the NaN; replayed, both paths lose the same tokens and no other."""
    options = {"self_check": False, "debug_nan": True, "debug_dir": str(tmp_path / "nan")}
    model = patch_model(build(model_type, lora), **options)
    inner = model.get_base_model() if lora else model
    last = len(tiny_models.blocks(inner)) - 1
    expert = most_used(model, last)
    assert not (tmp_path / "nan").exists()
    plant(inner, last, expert)
    with record(model) as recorder:
        for _ in range(2):
            model(**batch_of(model))
    path, layer = list(recorder.layers.items())[-1]
    (file,) = (tmp_path / "nan").iterdir()
    assert file.name == f"moe_patch_nan.{path}.safetensors"
    assert [r.levelno for r in caplog.records] == [logging.ERROR]
    assert f"python -m moe_patch replay {file}" in caplog.text
    tensors = load_file(file)
    assert_bits(tensors["ids"], layer.ids)
    assert_bits(tensors["weights"], layer.weights)
    result = replay_file(file)
    bad = (layer.ids == expert).any(-1).nonzero().flatten().tolist()
    assert 0 < len(bad) < result.tokens == len(layer.ids)
    assert result.ours == result.theirs == tuple(bad)
    assert result.error < 1e-6
    assert result.experts[expert] == len(bad)
    assert list(result.parameters) == ["down_proj"]
    text = str(result)
    for part in (path, "1 NaN or Inf in rows", "the same tokens", f"{expert} ({len(bad)} times)"):
        assert part in text


def test_a_block_with_a_forward_of_its_own_is_replayed_whole(tmp_path) -> None:
    model = build("llama4")
    patch_model(model, self_check=False, debug_nan=True, debug_dir=str(tmp_path))
    plant(model, 0, slice(None))
    model(**batch_of(model))
    (file,) = tmp_path.iterdir()
    result = replay_file(file)
    assert result.module == "Llama4TextMoe"
    assert len(result.ours) == len(result.theirs) == result.tokens == 14
    assert "experts.down_proj" in result.parameters


def test_the_config_is_that_of_the_model_around_the_block(tmp_path, caplog) -> None:
    """Also inside a wrapper that has no config; a block that stands alone has none to write."""
    model = build("llama4")
    wrapper = nn.Sequential(model)
    patch_model(wrapper, self_check=False, debug_nan=True, debug_dir=str(tmp_path))
    plant(model, 0, slice(None))
    model(**batch_of(model))
    assert replay_file(next(tmp_path.iterdir())).module == "Llama4TextMoe"
    assert not any("leave out" in record.message for record in caplog.records)
    alone = nn.ModuleList([tiny_models.blocks(build("llama4"))[0][1]])
    patch_model(alone, self_check=False, debug_nan=True)
    assert "debug_nan leave out 0: no transformers model around them" in caplog.text


def test_debug_nan_changes_no_bit_and_says_nothing_of_a_healthy_model(tmp_path, caplog) -> None:
    plain, model = (build("deepseek_v3") for _ in range(2))
    patch_model(plain, self_check=False)
    patch_model(model, self_check=False, debug_nan=True, debug_dir=str(tmp_path))
    assert_same_bits(step(model, batch_of(model)), step(plain, batch_of(plain)))
    assert not list(tmp_path.iterdir())
    assert not caplog.records


def test_replay_tells_a_path_that_alone_is_wrong(tmp_path, monkeypatch) -> None:
    model = patch_model(
        build("qwen3_moe"), self_check=False, debug_nan=True, debug_dir=str(tmp_path)
    )
    original = forward.run_experts

    def broken(*args: Any, **kwargs: Any) -> Tensor:
        out = original(*args, **kwargs)
        return torch.where(torch.arange(len(out)).unsqueeze(1) == 5, float("inf"), out)

    monkeypatch.setattr(forward, "run_experts", broken)
    model(**batch_of(model))
    result = replay_file(next(tmp_path.iterdir()))
    assert (result.ours, result.theirs) == ((5,), ())
    assert "all 14 tokens finite" in str(result)
    monkeypatch.setattr(forward, "run_experts", original)
    assert replay_file(next(tmp_path.iterdir())).ours == ()


def rewritten(file: Path, **changes: str) -> Path:
    with safe_open(file, framework="pt") as opened:
        about = opened.metadata()
    target = file.with_name("other.safetensors")
    save_file(load_file(file), target, {**about, **changes})
    return target


def test_errors(tmp_path) -> None:
    for wrong in (-1, True, 1.5, "ten"):
        with pytest.raises(UnsupportedOptionError, match="shadow_check is"):
            patch_model(build("qwen3_moe"), shadow_check=wrong)
    with pytest.raises(UnsupportedOptionError, match="debug_nan is 1"):
        patch_model(build("qwen3_moe"), debug_nan=1)
    with pytest.raises(UnsupportedOptionError, match="debug_dir is"):
        patch_model(build("qwen3_moe"), debug_dir=None)
    with pytest.raises(UnsupportedOptionError, match="not a safetensors file"):
        replay_file(tmp_path / "missing")
    save_file({"ids": torch.zeros(1)}, tmp_path / "routing.safetensors")
    with pytest.raises(UnsupportedOptionError, match="format is None; accepted"):
        replay_file(tmp_path / "routing.safetensors")
    model = build("qwen3_moe")
    patch_model(model, self_check=False, debug_nan=True, debug_dir=str(tmp_path / "nan"))
    plant(model, 0, slice(None))
    model(**batch_of(model))
    (file,) = (tmp_path / "nan").iterdir()
    for changes, match in (
        ({"class": json.dumps(["os", "system"])}, "not one of transformers' own classes"),
        ({"class": json.dumps(["transformers.models.qwen3_moe.modeling_qwen3_moe", "Gone"])}, "be"),
        ({"config": json.dumps({"num_experts": 3})}, "cannot be rebuilt"),
    ):
        with pytest.raises(UnsupportedOptionError, match=match):
            replay_file(rewritten(file, **changes))


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
