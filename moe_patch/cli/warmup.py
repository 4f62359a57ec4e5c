"""``warmup MODEL``: compile a model's kernels into Triton's cache, before a job starts."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from moe_patch.cli import models
from moe_patch.cli.limits import check_fits
from moe_patch.cli.output import add_json, print_json, print_table, progress
from moe_patch.cli.selftest import jobs_for, print_trust, trust_on
from moe_patch.cli.status import CHECK_FAILED
from moe_patch.config import COMPUTES
from moe_patch.errors import UnsupportedOptionError
from moe_patch.formats.packed import NAMES


def add(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "warmup",
        help="compile a model's kernels ahead, into Triton's cache on disk",
        description="Run each kind of MoE block of MODEL once per size class, with random weights "
        "at the model's own sizes; no weights are loaded. If there is nothing to compile, the "
        "rows say why.",
    )
    models.add_model(parser)
    parser.add_argument("--tokens", type=int, nargs="+", metavar="T", help="token counts of a call")
    parser.add_argument("--inference", action="store_true", help="no backward kernels")
    parser.add_argument(
        "--lora", type=int, metavar="RANK", help="with adapters of this rank on a frozen model"
    )
    parser.add_argument(
        "--storage", choices=NAMES, help="storage of the experts; default: the checkpoint's"
    )
    parser.add_argument(
        "--compute",
        choices=COMPUTES,
        default="decoded",
        help="option of the patch, for FP8 experts",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="first run `selftest --trust`, to enable the Hopper kernels on an untested Triton",
    )
    add_json(parser)
    parser.set_defaults(command=command)


def command(args: argparse.Namespace) -> int:
    """Compile, and print one row per kind of block."""
    from moe_patch.patching.patch import patch_model
    from moe_patch.tools.on_meta import published_storage
    from moe_patch.tools.warmup import warmup

    if args.tokens is not None and min(args.tokens) < 1:
        raise UnsupportedOptionError(f"--tokens {min(args.tokens)}: at least 1")
    device = models.device_of(args)
    trusted = trust_on(device, jobs_for(device)) if args.trust else None
    with progress(2, "reading the config") as steps:
        config = models.load_config(args.model)
        dtype = models.DTYPES[args.dtype] if args.dtype else models.dtype_of(config)
        steps.step("building on the meta device")
        if args.tokens is not None:
            most = max(args.tokens)
            held = "one column of the tokens"
            check_fits(f"--tokens {most}", most * dtype.itemsize, held, device)
        model = models.build(config, dtype, "meta")
        if args.lora is not None:
            model = models.with_adapters(model, args.lora)
        model = patch_model(model, compute=args.compute)
    rows = warmup(
        model,
        args.tokens,
        training=not args.inference,
        device=device,
        storage=args.storage or published_storage(config),
        progress=sys.stderr.isatty(),
    )
    return _print([row._asdict() for row in rows], trusted, args.json)


def _print(found: list[dict[str, Any]], trusted: Any, as_json: bool) -> int:
    """Print the rows, and what ``--trust`` found; return the status."""
    status = 0 if trusted is None or trusted.passed else CHECK_FAILED
    if as_json:
        print_json(found if trusted is None else {"trust": trusted.as_dict(), "blocks": found})
        return status
    if trusted is not None:
        print_trust(trusted)
    print_table(
        ("first block of its kind", "tokens", "seconds", "skipped"),
        [(r["path"], ", ".join(map(str, r["tokens"])), r["seconds"], r["skipped"]) for r in found],
    )
    return status
