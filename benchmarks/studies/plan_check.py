"""Compare the rows of plan_rows.py with the formula as it is now; no card is needed.

    python benchmarks/studies/plan_check.py

A row keeps the plan of its own commit. This plans each again, and prints by how many percent the
plan is above what the card allocated and reserved. Status 1 beyond 5 and 10 percent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plan_rows import GIB, RECIPES, Setting, prepare, recipe_of

from moe_patch.config import COMPUTES  # after plan_rows, which puts the package on the path

HERE = Path(__file__).resolve()
ROWS = HERE.parents[1] / "results" / "plan_memory.jsonl"
ALLOCATED, RESERVED = 0.05, 0.10


def setting_of(row: dict[str, Any]) -> Setting:
    """Return the setting of a row; storages of Linear modules and adapters are in its words."""
    words = row["recipe"].replace("Linear modules in", "Linear in")
    computes = [one for one in COMPUTES if f"(compute: {one})" in words]
    capped = "under a cap" in words  # a file of configs/, and all of them have the same targets
    return Setting(
        row["model"], row["layers"], row["storage"], row["tokens"], row["rank"] or 0,
        row["optimizer"], row["checkpointing"], row["liger"], row["full"],
        linear="nf4" if "Linear in nf4" in words else "bf16",
        embedding="nf4" if "embedding in nf4" in words else "bf16",
        adapters="bf16" if "bf16 adapters" in words or "adapters in bf16" in words else "fp32",
        attention="flex_attention" if "flex_attention" in words else None,
        config=next(iter(RECIPES)) if capped else None, offload=row["offload"],
        compute=computes[0] if computes else "decoded",
    )  # fmt: skip


def compared(rows: list[dict[str, Any]]) -> Iterator[tuple[str, float, float]]:
    """Yield a row's name, and the plan over what was allocated and over what was reserved."""
    from moe_patch.tools.plan_total import make_plan

    sizes: dict[Any, Any] = {}
    for row in rows:
        one = setting_of(row)
        key = one.model, one.layers, one.full, one.attention, one.config
        if key not in sizes:
            sizes[key] = prepare(one, small=False)[1]
        plan = make_plan(sizes[key], recipe_of(one, hopper=True))
        yield (
            f"{one.model}, {one.layers} layers, {one.tokens} tokens: {row['recipe']}",
            plan.allocated / GIB / row["allocated_gib"] - 1,
            plan.reserved / GIB / row["reserved_gib"] - 1,
        )


def main() -> int:
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    status = 0
    for name, allocated, reserved in compared(rows):
        print(f"{allocated:+.1%} {reserved:+.1%}  {name}")
        status |= abs(allocated) > ALLOCATED or abs(reserved) > RESERVED
    return status


if __name__ == "__main__":
    sys.exit(main())
