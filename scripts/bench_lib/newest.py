"""Which rows a document shows: for every point the newest run that measured it beside its peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_lib.ops import OPS
from bench_lib.rows import OURS, Row, read_rows
from bench_lib.spec import Op

# The tokens at which every op and peer is measured.
SHOWN_TOKENS = 16384


@dataclass(frozen=True)
class Line:
    """One point of one run.

    Attributes:
        shape, T, R, dtype, passes: the point.
        by_impl: its rows, all of one run.
    """

    shape: str
    T: int
    R: int | None
    dtype: str
    passes: str
    by_impl: dict[str, Row]

    @property
    def ours(self) -> Row:
        return self.by_impl[OURS]

    @property
    def card(self) -> str:
        """As tables name it."""
        return self.ours["card"].removeprefix("NVIDIA ").partition(" ")[0]

    def time(self, impl: str) -> float | None:
        """Median milliseconds, or None where there is none."""
        row = self.by_impl.get(impl)
        return None if row is None else row["median_ms"]

    def faster(self, impl: str) -> float | None:
        """How many times faster ours is than ``impl``."""
        own, other = self.time(OURS), self.time(impl)
        return None if own is None or other is None else other / own


def _order(op: Op, line: Line) -> tuple:
    shapes = list(op.shapes)
    place = shapes.index(line.shape) if line.shape in shapes else len(shapes)
    return place, line.shape, line.T, line.R or 0, line.dtype, line.passes, line.card


def newest_lines(rows: Sequence[Row], op: Op, each_card: bool = False) -> list[Line]:
    """A line per point that ours was measured at on a GPU, in the order of the op's grid.

    A run without a row of every required peer that covers the point counts only where there is no
    other.

    Args:
        rows: of the op.
        op: the op.
        each_card: a line per kind of card that the point was measured on, not one of the newest.
    """
    found: dict[tuple, dict[str, dict[str, Row]]] = {}
    for row in rows:
        if row["card"].startswith("CPU"):
            continue
        point = tuple(row[name] for name in ("shape", "T", "R", "dtype", "pass"))
        key = (*point, row["card"]) if each_card else point
        found.setdefault(key, {}).setdefault(row["run"], {})[row["impl"]] = row
    lines = []
    for key, runs in found.items():
        with_ours = [run for run in runs.values() if OURS in run]
        if not with_ours:
            continue
        known = {name for run in with_ours for name in op.required if name in run}
        best = max(with_ours, key=lambda run: (known <= run.keys(), run[OURS]["date"]))
        lines.append(Line(*key[:5], best))
    return sorted(lines, key=lambda line: _order(op, line))


def lines_of(op_name: str, results: Path, each_card: bool = False) -> list[Line]:
    """The lines of an op's file; none without the file. Arguments as of :func:`newest_lines`."""
    path = results / f"{op_name}.jsonl"
    return newest_lines(read_rows(path), OPS[op_name], each_card) if path.exists() else []


def one_per_shape(lines: Sequence[Line]) -> list[Line]:
    """The line of each shape at :data:`SHOWN_TOKENS`, else at the largest T there is."""
    chosen: dict[str, Line] = {}
    for line in sorted(lines, key=lambda line: (line.T == SHOWN_TOKENS, line.T)):
        chosen[line.shape] = line
    return [chosen[shape] for shape in dict.fromkeys(line.shape for line in lines)]


def provenance(lines: Sequence[Line]) -> str:
    """Card, versions and runs behind some lines, in one sentence."""
    firsts = {line.ours["run"]: line.ours for line in lines}
    cards = ", ".join(dict.fromkeys(row["card"] for row in firsts.values()))
    versions = ", ".join(
        dict.fromkeys(
            f"torch {row['torch']}, triton {row['triton']}, transformers {row['transformers']}"
            for row in firsts.values()
        )
    )
    runs = ", ".join(
        f"{run} ({row['date'][:16].replace('T', ' ')} UTC, commit {row['commit'][:10]}"
        f"{'+dirty' if row['commit'].endswith('+dirty') else ''})"
        for run, row in firsts.items()
    )
    return f"{cards}; {versions}. Run{'s' if len(firsts) > 1 else ''} {runs}."
