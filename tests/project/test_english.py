"""Docstrings, comments and pages follow the rule of CONTRIBUTING.md (tests/support/prose.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import prose

ROOT = Path(__file__).parents[2]
# benchmarks/NOTES.md and CHANGELOG.md are records: what was written stays.
CODE = ("moe_patch", "scripts", "benchmarks/bench_lib", "benchmarks/studies", "tests")
PAGES = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "docs")


@pytest.mark.parametrize("name", [*CODE, *PAGES])
def test_sentences_are_short_and_say_who_does_what(name: str) -> None:
    faults = prose.check(ROOT / name)
    assert not faults, "\n".join(map(str, faults))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('"""Whether a block is patched."""', "begins with"),
        ('"""Its weights."""', "begins with"),
        ('def f():\n    """Those levels."""', "begins with"),
        ('"""Return the levels. A kernel asks for them."""', "'asks'"),
        ("x = 1\n# the buffer that is read\ny = 2", "no sentence"),
        ('"""' + "Return one word after the other and " * 5 + 'end."""', "words"),
    ],
)
def test_the_checker_finds_what_it_is_for(text: str, rule: str, tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(text)
    assert [fault.rule for fault in prose.check(file) if rule in fault.rule]


def test_the_checker_leaves_good_sentences_alone(tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(
        '"""Return the levels in ascending order."""\n'
        "x = 1  # [T, K]\n"
        "# Free w·a before allocating dx, to lower peak memory.\n"
    )
    assert prose.check(file) == []


def test_a_page_is_checked_without_code_tables_and_generated_parts(tmp_path: Path) -> None:
    long = "one word after the other and " * 6
    page = tmp_path / "page.md"
    parts = ("Short.", f"```text\n{long}\n```", f"| {long} |")
    page.write_text("\n\n".join([*parts, f"<!-- bench: x -->\n{long}\n<!-- end of bench -->\n"]))
    assert prose.check(page) == []
    page.write_text(f"The text has {long} an end.\n")
    assert [fault.rule for fault in prose.check(page)] == ["41 words"]
