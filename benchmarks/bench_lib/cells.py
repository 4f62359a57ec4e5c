"""Cells and lines of the tables that :mod:`bench_lib.blocks` makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench_lib import aims
from bench_lib.newest import ENOUGH_MACHINES, ENOUGH_RUNS, OURS, Line
from bench_lib.ops import OPS


def number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def spread(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """Return the least and the most of several runs; nothing for one run."""
    return f" [{shown(values[0])}, {shown(values[-1])}]" if len(values) > 1 else ""


def ratio(value: float) -> str:
    return f"{value:.2f}"


def time_cell(line: Line, impl: str, scale: float) -> str:
    if impl not in line.by_impl:
        return ""
    time_ms, faster = line.time(impl), line.faster(impl)
    if time_ms is None:
        return "skipped"
    cell = number(time_ms * scale)
    if impl == OURS:
        every = [value * scale for value in line.numbers(OURS, "median_ms")]
        return cell + spread(every, number)
    return cell if faster is None else f"{cell} ({faster:.2f}x)"


def share_cell(line: Line) -> str:
    rate, share = line.number(OURS, "tflops"), aims.share(line, ())
    if rate is None:
        return ""
    return f"{rate:.0f}" if share is None else f"{rate:.0f} ({share:.2f})"


def floors_cell(line: Line) -> str:
    found = aims.floors(line, ())
    return "" if found is None else f"{found:.1f}"


def runs_cell(line: Line) -> str:
    """Return the number of runs behind a line, with the number of machines in brackets."""
    return f"{len(line.runs)} ({line.machines})" + ("" if line.enough else " \\*")


def about_runs(lines: Sequence[Line]) -> str:
    """Explain brackets and stars, if there are any."""
    said = []
    if any(len(line.runs) > 1 for line in lines):
        said.append("Of several runs the median [least, most], of ratios too, each within its run.")
    if not all(line.enough for line in lines):
        said.append(f"\\* Fewer than {ENOUGH_RUNS} runs or {ENOUGH_MACHINES} machines.")
    return f"{' '.join(said)}\n\n" if said else ""


def impls_of(lines: Sequence[Line], op_name: str) -> list[str]:
    present = {impl for line in lines for impl in line.by_impl}
    return [impl for impl in OPS[op_name].names() if impl in present]


def point_cells(line: Line, names: Sequence[str]) -> list[str]:
    values = {
        "shape": line.shape, "T": line.T, "R": line.R, "dtype": line.dtype, "pass": line.passes,
        "card": line.card,
    }  # fmt: skip
    return ["–" if values[name] is None else str(values[name]) for name in names]


def markdown(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *body]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def skips(lines: Sequence[Line]) -> str:
    reasons: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        for impl, row in line.by_impl.items():
            if "skipped" in row:
                where = f"{line.shape} T={line.T} {line.passes} ({line.card})"
                reasons.setdefault((impl, row["skipped"]), []).append(where)
    listed = "".join(
        f"- {impl} skipped at {', '.join(places)}: {reason}\n"
        for (impl, reason), places in reasons.items()
    )
    return listed and f"{listed}\n"
