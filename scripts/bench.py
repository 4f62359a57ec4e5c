#!/usr/bin/env python3
"""Benchmark one op beside its peers and append the rows to benchmarks/results/OP.jsonl.

    python scripts/bench.py experts                      # every shape, T, pass and peer
    python scripts/bench.py experts --shapes qwen3_30b --T 4096 --impls moe_patch hf_grouped_mm
    python scripts/bench.py experts --dry-run            # tiny, on the CPU, writes nothing
    python scripts/bench.py all --preset h100 --warm-jobs 12   # the whole grid within one run
    python scripts/bench.py table benchmarks/results/experts.jsonl --over hf_grouped_mm
    python scripts/bench.py docs                         # all tables and charts of README and docs
    python scripts/bench.py chart --out DIR              # the charts alone

docs/performance.md says what is measured and how; benchmarks/README.md explains the rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Prefer the checkout to an installed moe_patch.
sys.path[1:1] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from bench_lib import blocks, charts, child, clocks, rows, runner, table, warmup  # noqa: E402
from bench_lib.measure import Settings  # noqa: E402
from bench_lib.ops import OPS  # noqa: E402
from bench_lib.presets import PRESETS  # noqa: E402
from bench_lib.process import Timeout  # noqa: E402
from bench_lib.rows import COMMIT, PASSES, Row, RowError  # noqa: E402
from bench_lib.shapes import DTYPES, SHAPES  # noqa: E402
from bench_lib.spec import Op  # noqa: E402

from moe_patch.cli.output import Parser, add_json, complain, print_json  # noqa: E402
from moe_patch.cli.status import CHECK_FAILED, UNUSABLE  # noqa: E402

DRY_SETTINGS = Settings(repeats=3, peer_repeats=2, rep_ms=1.0)
RESULTS = ROOT / "benchmarks" / "results"
CHARTS = ROOT / "docs" / "img"
DOCUMENTS = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("performance", "performance-details", "aims")),
)


class StaleError(Exception):
    """A document is older than the rows that it shows."""


def _rank(text: str) -> int | None:
    return None if text == "none" else int(text)


def _add_common(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    sub.add_argument("--peers", type=Path, default=ROOT / ".peers" / "site", metavar="DIR")
    sub.add_argument("--budget", type=float, default=180.0, help="seconds per impl and point")
    sub.add_argument("--rep", type=float, metavar="MS", help="how long each timing measures")
    sub.add_argument(
        "--warm-jobs", type=int, default=0, metavar="N",
        help="first compile everything in N processes at once; nothing is timed meanwhile",
    )  # fmt: skip
    sub.add_argument("--warm-limit", type=float, default=240.0, metavar="S", help="and no longer")
    sub.add_argument(
        "--plain", action="store_true", help="time ours in a plain process too: field plain_ms"
    )
    sub.add_argument("--no-bounds", action="store_true", help="time no floors and ceilings")
    sub.add_argument("--runs", type=int, default=1, metavar="N", help="repeat all, as N runs")
    sub.add_argument("--commit", help="full SHA, where the tree was copied without its .git")
    sub.add_argument("--dry-run", action="store_true", help="tiny, CPU; writes only with --out")
    add_json(sub)


def _add_op(commands: Any, op: Op) -> None:
    sub = commands.add_parser(op.name, help=f"benchmark op {op.name}")
    sub.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: the op's own")
    sub.add_argument("--T", nargs="+", type=int, dest="tokens", help="tokens")
    sub.add_argument("--passes", nargs="+", choices=PASSES)
    sub.add_argument("--impls", nargs="+", choices=op.names())
    sub.add_argument("--dtype", choices=DTYPES)
    sub.add_argument("--R", nargs="+", type=_rank, dest="ranks", help="LoRA ranks, or none")
    sub.add_argument("--out", type=Path, help=f"default: benchmarks/results/{op.name}.jsonl")
    _add_common(sub)


def parser() -> argparse.ArgumentParser:
    """Return the command line: a sub-command per op, ``all``, ``table``, ``chart`` and ``docs``."""
    top = Parser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True, metavar="OP | all | table")
    for op in OPS.values():
        _add_op(commands, op)
    sub = commands.add_parser("all", help="a whole grid within one run")
    sub.add_argument("--preset", choices=PRESETS, required=True)
    sub.add_argument("--segments", nargs="+", metavar="NAME", help="only these parts of it")
    sub.add_argument("--total", type=float, metavar="S", help="stop measuring after S seconds")
    sub.add_argument("--warm-only", action="store_true", help="compile, measure nothing")
    sub.add_argument("--out-dir", type=Path, default=RESULTS, help="one file per op goes here")
    _add_common(sub)
    sub = commands.add_parser("table", help="rows of one run as a markdown table")
    sub.add_argument("file", type=Path)
    sub.add_argument("--run", help="default: the newest in the file")
    sub.add_argument("--over", help="the implementation that ratios are taken over")
    sub.add_argument("--show", choices=table.CELLS, default="time")
    add_json(sub)
    sub = commands.add_parser("chart", help="the newest rows as SVG (needs matplotlib)")
    sub.add_argument("--out", type=Path, default=CHARTS, metavar="DIR")
    add_json(sub)
    sub = commands.add_parser("docs", help="make the tables and charts of README and docs anew")
    sub.add_argument("--check", action="store_true", help="write nothing; fail if a table is stale")
    add_json(sub)
    sub = commands.add_parser("child", help="(internal) measure what a job file says")
    sub.add_argument("job", type=Path)
    return top


def _commit(given: str | None) -> str:
    commit = given or rows.commit_of(ROOT)
    if commit is None:
        raise RowError(f"{ROOT} has no .git: say which commit this is with --commit SHA")
    if not COMMIT.fullmatch(commit):
        raise RowError(f"--commit is {commit!r}, not a full SHA (with +dirty if it was)")
    return commit


def _device(args: argparse.Namespace) -> str:
    if args.dry_run:
        return "cpu"
    return args.device or ("cuda" if torch.cuda.is_available() else "cpu")


def _plan(args: argparse.Namespace, op: Op, part: Any) -> runner.Plan:
    """Return the plan of one op; ``part`` (a Segment or the command line) has the grid's fields."""
    settings = DRY_SETTINGS if args.dry_run else Settings()
    if args.rep is not None:
        settings = dataclasses.replace(settings, rep_ms=args.rep)
    settings = dataclasses.replace(settings, bounds=not args.no_bounds)
    device, shapes, tokens = _device(args), part.shapes, part.tokens
    if args.dry_run:
        shapes, tokens = (op.dry_shape,), SHAPES[op.dry_shape].tokens
    dtype = vars(args).get("dtype")
    return runner.Plan(
        op=op,
        impls=tuple(op.impl(name) for name in part.impls or op.names()),
        points=runner.grid(op, device, shapes, tokens, part.passes, dtype, part.ranks),
        device=device,
        peers=args.peers.resolve(),
        budget_s=args.budget,
        settings=settings,
        left_out=vars(part).get("left_out", {}),
        plain=args.plain,
    )


def _run(
    args: argparse.Namespace, plans: list[runner.Plan], out: dict[str, Path], total_s: float | None
) -> None:
    """Warm up, then measure as often as requested, each time as a run of its own.

    Raises:
        RowError: the commit is unknown or a row is not valid.
        Timeout: time ran out before the grid was finished.
    """
    started, device = time.monotonic(), plans[0].device
    deadline = None if total_s is None else started + total_s
    where = {"commit": _commit(args.commit), **rows.machine(device)}
    if args.warm_jobs:
        for line in warmup.warm_up("warm", plans, args.warm_jobs, args.warm_limit):
            print(line, file=sys.stderr, flush=True)
    if vars(args).get("warm_only"):
        return
    runs, found = [], []
    try:
        with tempfile.TemporaryDirectory(prefix="bench-clocks-") as folder:
            log = Path(folder) / "log"
            logged = [_logging(plan, log) for plan in plans]
            with clocks.sampler(rows.card_uuid(device), log):
                for _ in range(args.runs):
                    run, date = rows.new_run()
                    runs.append(run)
                    named = {"run": run, "date": date, **where}
                    for row in runner.execute(logged, named, deadline):
                        _take(row, out, started)
                        found.append(row)
    finally:
        files = [str(path) for path in dict.fromkeys(out.values())]
        where_to = f"rows in {', '.join(files)}" if files else "nothing written (dry run)"
        text = f"run {', '.join(runs)}: {where_to}"
        _print_result(
            args, text, run=runs[-1] if runs else None, runs=runs, rows=found, files=files
        )


def _logging(plan: runner.Plan, log: Path) -> runner.Plan:
    """Return the plan with clocks and power read from a file."""
    settings = dataclasses.replace(plan.settings, clocks=str(log))
    return dataclasses.replace(plan, settings=settings)


def _take(row: Row, out: dict[str, Path], started: float) -> None:
    line = f"{time.monotonic() - started:4.0f} s  {table.describe(row)}"
    print(line, file=sys.stderr, flush=True)
    if row["op"] in out:
        rows.append_rows(out[row["op"]], [row])


def bench(args: argparse.Namespace) -> None:
    """Run one op. Raises as :func:`_run`."""
    op = OPS[args.command]
    out = args.out or (None if args.dry_run else RESULTS / f"{op.name}.jsonl")
    _run(args, [_plan(args, op, args)], {} if out is None else {op.name: out}, None)


def bench_all(args: argparse.Namespace) -> None:
    """Run a preset. Raises as :func:`_run`, and RowError for an unknown segment."""
    segments = PRESETS[args.preset]
    unknown = set(args.segments or ()) - {segment.name for segment in segments}
    if unknown:
        known = ", ".join(segment.name for segment in segments)
        raise RowError(f"no segment {min(unknown)!r} in {args.preset}; it has {known}")
    chosen = [s for s in segments if args.segments is None or s.name in args.segments]
    plans = [_plan(args, OPS[segment.op], segment) for segment in chosen]
    out = {} if args.dry_run else {plan.op.name: plan.op.name for plan in plans}
    _run(args, plans, {name: args.out_dir / f"{name}.jsonl" for name in out}, args.total)


def _print_result(args: argparse.Namespace, text: str, **found: Any) -> None:
    """Print a result as text or as one JSON document."""
    if args.json:
        print_json(found)
    elif text:
        print(text)


def _print_files(args: argparse.Namespace, done: str, paths: Iterable[Path]) -> None:
    files = [str(path) for path in paths]
    _print_result(args, "\n".join(f"{done} {file}" for file in files), files=files)


def write_docs(check: bool) -> list[Path]:
    """Rewrite the marked tables; return the documents that changed.

    Raises:
        StaleError: with ``check``, a document differs from its rows.
        RowError: a marker is unknown.
    """
    changed = []
    for path in DOCUMENTS:
        old = path.read_text(encoding="utf-8")
        new = blocks.rewrite(old, RESULTS)
        if new == old:
            continue
        if check:
            raise StaleError(f"{path} is older than its rows; run scripts/bench.py docs")
        path.write_text(new, encoding="utf-8")
        changed.append(path)
    return changed


def main(argv: list[str] | None = None) -> int:
    """Run a command; return its exit status, after one line on stderr if that is not 0."""
    args = parser().parse_args(argv)
    try:
        if args.command == "child":
            child.main(args.job)
        elif args.command == "table":
            chosen = table.of_run(rows.read_rows(args.file), args.run)
            _print_result(args, table.markdown(chosen, args.over, args.show), rows=chosen)
        elif args.command == "chart":
            _print_files(args, "drew", charts.draw(RESULTS, args.out))
        elif args.command == "docs":
            drawn = [] if args.check else charts.draw(RESULTS, CHARTS)
            _print_files(args, "made", [*write_docs(args.check), *drawn])
        elif args.command == "all":
            bench_all(args)
        else:
            bench(args)
    except (StaleError, Timeout) as error:
        complain(str(error))
        return CHECK_FAILED
    except (RowError, OSError) as error:
        complain(str(error))
        return UNUSABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
