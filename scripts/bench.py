#!/usr/bin/env python3
"""Benchmark one op beside its peers and append the rows to benchmarks/results/OP.jsonl.

    python scripts/bench.py experts                      # every shape, T, pass and peer
    python scripts/bench.py experts --shapes qwen3_30b --T 4096 --impls moe_patch hf_grouped_mm
    python scripts/bench.py experts --dry-run            # tiny, on the CPU, writes nothing
    python scripts/bench.py table benchmarks/results/experts.jsonl --over hf_grouped_mm

docs/performance.md says what is measured and how; benchmarks/README.md what a row means.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The checkout comes before an installed moe_patch; scripts/ itself is on the path already.
sys.path.insert(1, str(ROOT))

import torch  # noqa: E402
from bench_lib import child, rows, runner, table  # noqa: E402
from bench_lib.measure import Settings  # noqa: E402
from bench_lib.ops import OPS  # noqa: E402
from bench_lib.rows import COMMIT, PASSES, Row, RowError  # noqa: E402
from bench_lib.shapes import DTYPES, SHAPES  # noqa: E402

DRY_SETTINGS = Settings(repeats=3, peer_repeats=2, rep_ms=1.0)


def _rank(text: str) -> int | None:
    return None if text == "none" else int(text)


def parser() -> argparse.ArgumentParser:
    """The command line: one sub-command per op, and ``table``."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="OP | table")
    for op in OPS.values():
        sub = commands.add_parser(op.name, help=f"benchmark op {op.name}")
        sub.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: the op's own")
        sub.add_argument("--T", nargs="+", type=int, dest="tokens", help="tokens")
        sub.add_argument("--passes", nargs="+", choices=PASSES)
        sub.add_argument("--impls", nargs="+", choices=op.names())
        sub.add_argument("--dtype", choices=DTYPES)
        sub.add_argument("--R", nargs="+", type=_rank, dest="ranks", help="LoRA ranks, or none")
        sub.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
        sub.add_argument("--peers", type=Path, default=ROOT / ".peers" / "site", metavar="DIR")
        sub.add_argument("--budget", type=float, default=180.0, help="seconds per impl and point")
        sub.add_argument("--rep", type=float, metavar="MS", help="how long each timing measures")
        sub.add_argument("--commit", help="full SHA, where the tree was copied without its .git")
        sub.add_argument("--out", type=Path, help=f"default: benchmarks/results/{op.name}.jsonl")
        sub.add_argument("--dry-run", action="store_true", help="tiny, CPU; writes only with --out")
    sub = commands.add_parser("table", help="rows of one run as a markdown table")
    sub.add_argument("file", type=Path)
    sub.add_argument("--run", help="default: the newest in the file")
    sub.add_argument("--over", help="the implementation that ratios are taken over")
    sub.add_argument("--show", choices=table.CELLS, default="time")
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


def _describe(row: Row) -> str:
    where = f"{row['impl']:24} {row['shape']} T={row['T']} {row['dtype']} {row['pass']}"
    where += "" if row["R"] is None else f" R={row['R']}"
    if "skipped" in row:
        return f"{where}: skipped, {row['skipped']}"
    rate = "" if row["tflops"] is None else f" {row['tflops']:.1f} TFLOP/s"
    return f"{where}: {row['median_ms']:.4g} ms{rate} rel_err {row['rel_err']:.1e}"


def bench(args: argparse.Namespace) -> None:
    """Run one op and append its rows as they come.

    Raises:
        RowError: the commit is unknown or a row is not valid.
    """
    op = OPS[args.command]
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    shapes, settings, out = args.shapes, Settings(), args.out
    if args.dry_run:
        device, shapes, settings = "cpu", ("tiny",), DRY_SETTINGS
    elif out is None:
        out = ROOT / "benchmarks" / "results" / f"{op.name}.jsonl"
    if args.rep is not None:
        settings = dataclasses.replace(settings, rep_ms=args.rep)
    plan = runner.Plan(
        op=op,
        impls=tuple(op.impl(name) for name in args.impls or op.names()),
        points=runner.grid(op, device, shapes, args.tokens, args.passes, args.dtype, args.ranks),
        device=device,
        peers=args.peers.resolve(),
        budget_s=args.budget,
        settings=settings,
    )
    run, date = rows.new_run()
    where = {"run": run, "date": date, "commit": _commit(args.commit), **rows.machine(device)}
    for row in runner.execute(plan, where):
        print(_describe(row), file=sys.stderr, flush=True)
        if out is not None:
            rows.append_rows(out, [row])
    print(f"run {run}: {'nothing written (dry run)' if out is None else f'rows in {out}'}")


def main(argv: list[str] | None = None) -> int:
    """Exit status 0, or 1 with one line on stderr."""
    args = parser().parse_args(argv)
    try:
        if args.command == "child":
            child.main(args.job)
        elif args.command == "table":
            chosen = table.of_run(rows.read_rows(args.file), args.run)
            print(table.markdown(chosen, args.over, args.show))
        else:
            bench(args)
    except (RowError, OSError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
