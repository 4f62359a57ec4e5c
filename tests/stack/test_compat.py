"""The table of stacks: its rows name tests that exist, and the document is made from the rows."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import compat
import pytest
from accelerate.commands.config.config_args import load_config_from_file

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))


def test_every_proof_selects_tests():
    assert len({(p.row, p.test) for p in compat.PROOFS}) == len(compat.PROOFS)
    for proof in compat.PROOFS:
        source = (ROOT / "tests" / proof.file).read_text(encoding="utf-8")
        names = [n.name for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)]
        assert re.fullmatch(r"[\w ]*", proof.select), "one process for all proofs knows no more"
        for word in set(re.findall(r"\w+", proof.select)) - {"and", "or", "not"}:
            text = "\n".join(n for n in names if n.startswith("test_")) + source
            assert word in text, f"{proof.test}: nothing is called {word}"


@pytest.mark.parametrize(
    ("select", "name", "taken"),
    [
        ("", "test_a[x]", True),
        ("ep and ranks2", "test_two[qwen3_moe-ep-ranks2]", True),
        ("ep and ranks2", "test_two[qwen3_moe-ep-ranks4]", False),
        ("not a", "test_b", True),
        ("a or c", "test_b", False),
    ],
)
def test_a_selection_is_read_as_pytest_reads_it(select, name, taken):
    proof = compat.Proof("row", "shows", "test_file.py", select)
    assert compat.selects(proof, f"tests/test_file.py::{name}") == taken
    assert not compat.selects(proof, f"tests/test_other.py::{name}")


@pytest.mark.parametrize(
    ("phases", "ended"),
    [
        ({"setup": "passed", "call": "passed", "teardown": "passed"}, "passed"),
        ({"setup": "passed", "call": "failed", "teardown": "passed"}, "failed"),
        ({"setup": "passed", "call": "passed", "teardown": "failed"}, "failed"),
        ({"setup": "skipped", "teardown": "passed"}, "skipped"),
        ({"setup": "passed"}, None),
        ({"setup": "passed", "call": "passed"}, None),
    ],
    ids=str,
)
def test_a_test_that_was_stopped_has_not_ended(phases, ended):
    outcomes = compat.Outcomes()
    for when, outcome in phases.items():
        outcomes.pytest_runtest_logreport(
            SimpleNamespace(nodeid="t", when=when, outcome=outcome, duration=1.0)
        )
    assert outcomes.ended == ({} if ended is None else {"t": (ended, float(len(phases)))})


def test_document_is_made_from_the_rows():
    rows = compat.stored()
    assert compat.DOC.read_text(encoding="utf-8") == compat.document(
        rows, compat.stored(compat.PARALLEL), compat.stored(compat.WINDOW)
    )
    for row in rows:
        assert tuple(row) == compat.FIELDS
        assert row["result"] in ("pass", "refused", "fail")
        assert row["world"] >= 1


def test_a_failure_shows_and_the_newest_row_counts():
    proof = compat.PROOFS[0]
    row = dict.fromkeys(compat.FIELDS, "x") | {"row": proof.row, "test": proof.test}
    failed, passed = row | {"result": "fail"}, row | {"result": "pass"}
    for rows, shown in (
        ([passed, failed], ["fail"]),
        ([failed, passed], ["pass"]),
        ([passed, passed | {"card": "CPU: y"}], ["pass", "pass"]),
        ([failed, passed | {"card": "another"}], ["pass"]),
        ([passed, passed | {"transformers": "y"}], ["pass"]),
        ([passed, failed | {"transformers": "y"}], ["pass", "fail"]),
    ):
        lines = [t for t in compat.document(rows).splitlines() if f"`{proof.test}`" in t]
        assert [line.split(" | ")[2] for line in lines] == shown
    assert "| not run |" in compat.document([])


def test_the_table_of_several_cards():
    common = {
        "card": "c",
        "layers": 2,
        "tokens": 8,
        "sequences": 1,
        "torch": "t",
        "transformers": "v",
    }
    common |= {"commit": "0" * 40, "world": 2, "layout": "ep"}
    ours, theirs = ({"impl": impl} | common for impl in ("moe_patch", "hf_grouped_mm"))
    rows = [
        ours | {"run": "old", "tokens_per_s": 7},
        ours | {"run": "new", "tokens_per_s": 30},
        theirs | {"run": "new", "tokens_per_s": 20},
    ]
    assert "| 2 | ep | 30 | 20 | 1.50 |" in compat.document([], rows)
    assert "Several cards" not in compat.document([])


def test_the_table_of_releases():
    """The newest run of each combination and suite, older releases first, whole suites last."""
    columns = ("result", "passed", "failed", "skipped", "seconds", "cpu_seconds")
    common = dict.fromkeys(columns, 1) | {"commit": "0" * 40, "suite": "window"}

    def row(transformers, peft, **changes):
        return common | {"transformers": transformers, "peft": peft} | changes

    rows = [
        row("5.9.0", "0.18.1", suite="whole", failed=2),
        row("5.13.0", "0.18.1"),
        row("5.9.0", "0.20.0", passed=3),
        row("5.9.0", "0.20.0", passed=4),
    ]
    text = compat.document([], None, rows).partition("## Releases")[2]
    found = [line[2:-2].split(" | ")[:6] for line in text.splitlines() if line.startswith("| 5.")]
    assert found == [
        ["5.9.0", "0.20.0", "marked", "1", "4", "1"],
        ["5.13.0", "0.18.1", "marked", "1", "1", "1"],
        ["5.9.0", "0.18.1", "all", "1", "1", "2"],
    ]
    assert "Releases" not in compat.document([]).partition("## Not run")[0]


@pytest.mark.parametrize("path", LAUNCH, ids=lambda p: p.stem)
def test_accelerate_reads_the_launch_configs(path):
    config = load_config_from_file(str(path))
    assert config.num_processes == 2
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first == (
        f"# accelerate launch --config_file configs/accelerate/{path.name} "
        "-m moe_patch train CONFIG.yaml"
    )
