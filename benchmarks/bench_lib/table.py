"""Show rows of one run as a markdown table. Ratios between runs are refused: conditions differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench_lib.rows import Row, RowError

GIB = 2**30


def ratio(slow: Row, fast: Row) -> float:
    """Return how many times faster ``fast`` is than ``slow``, at the same point of the same run.

    Raises:
        RowError: the rows are of different runs or points, or one was skipped.
    """
    for name in ("run", "op", "shape", "T", "pass", "dtype"):
        if slow[name] != fast[name]:
            raise RowError(f"no ratio across different {name}: {slow[name]!r} and {fast[name]!r}")
    for row in (slow, fast):
        if row["median_ms"] is None:
            raise RowError(f"no ratio with {row['impl']}, which was skipped: {row['skipped']}")
    return slow["median_ms"] / fast["median_ms"]


def of_run(rows: Sequence[Row], run: str | None) -> list[Row]:
    """Return the rows of one run; without a name, of the newest.

    Raises:
        RowError: there are no such rows.
    """
    wanted = run or (rows[-1]["run"] if rows else None)
    chosen = [row for row in rows if row["run"] == wanted]
    if not chosen:
        runs = ", ".join(sorted({row["run"] for row in rows})) or "none"
        raise RowError(f"no rows of run {run!r}; the file has {runs}")
    return chosen


def _point(row: Row) -> tuple:
    return tuple(row[name] for name in ("shape", "T", "R", "dtype", "pass"))


def _time_cell(row: Row, base: Row | None) -> str:
    cell = f"{row['median_ms']:.3g} ms"
    if row["tflops"] is not None:
        cell += f", {row['tflops']:.3g} TF"
    if base is not None and base is not row and base["median_ms"] is not None:
        cell += f", {ratio(base, row):.2f}x"
    return cell


def _saved_cell(row: Row, base: Row | None) -> str:
    return "–" if row["saved_bytes"] is None else f"{row['saved_bytes'] / GIB:.2f} GiB"


def _peak_cell(row: Row, base: Row | None) -> str:
    return "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / GIB:.2f} GiB"


CELLS: dict[str, Callable[[Row, Row | None], str]] = {
    "time": _time_cell,
    "saved": _saved_cell,
    "peak": _peak_cell,
}


def markdown(rows: Sequence[Row], over: str | None = None, show: str = "time") -> str:
    """Return one line per point, one column per implementation.

    Args:
        rows: of one run.
        over: the implementation that ratios are taken over; no ratios without it.
        show: "time" (milliseconds, rate, ratio), "saved" or "peak" (memory).

    Raises:
        RowError: the rows are of more than one run.
    """
    runs = sorted({row["run"] for row in rows})
    if len(runs) != 1:
        raise RowError(f"a table is of one run, these rows are of {len(runs)}: {', '.join(runs)}")
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    by_point: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        by_point.setdefault(_point(row), {})[row["impl"]] = row
    first = rows[0]
    lines = [
        f"Run {first['run']}, {first['date']}, commit {first['commit'][:12]}, {first['card']}, "
        f"torch {first['torch']}, triton {first['triton']}, transformers {first['transformers']}.",
        "",
        "| shape | T | R | dtype | pass | ceiling | floor | " + " | ".join(impls) + " |",
        "|---" * (7 + len(impls)) + "|",
    ]
    for point, row_of in by_point.items():
        any_row = next(iter(row_of.values()))
        ceiling, floor = any_row["ceiling_tflops"], any_row["floor_ms"]
        cells = ["–" if value is None else str(value) for value in point]
        cells.append("–" if ceiling is None else f"{ceiling:.3g} TF")
        cells.append("–" if floor is None else f"{floor:.3g} ms")
        for impl in impls:
            found = row_of.get(impl)
            if found is None or found["median_ms"] is None:
                cells.append("–" if found is None else "skipped")
            else:
                cells.append(CELLS[show](found, row_of.get(over) if over else None))
        lines.append("| " + " | ".join(cells) + " |")
    skipped = {(r["impl"], r["skipped"]): None for r in rows if "skipped" in r}
    lines += ["", *(f"- skipped {impl}: {reason}" for impl, reason in skipped)] if skipped else []
    return "\n".join(lines)


def describe(row: Row) -> str:
    """Return one line about a row, for people who watch a run."""
    where = f"{row['impl']:24} {row['shape']} T={row['T']} {row['dtype']} {row['pass']}"
    where += "" if row["R"] is None else f" R={row['R']}"
    if "skipped" in row:
        return f"{where}: skipped, {row['skipped']}"
    parts = [f"{row['median_ms']:.4g} ms"]
    for name, unit in (
        ("tflops", "TFLOP/s"),
        ("moe_ms", "ms in MoE"),
        ("tokens_per_s", "tokens/s"),
    ):
        if row.get(name) is not None:
            value = row[name]
            parts.append(f"{value:.1f} {unit}" if value >= 10 else f"{value:.2g} {unit}")
    if row["plain_ms"] is not None:
        parts.append(f"{row['median_ms'] / row['plain_ms'] - 1:+.1%} beside a plain process")
    if row["sm_mhz"] is not None:
        parts.append(f"{row['sm_mhz']} (least {row['sm_mhz_min']}) MHz, {row['power_w']} W")
    if row["rel_err"] is not None:
        parts.append(f"rel_err {row['rel_err']:.1e}")
    return f"{where}: {', '.join(parts)}"
