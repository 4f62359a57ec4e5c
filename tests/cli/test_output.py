"""Tables and progress: rich and tqdm on a terminal where they are installed, else plain."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest

from moe_patch.cli import output

ROWS = [("layers[0]", 1, None), ("b", 22, "x")]
PLAIN = "name       n   note\nlayers[0]  1\nb          22  x\n"


class Terminal(io.StringIO):
    """A stream whose isatty() is true."""

    def isatty(self) -> bool:
        return True


def test_plain_where_there_is_no_terminal(capsys):
    output.print_table(("name", "n", "note"), ROWS)
    assert capsys.readouterr().out == PLAIN


@pytest.mark.parametrize("installed", [True, False])
def test_rich_on_a_terminal_where_it_is_installed(monkeypatch, installed):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    if not installed:
        monkeypatch.setattr(output.importlib.util, "find_spec", lambda name: None)
    output.print_table(("name", "n", "note"), ROWS)
    written = terminal.getvalue()
    assert (written == PLAIN) is not installed
    assert "layers[0]" in written, "a path is no markup"


def test_the_heads_are_whole_on_a_narrow_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "60")
    head = ("blocks", "tier", "router backend", "experts backend", "top k", "B/token", "reason")
    row = ("24 x, model.layers.0.mlp ... model.layers.23.mlp", "full", *["triton"] * 2, 8, 9216)
    output.print_table(head, [(*row, "a reason that is longer than the terminal is wide, by far")])
    written = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())
    assert set(" ".join(head).split()) <= set(written.split())
    assert "…" not in written
    assert max(map(len, written.splitlines())) <= 60


@pytest.mark.parametrize("installed", [True, False])
def test_progress_on_a_terminal_where_tqdm_is_installed(monkeypatch, installed):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    if not installed:
        monkeypatch.setattr(output.importlib.util, "find_spec", lambda name: None)
    with output.progress(2, "reading") as steps:
        steps.step("running")
    assert ("reading: 0/2" in terminal.getvalue()) is installed
    assert ("running" in terminal.getvalue()) is installed


def test_no_progress_without_a_terminal(capsys):
    with output.progress(2, "reading") as steps:
        steps.step("running")
    assert capsys.readouterr() == ("", "")


def test_a_json_document_has_no_number_that_json_has_not(capsys):
    output.print_json({"a": [float("nan"), 1.5, (float("inf"), "x")], "b": {"c": -float("inf")}})

    def refuse(name):
        raise AssertionError(name)

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found == {"a": [None, 1.5, [None, "x"]], "b": {"c": None}}
