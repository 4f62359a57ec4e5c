"""scripts/matrix.py: a Triton that nobody looked at fails."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from moe_patch.kernels.common.versions import TRITON_VERSIONS
from scripts import matrix

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
