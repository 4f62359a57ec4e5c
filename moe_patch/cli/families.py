"""``families``: list the MoE model types of the installed transformers and their tiers."""

from __future__ import annotations

import argparse
from typing import Any

from moe_patch.cli.output import add_json, print_json, print_table, progress
from moe_patch.runtime.spec import TIERS


def add(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "families",
        help="list the MoE model types of the installed transformers and their tiers",
        description="One row per MoE model type. full: moe_patch runs routing and experts; "
        "experts: it runs the experts; refused: patch_model raises, with the reason.",
    )
    parser.add_argument("--tier", choices=TIERS, help="only this tier")
    add_json(parser)
    parser.set_defaults(command=command)


def command(args: argparse.Namespace) -> int:
    """Print the rows."""
    with progress(1, "reading the families"):
        rows = [row for row in family_rows() if args.tier in (None, row["tier"])]
    if args.json:
        print_json(rows)
        return 0
    print_table(
        ("model type", "tier", "router", "note"),
        [(row["model_type"], row["tier"], ", ".join(row["routers"]), _note(row)) for row in rows],
    )
    counts = {tier: sum(row["tier"] == tier for row in rows) for tier in TIERS}
    import transformers

    print(
        f"\n{len(rows)} MoE model types in transformers {transformers.__version__}: "
        + ", ".join(f"{count} {tier}" for tier, count in counts.items() if count)
    )
    return 0


def family_rows() -> list[dict[str, Any]]:
    """Return one mapping per model type, sorted by it.

    ``model_type`` and ``tier`` are those of :func:`moe_patch.supported_model_types`; ``routers``
    are the routing functions; ``towers`` are the model types inside that hold the experts;
    ``reason`` says why it is refused.
    """
    from moe_patch.families import families, supported_model_types
    from moe_patch.families.installed import moe_model_types

    installed = moe_model_types()
    rows = []
    for name, tier in supported_model_types().items():
        towers = installed[name].towers if name in installed else []
        specs = [s for s in families() if {name, *towers} & set(s.model_types)]
        reasons = [spec.reason for spec in specs if spec.reason]
        if tier == "refused" and not reasons:
            reasons = ["no entry, and transformers' experts registry does not cover its class"]
        rows.append(
            {
                "model_type": name,
                "tier": tier,
                "routers": list(dict.fromkeys(spec.decided_by for spec in specs)),
                "towers": towers,
                "reason": reasons[0] if tier == "refused" else "",
            }
        )
    return rows


def _note(row: dict[str, Any]) -> str:
    inside = ", ".join(tower for tower in row["towers"] if tower != row["model_type"])
    return row["reason"] or (f"experts in {inside}" if inside else "")
