#!/usr/bin/env python3
"""Print and draw the table and chart of benchmarks/studies/smk_study.py's rows for docs/signals.md.

python benchmarks/studies/smk_report.py                                   # prints the table
python benchmarks/studies/smk_report.py --draw docs/img/smk_study.png     # draws the picture too
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    "none": "neither",
    "load_balance": "load balance",
    "surprise": "surprise, parameters",
    "delta_sc": "ΔSC, parameters",
    "surprise_0.1": "surprise, parameters, factor 0.1",
    "delta_sc_0.1": "ΔSC, parameters, factor 0.1",
    "surprise+load_balance": "surprise, parameters, and load balance",
    "delta_sc+load_balance": "ΔSC, parameters, and load balance",
    "surprise_output": "surprise, output",
    "delta_sc_output": "ΔSC, output",
    "surprise_expert": "surprise, expert aggregate",
    "delta_sc_expert": "ΔSC, expert aggregate",
}
CURVES = {
    "none": ("neither", "0.5"),
    "load_balance": ("load balance", "k"),
    "surprise": ("surprise, parameters", "C0"),
    "surprise_output": ("surprise, output", "C3"),
    "surprise_expert": ("surprise, expert", "C1"),
}
PANELS = {
    "smk/gate_accuracy": "gate accuracy (own target)",
    "smk/kl": "KL (own prior, nats)",
    "smk/confidence": "largest routing weight",
    "moe/entropy": "expert entropy",
    "loss": "training loss (nats per token)",
}
WITH_RANGE = ("held-out loss", "gate accuracy")
# Average over the end of training, where a single batch would be noise.
LAST = 10

Row = dict[str, Any]


def of_steps(name: str) -> Callable[[Row], float]:
    """Return a function: the mean of a logged measure over the end of training."""
    return lambda row: statistics.fmean(row["steps"][name][-LAST:])


def of_held_out(name: str) -> Callable[[Row], float]:
    """Return a function: a measure on held-out text."""
    return lambda row: row["held_out"][name]


COLUMNS: dict[str, tuple[Callable[[Row], float], int]] = {
    "held-out loss": (of_held_out("loss"), 3),
    "gate accuracy": (of_steps("smk/gate_accuracy"), 2),
    "KL": (of_steps("smk/kl"), 4),
    "entropy": (of_steps("moe/entropy"), 2),
    "dead": (of_held_out("dead"), 0),
    "largest weight": (of_held_out("confidence"), 2),
    "smallest weight": (of_held_out("last_weight"), 2),
}


def cell(name: str, mine: list[Row]) -> str:
    """Return the mean over seeds, and for some columns the range."""
    read, digits = COLUMNS[name]
    values = [read(row) for row in mine]
    text = f"{statistics.fmean(values):.{digits}f}"
    if name in WITH_RANGE and len(values) > 1:
        text += f" ({min(values):.{digits}f}–{max(values):.{digits}f})"
    return text


def table(rows: list[Row]) -> str:
    """Return a markdown table, one line per variant."""
    lines = [
        "| router loss | seeds | " + " | ".join(COLUMNS) + " |",
        "|---" * (2 + len(COLUMNS)) + "|",
    ]
    for variant, name in NAMES.items():
        mine = [row for row in rows if row["variant"] == variant]
        if not mine:
            continue
        cells = [cell(column, mine) for column in COLUMNS]
        lines.append(f"| {name} | {len(mine)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(content: str) -> None:
    """Write the table between its two markers in docs/signals.md."""
    path = ROOT / "docs" / "signals.md"
    first, second = "<!-- smk table -->", "<!-- end of smk table -->"
    before, rest = path.read_text(encoding="utf-8").split(first)
    after = rest.split(second)[1]
    path.write_text(f"{before}{first}\n\n{content}\n\n{second}{after}", encoding="utf-8")


def draw(rows: list[Row], path: Path) -> None:
    """Draw curves over training, means over the seeds, and held-out loss by seed."""
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(10, 6), layout="constrained", dpi=100)
    panels = figure.subplots(2, 3).flatten()
    for axes, (key, title) in zip(panels, PANELS.items(), strict=False):
        for variant, (name, color) in CURVES.items():
            runs = [row["steps"] for row in rows if row["variant"] == variant]
            if runs:
                mean = [
                    statistics.fmean(values) for values in zip(*(r[key] for r in runs), strict=True)
                ]
                axes.plot(runs[0]["step"], mean, label=name, color=color, linewidth=1.5)
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
    panels[2].axhline(0.25, linestyle="--", linewidth=1, color="0.4")
    _held_out(panels[5], rows)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False
    )
    drawn = io.BytesIO()
    figure.savefig(drawn)
    # Use a few flat colours: a palette needs a quarter of the bytes.
    Image.open(drawn).convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(
        path, optimize=True
    )


def _held_out(axes: Any, rows: list[Row]) -> None:
    shown = [variant for variant in NAMES if any(row["variant"] == variant for row in rows)]
    for place, variant in enumerate(shown):
        losses = [row["held_out"]["loss"] for row in rows if row["variant"] == variant]
        _, color = CURVES.get(variant, ("", "C7"))
        axes.plot(losses, [place] * len(losses), "o", color=color, markersize=4)
    axes.set_yticks(
        range(len(shown)), [NAMES[v].replace(", parameters", "") for v in shown], fontsize=6
    )
    axes.invert_yaxis()
    axes.set(title="held-out loss, by seed")
    axes.grid(alpha=0.3)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line described at the top of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=Path, default=ROOT / "docs" / "data" / "smk_tiny.jsonl")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--draw", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    rows = [json.loads(line) for line in args.rows.read_text(encoding="utf-8").splitlines()]
    print(table(rows))
    if args.write:
        write(table(rows))
    if args.draw is not None:
        draw(rows, args.draw)


if __name__ == "__main__":
    main()
