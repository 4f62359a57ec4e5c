"""Attention of the models that commands build and run: the model's own if it runs."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from moe_patch.cli import bench, main, verify
from moe_patch.cli.compare import run
from moe_patch.tools.warmup import warmup
from tests.support import tiny_models
from tests.support.cli_calls import answer, error_of, only_config

CPU = ("--device", "cpu")


@pytest.fixture
def folder(tmp_path):
    """Return a function that makes a folder holding only a tiny model's config."""
    return partial(only_config, tmp_path)


def test_verify_runs_on_the_models_own_attention(capsys, folder):
    """Use the model's own attention; some latent attention never runs in eager mode."""
    found = answer(capsys, "verify", folder("deepseek_v3", num_key_value_heads=2), *CPU)
    assert found["passed"]
    assert (found["attention"], found["attention_reason"]) == ("sdpa", "")
    found = answer(capsys, "verify", folder("gpt_oss"), *CPU)
    assert (found["attention"], found["attention_reason"]) == ("eager", "")


def test_verify_takes_eager_where_the_models_own_attention_is_not_installed(capsys, folder):
    path = naming_attention(folder("qwen3_moe"), "flash_attention_2")
    found = answer(capsys, "verify", path, *CPU)
    assert found["passed"]
    assert found["attention"] == "eager"
    says = "the model's own, flash_attention_2, fails here: MODEL: cannot make Qwen3MoeForCausalLM"
    assert found["attention_reason"].startswith(says)


def test_verify_takes_eager_where_the_models_own_attention_does_not_run(
    capsys, folder, monkeypatch
):
    """Fall back to eager if the model's own attention fails.

    flex_attention is one such case: it has no backward on a CPU, and takes long to fail.
    """

    def eager_only(model, batch):
        if model.config._attn_implementation != "eager":
            raise NotImplementedError("no backward on CPU")
        return run(model, batch)

    monkeypatch.setattr(verify, "run", eager_only)
    assert main(["verify", folder("qwen3_moe"), *CPU]) == 0
    out = capsys.readouterr().out
    says = "MODEL: Qwen3MoeForCausalLM does not run forward and backward: no backward on CPU"
    assert f"\nattention: eager; the model's own, sdpa, fails here: {says}\n" in out
    assert "patched and unpatched agree" in out


def test_verify_reports_the_first_error_where_eager_fails_too(capsys, folder, monkeypatch):
    ran_on = []

    def fail(model, batch):
        ran_on.append(model.config._attn_implementation)
        raise RuntimeError(f"failed on {ran_on[-1]}")

    monkeypatch.setattr(verify, "run", fail)
    said = error_of(capsys, "verify", folder("qwen3_moe"), *CPU)
    assert "does not run forward and backward: failed on sdpa" in said
    assert ran_on == ["sdpa", "eager"]


@pytest.mark.parametrize("command", ["inspect", "bench", "warmup"])
def test_commands_that_run_no_attention_take_any(capsys, folder, monkeypatch, command):
    monkeypatch.setattr(bench, "MIN_SECONDS", 0.01)
    path = naming_attention(folder("qwen3_moe"), "flash_attention_2")
    tokens = ["--tokens", "8"] if command == "bench" else []
    assert answer(capsys, command, path, *CPU, *tokens)


def naming_attention(path: str, attention: str) -> str:
    """Name an attention implementation in the config of a folder, and return the folder."""
    file = Path(path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attn_implementation": attention}))
    return path


def test_warmup_of_a_config_takes_any_attention_and_leaves_the_config() -> None:
    config = tiny_models.config("qwen3_moe")
    config._attn_implementation = "flash_attention_2"
    before = config.to_dict()
    assert all(row.skipped for row in warmup(config, device="cpu"))
    assert config._attn_implementation == "flash_attention_2"
    assert config.to_dict() == before
