"""Calls of the command line by tests, and readers of its output."""

from __future__ import annotations

import json
from pathlib import Path

from moe_patch.cli import UNUSABLE, main
from tests.support import tiny_models


def only_config(folder: Path, model_type: str, **overrides) -> str:
    """Save only a tiny model's config to the folder, and return the folder."""
    tiny_models.config(model_type, **overrides).save_pretrained(folder)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    return str(folder)


def answer(capsys, *argv: str, status: int = 0):
    """Run a command with --json and return the parsed output."""
    assert main([*argv, "--json"]) == status
    out, _ = capsys.readouterr()
    return json.loads(out)


def error_of(capsys, *argv: str) -> str:
    """Run a command that cannot succeed, and return its one line of error."""
    assert main([*argv]) == UNUSABLE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("moe-patch: error: ")
    assert err.count("\n") == 1
    return err
