"""Choose the rows that a document shows: at every point the newest runs with us and our peers.

Runs of one commit on one kind of card, with the same versions, count together. A document shows
their median, with the least and the most. Ratios are taken within each run before that.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_lib.ops import OPS
from bench_lib.rows import OURS, Row, read_rows
from bench_lib.spec import Op

# Number of tokens at which every op and peer is measured.
SHOWN_TOKENS = 16384


# A median of fewer runs, or machines, is marked.
ENOUGH_RUNS = 3
ENOUGH_MACHINES = 2

# The rows of a point in one run, by implementation.
Rows = dict[str, Row]


@dataclass(frozen=True)
class Line:
    """One point, from all runs that count together.

    Attributes:
        shape, T, R, dtype, passes: the point.
        runs: its rows in each run, the newest first.
    """

    shape: str
    T: int
    R: int | None
    dtype: str
    passes: str
    runs: tuple[Rows, ...]

    @property
    def ours(self) -> Row:
        """Return our row of the newest run."""
        return self.runs[0][OURS]

    @property
    def by_impl(self) -> Rows:
        """Return the newest row of each implementation."""
        return {impl: row for run in reversed(self.runs) for impl, row in run.items()}

    @property
    def machines(self) -> int:
        """Return the number of machines that measured it."""
        return _machines(self.runs)

    @property
    def enough(self) -> bool:
        """Return whether enough runs and machines average out chance."""
        return _enough(self.runs)

    @property
    def card(self) -> str:
        """Return the card's name in tables."""
        return self.ours["card"].removeprefix("NVIDIA ").partition(" ")[0]

    def values(self, value: Callable[[Rows], float | None]) -> list[float]:
        """Return a quantity in every run that has it, in ascending order."""
        found = [value(run) for run in self.runs]
        return sorted(one for one in found if one is not None)

    def numbers(self, impl: str, field: str) -> list[float]:
        """Return a field of an implementation's rows, in ascending order."""
        return self.values(lambda run: run[impl].get(field) if impl in run else None)

    def number(self, impl: str, field: str) -> float | None:
        """Return the median of a field over all runs, or None without values."""
        return median(self.numbers(impl, field))

    def time(self, impl: str) -> float | None:
        """Return median milliseconds, or None without values."""
        return self.number(impl, "median_ms")

    def quotient(self, above: tuple[str, str], below: tuple[str, str]) -> float | None:
        """Return the median over all runs of the ratio of two fields, each taken within its run."""
        return median(self.values(lambda run: quotient(run, above, below)))

    def ratios(self, impl: str) -> list[float]:
        """Return our speedup over ``impl`` in every run that has both, in ascending order."""
        return self.values(lambda run: quotient(run, (impl, "median_ms"), (OURS, "median_ms")))

    def faster(self, impl: str) -> float | None:
        """Return the median of :meth:`ratios`, or None if no run has both."""
        return median(self.ratios(impl))


def median(values: Iterable[float]) -> float | None:
    """Return the median, or None without values."""
    known = list(values)
    return statistics.median(known) if known else None


def quotient(run: Rows, above: tuple[str, str], below: tuple[str, str]) -> float | None:
    """Return the ratio of two fields, each named by implementation and field, within one run."""
    top, bottom = (run[impl].get(name) if impl in run else None for impl, name in (above, below))
    return None if top is None or bottom is None else top / bottom


def _machines(runs: Sequence[Rows]) -> int:
    return len({run[OURS].get("machine") for run in runs})


def _enough(runs: Sequence[Rows]) -> bool:
    return len(runs) >= ENOUGH_RUNS and _machines(runs) >= ENOUGH_MACHINES


def _together(row: Row) -> tuple:
    """Return an equal key for rows whose runs count together; unknown machines stand alone."""
    if row.get("machine") is None or row["commit"].endswith("+dirty"):
        return (row["run"],)
    return tuple(row[name] for name in ("commit", "card", "torch", "triton", "transformers"))


def _order(op: Op, line: Line) -> tuple:
    shapes = list(op.shapes)
    place = shapes.index(line.shape) if line.shape in shapes else len(shapes)
    return place, line.shape, line.T, line.R or 0, line.dtype, line.passes, line.card


def in_turn(rows: Iterable[Row]) -> list[list[Row]]:
    """Return our timed rows by machine and commit, where several releases of Triton took turns."""
    places: dict[tuple, list[Row]] = {}
    for row in rows:
        if row["impl"] == OURS and row.get("machine") and row["median_ms"] is not None:
            place = tuple(row[name] for name in ("machine", "commit", "torch", "transformers"))
            places.setdefault(place, []).append(row)
    return [found for found in places.values() if len({row["triton"] for row in found}) > 1]


def _without_turns(rows: Sequence[Row]) -> list[Row]:
    """Drop the runs of :func:`in_turn` that timed no other implementation."""
    accompanied = {row["run"] for row in rows if row["impl"] != OURS}
    turns = {row["run"] for found in in_turn(rows) for row in found} - accompanied
    return [row for row in rows if row["run"] not in turns]


def newest_lines(rows: Sequence[Row], op: Op, each_card: bool = False) -> list[Line]:
    """Return a line per point that ours was measured at on a GPU, in the order of the op's grid.

    Prefer runs with a row of every required peer that covers the point, then sets with enough runs
    and machines. Runs that compare releases of Triton are left out; they have their own table.

    Args:
        rows: of the op.
        op: the op.
        each_card: return a line per kind of card, not only one of the newest.
    """
    found: dict[tuple, dict[tuple, dict[str, Rows]]] = {}
    for row in _without_turns(rows):
        if row["card"].startswith("CPU"):
            continue
        point = tuple(row[name] for name in ("shape", "T", "R", "dtype", "pass"))
        key = (*point, row["card"]) if each_card else point
        runs = found.setdefault(key, {}).setdefault(_together(row), {})
        runs.setdefault(row["run"], {})[row["impl"]] = row
    lines = [
        Line(*key[:5], runs)
        for key, sets in found.items()
        if (runs := _best([*sets.values()], op.required))
    ]
    return sorted(lines, key=lambda line: _order(op, line))


def _best(sets: Sequence[dict[str, Rows]], required: Sequence[str]) -> tuple[Rows, ...]:
    """Return the set to show of sets of runs that count together, the newest run first."""
    candidates = []
    for runs in sets:
        ours = [run for run in runs.values() if OURS in run]
        ours.sort(key=lambda run: run[OURS]["date"], reverse=True)
        candidates += [tuple(ours)] if ours else []
    known = {name for runs in candidates for name in _impls(runs) if name in required}

    def rank(runs: tuple[Rows, ...]) -> tuple:
        return known <= _impls(runs), _enough(runs), runs[0][OURS]["date"]

    return max(candidates, key=rank, default=())


def _impls(runs: Sequence[Rows]) -> set[str]:
    return {impl for run in runs for impl in run}


def lines_of(op_name: str, results: Path, each_card: bool = False) -> list[Line]:
    """Return the lines of an op's file; none without it. Arguments as :func:`newest_lines`."""
    path = results / f"{op_name}.jsonl"
    return newest_lines(read_rows(path), OPS[op_name], each_card) if path.exists() else []


def one_per_shape(lines: Sequence[Line]) -> list[Line]:
    """Return the line of each shape at :data:`SHOWN_TOKENS`, else at the largest T."""
    chosen: dict[str, Line] = {}
    for line in sorted(lines, key=lambda line: (line.T == SHOWN_TOKENS, line.T)):
        chosen[line.shape] = line
    return [chosen[shape] for shape in dict.fromkeys(line.shape for line in lines)]


def holds_for(lines: Sequence[Line]) -> str:
    """Return torch and Triton of the runs behind some lines."""
    rows = [run[OURS] for line in lines for run in line.runs]
    pairs = dict.fromkeys(f"torch {row['torch']} with Triton {row['triton']}" for row in rows)
    return " and ".join(pairs)


def provenance(lines: Sequence[Line]) -> str:
    """Return card, versions and runs behind some lines, in one sentence."""
    firsts = {run[OURS]["run"]: run[OURS] for line in lines for run in line.runs}
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
