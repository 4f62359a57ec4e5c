"""No test has a limit of time that a slow machine could reach."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# Arguments that are limits of time, and methods of processes and threads that take one first.
ARGUMENTS = {"timeout", "timeout_s", "deadline", "limit_s"}
METHODS = {"wait", "join", "wait_for_imports"}
# tests/support/dist_helpers.py turns HANG_S into a deadline; no other test reads a clock.
CLOCKS = {"monotonic", "perf_counter", "perf_counter_ns", "time", "process_time"}
CLOCK_READERS = {"dist_helpers.py"}


def _is_number(node: ast.expr) -> bool:
    return any(
        isinstance(part, ast.Constant) and type(part.value) in (int, float)
        for part in ast.walk(node)
    )


def _limits(tree: ast.AST) -> list[str]:
    """Return limits written as numbers, and readings of a clock, each with its line."""
    found = []
    for node in ast.walk(tree):
        values: list[ast.expr] = []
        if isinstance(node, ast.arguments):
            places = [*node.posonlyargs, *node.args]
            defaults = zip(places[len(places) - len(node.defaults) :], node.defaults, strict=True)
            pairs = [*defaults, *zip(node.kwonlyargs, node.kw_defaults, strict=True)]
            values = [value for arg, value in pairs if value and arg.arg in ARGUMENTS]
        elif isinstance(node, ast.Call):
            values = [keyword.value for keyword in node.keywords if keyword.arg in ARGUMENTS]
            if isinstance(node.func, ast.Attribute):
                first = node.args[:1] if node.func.attr in METHODS else []
                values += [value for value in first if isinstance(value, ast.Constant)]
                if ast.unparse(node.func.value) == "time" and node.func.attr in CLOCKS:
                    found.append(f"{node.lineno}: {ast.unparse(node)}")
        found += [f"{value.lineno}: {ast.unparse(value)}" for value in values if _is_number(value)]
    return found


def test_limits_come_from_one_place():
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        here = _limits(ast.parse(path.read_text(encoding="utf-8")))
        if path.name in CLOCK_READERS:
            here = [each for each in here if "time.monotonic()" not in each]
        found += [f"{path.name}:{each}" for each in here]
    assert found == [], "use tests.support.limits.HANG_S, and compare no readings of a clock"


@pytest.mark.parametrize(
    "source",
    [
        "subprocess.run(command, timeout=120)",
        "def run(timeout: float = 120.0): pass",
        "def run(*, timeout_s=60): pass",
        "process.wait(20)",
        "call(timeout=timedelta(seconds=120))",
        "start = time.perf_counter()",
    ],
)
def test_a_limit_elsewhere_is_found(source: str):
    assert len(_limits(ast.parse(source))) == 1
