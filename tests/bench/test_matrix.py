"""scripts/matrix.py: an unreviewed Triton release fails, and so does one bad combination."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from moe_patch.kernels.common.versions import TRITON_VERSIONS
from scripts import matrix

# As matrix.py imports it, by its own name, so that patches act on the same module.
window = sys.modules["matrix_window"]

NEWEST = list(TRITON_VERSIONS)[-1]


def index(monkeypatch: pytest.MonkeyPatch, on_index: str, installed: str) -> None:
    """Pretend that pip finds one release on the index and has installed another."""

    def pretend(command: list[str], **options: object) -> object:
        if "index" in command:
            said = (
                f"triton ({on_index})\nAvailable versions: {on_index}, 3.6.0\n" if on_index else ""
            )
            return SimpleNamespace(stdout=said)
        if matrix.INSTALLED in command:
            return SimpleNamespace(stdout=f"{installed}\n" if installed else "")
        assert matrix.TABLE in command
        return SimpleNamespace(stdout=" ".join(TRITON_VERSIONS))

    monkeypatch.setattr(matrix.subprocess, "run", pretend)


def test_the_table_is_read_in_the_environment() -> None:
    assert matrix._printed(Path(sys.executable), "-c", matrix.TABLE).split() == [*TRITON_VERSIONS]


@pytest.mark.parametrize(
    ("on_index", "installed", "unseen"),
    [
        (f"{NEWEST}.0", f"{NEWEST}.0", ""),
        (f"{NEWEST}.7", "3.6.0+git9844da95", ""),
        ("3.99.0", f"{NEWEST}.0", "triton 3.99.0 has no row"),
        (f"{NEWEST}.0", "4.0.0", "triton 4.0.0 has no row"),
        ("", "4.0.0", "triton 4.0.0 has no row"),
        ("", f"{NEWEST}.0", ""),
        ("", "", ""),
    ],
)
def test_a_triton_without_a_row_is_named(
    on_index: str, installed: str, unseen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index(monkeypatch, on_index, installed)
    said = matrix.unseen_triton(Path(sys.executable))
    assert said.startswith(unseen)
    assert bool(said) == bool(unseen)
    assert not said or "TRITON_VERSIONS" in said


@pytest.mark.parametrize(("name", "status"), [("newest", 1), ("oldest", 0)])
def test_it_fails_the_newest_alone(
    name: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(matrix, "build", lambda environment: None)
    monkeypatch.setattr(matrix, "unseen_triton", lambda interpreter: "triton 4.0.0 has no row")
    monkeypatch.setattr(
        matrix.subprocess, "run", lambda command, **options: SimpleNamespace(returncode=0)
    )
    monkeypatch.setattr(sys, "argv", ["matrix.py", name])
    assert matrix.main() == status
    assert ("triton 4.0.0 has no row" in capsys.readouterr().out) == bool(status)


def test_the_window_is_five_releases_by_three() -> None:
    names = ("5.9x0.18", "5.13x0.20", "5.16xnewest", "5.20x0.18", "newestxnewest")
    assert {*names} < {*window.COMBINATIONS}
    assert len(window.COMBINATIONS) == 15
    assert window.COMBINATIONS["5.9x0.18"].releases == [("transformers", "5.9"), ("peft", "0.18")]
    assert window.COMBINATIONS["newestx0.20"].releases == [("peft", "0.20")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('tests="9" failures="2" errors="1" skipped="3"', (3, 3, 3)),
        ('tests="4" failures="0" errors="0" skipped="0"', (4, 0, 0)),
        (None, (0, 0, 0)),
    ],
)
def test_counts_are_read_from_pytests_report(
    text: str | None, found: tuple[int, int, int], tmp_path: Path
) -> None:
    report = tmp_path / "report.xml"
    if text is not None:
        report.write_text(f"<testsuites><testsuite {text}/></testsuites>")
    assert tuple(window.counts(report).values()) == found


def test_a_row_that_fails_fails_the_command_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The first cannot be installed, the second fails, the third passes; two rows are kept."""
    ran = []

    def prepared(combination: object, base: Path) -> Path:
        if combination.name == "5.9x0.18":
            raise subprocess.CalledProcessError(1, "pip")
        return base

    def run(command: list[str], **options: object) -> object:
        name, row = command[command.index("--here") + 1], command[command.index("--row") + 1]
        ran.append(name)
        passes = name == "newestxnewest"
        values = dict.fromkeys(("passed", "failed", "skipped", "seconds", "cpu_seconds"), 1)
        values |= {"combination": name, "result": "pass" if passes else "fail"}
        Path(row).write_text(json.dumps(values))
        return SimpleNamespace(returncode=0 if passes else 1)

    monkeypatch.setattr(matrix, "build", lambda environment: None)
    monkeypatch.setattr(window, "prepare", prepared)
    monkeypatch.setattr(window, "ROWS", tmp_path / "window.jsonl")
    monkeypatch.setattr(window.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["matrix.py", "newestxnewest", "5.13x0.20", "5.9x0.18"])
    assert matrix.main() == 1
    assert ran == ["5.13x0.20", "newestxnewest"]
    said = capsys.readouterr().out
    assert "5.9x0.18: not installed" in said
    assert "failed: 5.9x0.18, 5.13x0.20" in said
    rows = [json.loads(line) for line in (tmp_path / "window.jsonl").read_text().splitlines()]
    assert [row["result"] for row in rows] == ["fail", "pass"]
    monkeypatch.setattr(sys, "argv", ["matrix.py", "newestxnewest"])
    assert matrix.main() == 0
