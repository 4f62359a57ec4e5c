"""``verify --adapter DIR``: compare base and adapter with a merged checkpoint or an export."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_patch.cli import adapted, models
from moe_patch.cli.output import print_json, print_table, quiet_libraries
from moe_patch.cli.status import CHECK_FAILED
from moe_patch.errors import UnsupportedOptionError

# Largest relative error of logits in fp32 between two models with equal weights.
LOGITS = 1e-3


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
    packed = any(one.storage != "plain" for one in found)
    logits = None if args.no_logits or packed else _logits(args, config, folder, adapter, merged)
    passed = not failed and (logits is None or logits["merged"] <= LOGITS)
    return {"result": args.merged, "passed": passed, **_summary(found), "logits": logits}


def _exported(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from moe_patch.serving.adapter import read_adapter
    from moe_patch.serving.checkpoint import Checkpoint
    from moe_patch.serving.read_back import exported
    from moe_patch.tools.base_identity import check_base

    check_base(args.adapter, folder)
    _, plain = adapted.plain_model(folder, args.adapter)
    adapter = read_adapter(args.adapter, plain)
    found = list(exported(adapter, Checkpoint(folder), args.exported))
    passed = all(one.passed for one in found)
    return {"result": args.exported, "passed": passed, **_summary(found), "logits": None}


def _summary(found: list[Any]) -> dict[str, Any]:
    return {
        "weights": len(found),
        "worst_ulps": max((one.ulps for one in found), default=0.0),
        "least_share": min((one.share for one in found), default=1.0),
        "failed": [asdict(one) for one in found if not one.passed],
    }


def _logits(
    args: argparse.Namespace, config: Any, folder: Path, adapter: Any, merged: Any
) -> dict[str, float]:
    """Return relative errors of logits in fp32.

    Returns:
        ``merged``: the result against PEFT's merge, whose changed weights are rounded to the
        result's dtypes. ``rounding``: the result against the unmerged adapter. ``adapter``: the
        base against the unmerged adapter, for scale.
    """
    from peft import PeftModel

    device = models.device_of(args)
    with _quiet():
        model = models.load(str(folder), config, torch.float32, device)
        ids = _ids(model, args)
        plain = _run(model, ids)
        wrapped = PeftModel.from_pretrained(model, args.adapter).eval()
        unmerged = _run(wrapped, ids)
        model = wrapped.merge_and_unload()
        _round(model, adapter, merged)
        expected = _run(model, ids)
        del model, wrapped
        again = models.load_config(args.merged)
        found = _run(models.load(args.merged, again, torch.float32, device), ids)
    return {
        "merged": _relative(found, expected),
        "rounding": _relative(found, unmerged),
        "adapter": _relative(plain, unmerged),
    }


def _round(model: Any, adapter: Any, merged: Any) -> None:
    from moe_patch.serving.names import units_of

    units = units_of(adapter.plain, merged.entries)
    named = dict(model.named_parameters())
    for name in adapter.changes:
        if name in units and name in named:
            dtype = merged.entries[units[name].sources[0]].parts[0].dtype
            named[name].data = named[name].data.to(dtype).float()


@contextmanager
def _quiet() -> Iterator[None]:
    with quiet_libraries(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _ids(model: Any, args: argparse.Namespace) -> Tensor:
    generator = torch.Generator().manual_seed(args.seed)
    with models.explained("MODEL takes no token ids (--no-logits compares only the weights)"):
        vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (args.batch, args.length), generator=generator)
    return ids.to(model.device)


@torch.no_grad()
def _run(model: Any, ids: Tensor) -> Tensor:
    with models.explained(
        "MODEL cannot run on token ids alone (--no-logits compares only the weights)"
    ):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.double().cpu()


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


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
    if result["logits"]:
        one = result["logits"]
        print(
            f"logits: relative error {one['merged']:.1e} against PEFT's merge (limit "
            f"{LOGITS:.0e}) and {one['rounding']:.1e} against the unmerged adapter; the base "
            f"alone differs by {one['adapter']:.1e}"
        )
    print(
        "the result is the base plus the adapter"
        if result["passed"]
        else "the result is NOT the base plus the adapter"
    )
