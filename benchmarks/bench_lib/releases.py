"""Make a table of equal points on two releases of Triton, from runs in turn on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench_lib.cells import markdown, number, spread
from bench_lib.newest import in_turn, median
from bench_lib.ops import OPS
from bench_lib.rows import Row, read_rows

OP_NAMES = ("experts", "lora", "decode", "quantised")
POINT = ("op", "shape", "T", "R", "dtype", "pass")
# From this size on the kernels determine the time, below it the host.
LARGE_TOKENS = 16384


def _cell(rows: Sequence[Row], field: str) -> str:
    values = sorted(row[field] for row in rows if row[field] is not None)
    return f"{number(median(values))}{spread(values, number)}" if values else ""


def releases(results: Path) -> str:
    """Return median [least, most] of each release, and the newest's distance from the oldest."""
    rows: list[Row] = []
    for name in OP_NAMES:
        path = results / f"{name}.jsonl"
        rows += read_rows(path) if path.exists() else []
    # Of the machines and commits with more than one release, the newest.
    chosen = max(in_turn(rows), key=lambda found: max(row["date"] for row in found), default=[])
    if not chosen:
        return "No rows of two releases from one machine yet.\n"
    versions = sorted({row["triton"] for row in chosen})
    points: dict[tuple, dict[str, list[Row]]] = {}
    for row in chosen:
        at = points.setdefault(tuple(row[name] for name in POINT), {})
        at.setdefault(row["triton"], []).append(row)
    body = []
    for point, found in points.items():
        if len(found) < len(versions):
            continue
        large = point[2] >= LARGE_TOKENS
        field = "median_ms" if large or not OPS[point[0]].grad else "host_us"
        ends = [median(row[field] for row in found[v]) for v in (versions[-1], versions[0])]
        more = "" if None in ends else f"{ends[0] / ends[1] - 1:+.1%}"
        cells = [_cell(found[v], f) for f in ("median_ms", "host_us") for v in versions]
        body.append([*("–" if v is None else str(v) for v in point), *cells, more])
    header = [*POINT, *(f"{v}, ms" for v in versions), *(f"{v}, host µs" for v in versions)]
    header.append(f"{versions[-1]} over {versions[0]}")
    first = chosen[0]
    runs = len({row["run"] for row in chosen})
    told = (
        f"{first['card']}, torch {first['torch']}, commit {first['commit'][:10]}, {runs} runs in "
        f"turn. The last column compares times from T = {LARGE_TOKENS} on and in decoding, "
        "`host_us` elsewhere.\n"
    )
    return f"{markdown(header, body)}\n{told}"
