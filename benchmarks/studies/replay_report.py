#!/usr/bin/env python3
"""Print the table of benchmarks/studies/replay_study.py's rows, and draw them for docs/rl.md.

python benchmarks/studies/replay_report.py
python benchmarks/studies/replay_report.py --draw docs/img/replay_study.svg
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROWS = Path(__file__).resolve().parent / "results" / "replay_study.jsonl"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "rl.md"
MODELS = ("olmoe", "qwen3_moe")
KINDS = {
    "no replay": "0.5", "engine": "C0", "another sample": "C1", "shuffled": "C3",
}  # fmt: skip

Row = dict[str, Any]


def table(rows: list[Row]) -> str:
    """Return a markdown table of the comparisons, one line per model, training and seed."""
    lines = [
        "| model | steps before | seed | routings that differ | choices | KL without replay | with "
        "| factor | ids of another sample | shuffled |",
        "|---" * 10 + "|",
    ]
    compared = [row for row in rows if "kl" in row]
    for row in sorted(compared, key=lambda row: (row["model"], row["steps"], row["seed"])):
        plain, engine, other, shuffled = (row["kl"][kind] for kind in KINDS)
        lines.append(
            f"| {row['model']} | {row['steps']} | {row['seed']} "
            f"| {row['disagreement of routings']:.1%} | {row['disagreement of choices']:.2%} "
            f"| {plain:.1e} | {engine:.1e} | {plain / engine:.1f} | {other:.2f} | {shuffled:.2f} |"
        )
    return "\n".join(lines)


def learning_table(rows: list[Row]) -> str:
    """Return a markdown table of the policy gradient: mean reward and KL of the last 3 updates."""
    lines = ["| model | replay | seeds | reward, first 3 | last 3 | KL, last 3 |", "|---" * 6 + "|"]
    for name in MODELS:
        for replay in (False, True):
            mine = [r["learn"] for r in rows if r["model"] == name and r.get("replay") is replay]
            if not mine:
                continue
            cells = [
                statistics.fmean(value for learn in mine for value in learn[key][part])
                for key, part in (
                    ("reward", slice(3)), ("reward", slice(-3, None)), ("kl", slice(-3, None)),
                )
            ]  # fmt: skip
            lines.append(
                f"| {name} | {'yes' if replay else 'no'} | {len(mine)} "
                f"| {cells[0]:.3f} | {cells[1]:.3f} | {cells[2]:.1e} |"
            )
    return "\n".join(lines)


def write(rows: list[Row], path: Path = PAGE) -> None:
    """Write both tables between their markers in docs/rl.md."""
    text = path.read_text(encoding="utf-8")
    for name, made in (("replay table", table(rows)), ("replay learning", learning_table(rows))):
        before, rest = text.split(f"<!-- {name} -->")
        after = rest.split(f"<!-- end of {name} -->")[1]
        text = f"{before}<!-- {name} -->\n\n{made}\n\n<!-- end of {name} -->{after}"
    path.write_text(text, encoding="utf-8")


def draw(rows: list[Row], path: Path) -> None:
    """Draw KL by trace for each model, and KL and reward over the updates."""
    import matplotlib
    from matplotlib.figure import Figure

    changed = {"svg.hashsalt": "moe_patch", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(changed):
        figure = Figure(figsize=(9, 5), layout="constrained")
        panels = figure.subplots(2, 3)
        for name, (by_trace, kl, reward) in zip(MODELS, panels, strict=True):
            mine = [row for row in rows if row["model"] == name]
            _draw_traces(by_trace, name, [row for row in mine if "kl" in row])
            for axes, key in ((kl, "kl"), (reward, "reward")):
                for row in mine:
                    if "learn" in row:
                        color = KINDS["engine" if row["replay"] else "no replay"]
                        axes.plot(row["learn"][key], color=color, linewidth=1)
                title = "KL, blue: replay" if key == "kl" else "reward"
                axes.set(title=f"{name}: {title}", xlabel="update")
                axes.set_yscale("log" if key == "kl" else "linear")
                axes.minorticks_off()
                axes.grid(alpha=0.3)
        figure.savefig(path, metadata={"Date": None})


def _draw_traces(axes: Any, name: str, rows: list[Row]) -> None:
    for place, (kind, color) in enumerate(KINDS.items()):
        for row in rows:
            marker = "o" if row["steps"] == 0 else "x"
            axes.plot(row["kl"][kind], place, marker, color=color, markersize=4)
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_yticks(range(len(KINDS)), list(KINDS))
    axes.invert_yaxis()
    axes.set(title=f"{name}: KL (x: trained)", xlabel="nats per token")
    axes.grid(alpha=0.3)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line described at the top of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--write", action="store_true", help="the tables of docs/rl.md")
    parser.add_argument("--draw", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    rows = [json.loads(line) for line in args.rows.read_text(encoding="utf-8").splitlines()]
    print(f"{table(rows)}\n\n{learning_table(rows)}")
    if args.write:
        write(rows)
    if args.draw is not None:
        draw(rows, args.draw)


if __name__ == "__main__":
    main()
