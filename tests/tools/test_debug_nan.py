"""debug_nan and replay_file: the first block that is not finite, on both paths."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from moe_patch import UnsupportedOptionError, patch_model, record, replay_file
from moe_patch.runtime import forward
from tests.support import tiny_models
from tests.support.debug_cases import (
    assert_same_bits,
    batch_of,
    build,
    step,
)
from tests.support.numerics import assert_bits
from tests.support.signals_cases import experts_below


def plant(model: Any, layer: int = 0, expert: int | None = None) -> int:
    """Put a NaN into the down projection of an expert (by default the most used one)."""
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
    """Write the last layer, which holds the NaN; its replay loses equal tokens on both paths."""
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
    """Write the config of the model, also inside a wrapper; skip a block without a model."""
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


def test_a_file_that_cannot_be_written_does_not_end_the_step(tmp_path, caplog) -> None:
    (tmp_path / "taken").write_text("a file, no folder")
    model = build("qwen3_moe")
    folder = str(tmp_path / "taken")
    patch_model(model, self_check=False, debug_nan=True, debug_dir=folder)
    plant(model, 0, slice(None))
    for _ in range(2):
        step(model, batch_of(model))
    (line,) = (r.message for r in caplog.records if r.levelno == logging.ERROR)
    assert "model.layers.0.mlp (Qwen3MoeExperts): the first block" in line
    assert "its call cannot be saved: " in line
    assert folder in line


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
