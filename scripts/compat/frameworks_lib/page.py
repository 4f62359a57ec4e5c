"""The generated table of docs/frameworks.md: the newest row of each run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

START, END = "<!-- generated: scripts/compat/frameworks.py -->", "<!-- end of generated -->"
HEAD = (
    "framework", "transformers", "PEFT", "torch", "Python", "family", "mode", "result",
    "largest relative difference of a loss", "loss moved by",
    "our kernels ran", "adapter in plain PEFT", "commit", "note",
)  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """The Markdown table of the newest rows, by framework, family and mode."""
    names = ("framework", "version", "transformers", "family", "mode")
    newest = {tuple(row[name] for name in names): row for row in rows}
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for key in sorted(newest):
        row = newest[key]
        said = {True: "yes", False: "no", None: ""}
        rel, moved = row["losses_max_rel"], row["loss_moved"]
        cells = (
            f"{row['framework']} {row['version']}", row["transformers"], row["peft"], row["torch"],
            row["python"], row["family"], row["mode"], row["result"],
            "" if rel is None else f"{rel:.1e}",
            "" if moved is None else f"{moved:.0%}",
            said[row["traced"]], said[row["adapter_loads"]], row["commit"],
            row.get("note", "").replace("|", "\\|"),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page(rows: Path, path: Path, write: bool) -> int:
    """Compare the page's table with the rows, or write it; return 1 if it is outdated."""
    made = table([json.loads(line) for line in rows.read_text().splitlines()])
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    after = rest.partition(END)[2]
    new = f"{before}{START}\n\n{made}\n\n{END}{after}"
    if write:
        path.write_text(new, encoding="utf-8")
    elif new != text:
        print(f"{path}: not current; python scripts/compat/frameworks.py --table --write")
        return 1
    return 0
