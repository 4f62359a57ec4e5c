"""``verify --adapter DIR``: compare base and adapter with a merged checkpoint or an export."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_patch.cli import adapted, adapter_logits
from moe_patch.cli.output import print_json, print_table
from moe_patch.cli.status import CHECK_FAILED
from moe_patch.errors import UnsupportedOptionError

# Largest relative errors of logits in fp32: of a merge against PEFT's with equal rounding, and of
# an export against PEFT's adapter.
LOGITS = {"merged": 1e-3, "exported": 1e-5}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``verify --adapter``; here the base is MODEL."""
    group = parser.add_argument_group("after training")
    group.add_argument(
        "--adapter", metavar="DIR", help="adapter whose base is MODEL; compare both with one of:"
    )
    group.add_argument("--merged", metavar="DIR", help="the checkpoint that merge wrote")
    group.add_argument("--exported", metavar="DIR", help="the adapter that export wrote")
    group.add_argument(
        "--no-logits", action="store_true", help="compare only the weights, without loading a model"
    )


def command(args: argparse.Namespace) -> int:
    """Compare and print; return status 1 if a check fails."""
    if (args.merged is None) == (args.exported is None):
        raise UnsupportedOptionError(
            "verify --adapter: accepted: exactly one of --merged DIR and --exported DIR"
        )
    folder = adapted.base_folder(args.adapter, args.model)
    result = _merged(args, folder) if args.merged else _exported(args, folder)
    result = {"adapter": args.adapter, "base": str(folder), **result}
    if args.json:
        print_json(result)
    else:
        _print(result)
    return 0 if result["passed"] else CHECK_FAILED


def _merged(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from moe_patch.serving.adapter import read_adapter
    from moe_patch.serving.checkpoint import Checkpoint
    from moe_patch.serving.proof import weights
    from moe_patch.tools.base_identity import check_base

    check_base(args.adapter, folder)
    config, plain = adapted.plain_model(folder, args.adapter)
    adapter = read_adapter(args.adapter, plain)
    base, merged = Checkpoint(folder), Checkpoint(args.merged)
    found = list(weights(adapter, base, merged))
    failed = [one for one in found if not one.passed]
    logits = None
    if not args.no_logits:
        logits = adapter_logits.of_merged(args, config, folder, adapter, merged)
    passed = not failed and _agree(logits)
    return {"result": args.merged, "passed": passed, **_summary(found), "logits": logits}


def _exported(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from moe_patch.serving.adapter import read_adapter
    from moe_patch.serving.checkpoint import Checkpoint
    from moe_patch.serving.read_back import exported
    from moe_patch.tools.base_identity import check_base

    check_base(args.adapter, folder)
    config, plain = adapted.plain_model(folder, args.adapter)
    adapter, base = read_adapter(args.adapter, plain), Checkpoint(folder)
    found = list(exported(adapter, base, args.exported))
    logits = None
    if not args.no_logits:
        logits = adapter_logits.of_exported(args, config, folder, adapter, base)
    passed = all(one.passed for one in found) and _agree(logits)
    return {"result": args.exported, "passed": passed, **_summary(found), "logits": logits}


def _agree(logits: dict[str, float] | None) -> bool:
    found = logits or {}
    return all(found[key] <= limit for key, limit in LOGITS.items() if key in found)


def _summary(found: list[Any]) -> dict[str, Any]:
    return {
        "weights": len(found),
        "worst_ulps": max((one.ulps for one in found), default=0.0),
        "least_share": min((one.share for one in found), default=1.0),
        "failed": [asdict(one) for one in found if not one.passed],
    }


def _print(result: dict[str, Any]) -> None:
    if result["failed"]:
        print_table(
            ("weight", "error in ulps", "share of the delta", "relative error"),
            [
                (one["name"], f"{one['ulps']:.1f}", f"{one['share']:.3f}", f"{one['error']:.1e}")
                for one in result["failed"][:20]
            ],
        )
    print(
        f"{result['result']}: {result['weights']} weights and experts compared, "
        f"{len(result['failed'])} wrong; largest error {result['worst_ulps']:.2f} ulps"
    )
    _print_logits(result["logits"])
    print(
        "the result is the base plus the adapter"
        if result["passed"]
        else "the result is NOT the base plus the adapter"
    )


def _print_logits(one: dict[str, float] | None) -> None:
    if one is None:
        return
    base = f"the base alone differs by {one['adapter']:.1e}"
    if "merged" in one:
        print(
            f"logits: relative error {one['merged']:.1e} against PEFT's merge (limit "
            f"{LOGITS['merged']:.0e}) and {one['rounding']:.1e} against the unmerged adapter; "
            f"{base}"
        )
    else:
        print(
            f"logits: relative error {one['exported']:.1e} against PEFT's adapter (limit "
            f"{LOGITS['exported']:.0e}); {base}"
        )
