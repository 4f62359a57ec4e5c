"""``train CONFIG``: fine-tune a model as a YAML file says."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import Any

from moe_patch.cli.output import add_json, print_json
from moe_patch.cli.status import CHECK_FAILED, PROGRAM


def add(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "train",
        help="fine-tune a model as a YAML file says, patched, and check the result",
        description="Train with transformers' Trainer and PEFT as CONFIG says (see "
        "configs/quickstart.yaml), with `moe_patch: true` or a mapping of options in it.",
    )
    parser.add_argument("config", metavar="CONFIG", help="the YAML file")
    parser.add_argument("--output-dir", metavar="DIR", help="replaces the file's output_dir")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the results of an earlier run there"
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="override a value of the file, for example training.max_steps=3 (repeatable)",
    )
    add_json(parser)
    parser.set_defaults(command=command)


def command(args: argparse.Namespace) -> int:
    """Train; return status 1 if a check at the end fails."""
    from moe_patch.train.config import load_config

    config = load_config(args.config, _overrides(args))
    # Import after reading the file: a typing error should not wait for transformers.
    from accelerate import PartialState

    from moe_patch.train.output import MARKER
    from moe_patch.train.run import run

    told = contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext()
    with told:
        result = run(config, overwrite=args.overwrite)
    # After a barrier, a thread of gloo frees tensors of earlier calls, and a process that exits
    # meanwhile aborts. No call comes right before this barrier, so nothing is left to free.
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()
    if args.json:
        summary = json.loads((result.folder / MARKER).read_text(encoding="utf-8"))
        print_json({"folder": str(result.folder), **summary})
    if result.failed:
        print(f"{PROGRAM}: failed: {'; '.join(map(str, result.failed))}", file=sys.stderr)
        return CHECK_FAILED
    return 0


def _overrides(args: argparse.Namespace) -> dict[str, Any]:
    from moe_patch.train.text_file import parse_settings

    overrides = parse_settings(args.set)
    if args.output_dir is not None:
        overrides["output_dir"] = args.output_dir
    return overrides
