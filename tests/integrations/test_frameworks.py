"""docs/frameworks.md: its table is made from the rows, and its examples are short and run."""

from __future__ import annotations

import ast
import json
import runpy
import sys
from pathlib import Path

import pytest
from frameworks_lib.page import page
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "benchmarks" / "results" / "frameworks.jsonl"
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))


def test_the_table_is_current():
    assert page(ROWS, ROOT / "docs" / "frameworks.md", write=False) == 0


def test_a_row_that_passes_has_what_pass_means():
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    passed = [row for row in rows if row["result"] == "pass"]
    assert passed
    for row in passed:
        if row["mode"] == "merge":
            assert row["merged_max_rel"] <= 1e-5 < row["adapter_moved"]
            continue
        assert row["losses_max_rel"] <= 1e-4
        assert row["loss_moved"] > 0.05
        assert row["traced"]
        assert row["adapter_loads"] is (None if row["mode"] in ("full", "by_name") else True)


def test_a_row_that_does_not_pass_says_why():
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    for row in (row for row in rows if row["result"] != "pass"):
        assert row["note"], row


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 15
    tree = ast.parse(text)
    imported = {
        node.module.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    }
    assert path.stem not in imported, "run as a script, it would import itself"


def test_the_example_by_name_runs_a_module_with_the_name_registered(tmp_path, monkeypatch):
    (tmp_path / "job_of_a_framework.py").write_text("import sys\nargv = sys.argv[1:]\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(ExpertsInterface._global_mapping, "moe_patch", raising=False)
    monkeypatch.delitem(sys.modules, "moe_patch.integrations.transformers", raising=False)
    monkeypatch.setattr(sys, "argv", ["by_name.py", "-m", "job_of_a_framework", "--flag"])
    runpy.run_path(str(ROOT / "docs" / "examples" / "by_name.py"), run_name="__main__")
    assert sys.argv[1:] == ["--flag"]
    assert "moe_patch" in ALL_EXPERTS_FUNCTIONS
