"""Sizes on the command line beyond what the machine's memory holds."""

from __future__ import annotations

import pytest
import torch

from moe_patch.cli import limits
from moe_patch.cli.output import bytes_text
from tests.support.cli_calls import error_of, only_config

SIZES = [
    ("verify", "--length"),
    ("verify", "--batch"),
    ("bench", "--tokens"),
    ("warmup", "--tokens"),
    ("warmup", "--lora"),
]


@pytest.mark.parametrize(("command", "option"), SIZES, ids=map(" ".join, SIZES))
def test_more_than_the_memory_holds(capsys, tmp_path, command, option):
    """Refuse by computation: correct beyond 64 bits, and where the system overcommits memory."""
    model = only_config(tmp_path, "qwen3_moe")
    there = bytes_text(limits.memory_of(torch.device("cpu")))
    for size in (10**13, 10**17, 10**30):
        said = error_of(capsys, command, model, "--device", "cpu", option, str(size))
        assert f"{option} {size}" in said
        assert f" GiB, cpu has {there}; accepted: sizes that fit" in said


@pytest.mark.parametrize(("command", "option"), [("verify", "--length"), ("bench", "--tokens")])
def test_a_cpu_that_runs_out_of_memory_later(capsys, tmp_path, monkeypatch, command, option):
    monkeypatch.setattr(limits, "memory_of", lambda device: None)
    model = only_config(tmp_path, "qwen3_moe")
    said = error_of(capsys, command, model, "--device", "cpu", option, str(10**13))
    assert "tried to allocate" in said
    assert "Use fewer tokens or layers" in said
