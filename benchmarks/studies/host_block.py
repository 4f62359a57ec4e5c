#!/usr/bin/env python3
"""Measure the host time of one Qwen3-MoE block, router and experts, forward and backward, by part.

    python benchmarks/studies/host_block.py --device cuda --against ../older --json host.json
    PYTHONPATH=FOLDER_OF_A_TRITON python benchmarks/studies/host_block.py --device stub

On a card the block is one of Qwen3-30B and few tokens are routed, so that the host never waits for
the card. A time ends when the call returns. ``stub`` needs no card but an importable, supported
Triton. Kernels are compiled for Hopper and not launched, the block is tiny, and times are of the
thread's processor. Only patched variants make sense there.

Each tree has its own process (host_block_child.py); they measure in turn, never at once. Parts of
the ladder exclude the parts inside them, and their sum exceeds a pass, because watching a part
costs half a microsecond. Calls are of Python and C functions, and the same every time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

CHILD = Path(__file__).resolve().with_name("host_block_child.py")
HERE = CHILD.parents[2]
PATCHED = ("patched", "patched lora")
VARIANTS = (*PATCHED, "grouped_mm", "grouped_mm lora", "eager", "eager lora")


class Tree:
    """A source tree and the process that measures it."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.path = path.resolve()
        git = ["git", "-C", str(self.path), "describe", "--always", "--dirty"]
        self.commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
        self.name = f"{self.path.name} {self.commit}".strip()
        command = [sys.executable, "-W", "ignore", str(CHILD), str(self.path), json.dumps(options)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def ask(self, what: str, variant: str, passes: int = 0) -> Any:
        """Make the process measure, and wait for the result."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([what, variant, passes]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: the process ended, see above")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(trees: list[Tree], variant: str, rounds: int, passes: int) -> list[dict[str, Any]]:
    """Return one row per tree, measured in turn, the order reversed in every other round."""
    calls = [tree.ask("count", variant) for tree in trees]
    times: list[list[float]] = [[] for _ in trees]
    steps: list[list[dict[str, float]]] = [[] for _ in trees]
    for turn in range(rounds):
        for at in sorted(range(len(trees)), reverse=turn % 2 == 1):
            times[at] += trees[at].ask("time", variant, passes)
            steps[at] += trees[at].ask("ladder", variant, passes)
    return [
        {
            "variant": variant, "tree": tree.name, "passes": len(time),
            "least_us": min(time), "median_us": statistics.median(time),
            "python_calls": sum(python for python, _ in call.values()),
            "c_calls": sum(c for _, c in call.values()),
            "parts": {name: part(step, name, call) for name in step[0]},
        }
        for tree, call, time, step in zip(trees, calls, times, steps, strict=True)
    ]  # fmt: skip


def part(steps: list[dict[str, float]], name: str, calls: dict[str, list[int]]) -> dict[str, float]:
    """Return a part's time and calls."""
    found = [step.get(name, 0.0) for step in steps]
    python, c = calls.get(name, (0, 0))
    return {
        "least_us": min(found), "median_us": statistics.median(found), "python_calls": python,
        "c_calls": c,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows of one variant side by side: least and median time, Python and C calls."""
    lines = [f"{rows[0]['variant']}: us least, us median, Python calls, C calls"]
    lines.append(" " * 40 + "".join(f"{row['tree'][:32]:>34}" for row in rows))
    names = dict.fromkeys(name for row in rows for name in row["parts"])
    for name in names:
        lines.append(f"  {name:38}" + "".join(_cells(row["parts"].get(name)) for row in rows))
    lines.append(f"  {'a pass, unwatched':38}" + "".join(_cells(row) for row in rows))
    if len(rows) > 1:
        last = rows[-1]
        ratios = [rows[0][key] / last[key] for key in ("least_us", "median_us", "python_calls")]
        said = "{:.3f} least, {:.3f} median, {:.3f} Python calls".format(*ratios)
        lines.append(f"  {rows[0]['tree']} / {last['tree']}: {said}")
    return "\n".join(lines)


def _cells(found: dict[str, float] | None) -> str:
    if found is None:
        return f"{'-':>34}"
    least, median = found["least_us"], found["median_us"]
    return f"{least:12.1f}{median:9.1f}{found['python_calls']:7}{found['c_calls']:6}"


def main() -> None:
    """Measure every variant and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "stub"), default="cuda")
    parser.add_argument("--tokens", type=int, help="default: 64 on a card, 72 without")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS)
    parser.add_argument(
        "--adapters", choices=("float32", "bfloat16"), default="float32",
        help="dtype of the adapters; PEFT's own choice is float32",
    )  # fmt: skip
    parser.add_argument("--against", type=Path, help="another source tree, measured in turn")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--passes", type=int, default=60, help="of a round, for each measurement")
    parser.add_argument("--profile", action="store_true", help="print the frames that take longest")
    parser.add_argument("--json", type=Path, help="file for the rows")
    args = parser.parse_args()
    card = args.device == "cuda"
    variants = args.variants or (VARIANTS[:4] if card else PATCHED)
    tokens = args.tokens or (64 if card else 72)
    options = {"device": args.device, "tokens": tokens, "adapters": args.adapters}
    paths = [HERE] if args.against is None else [HERE, args.against]
    trees = [Tree(path, options) for path in paths]
    rows = []
    for variant in variants:
        # Two trees differ only in patched variants.
        among = trees if variant.startswith("patched") else trees[:1]
        found = measure(among, variant, args.rounds, args.passes)
        print(table(found), flush=True)
        rows += [options | {"passes_a_round": args.passes} | row for row in found]
        if args.profile:
            print(trees[0].ask("profile", variant, args.passes))
    for tree in trees:
        tree.close()
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
