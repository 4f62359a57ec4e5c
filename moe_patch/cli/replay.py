"""``replay FILE``: run a call that ``debug_nan`` has written again, on both paths."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from moe_patch.cli.output import add_json, print_json, progress


def add(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "replay",
        help="run a file of debug_nan on moe_patch and on transformers",
        description="With `debug_nan: true` the call of the first block with a non-finite output "
        "is written to a file. This runs it again on both paths and says which tokens, experts "
        "and parameters are not finite.",
    )
    parser.add_argument("file", metavar="FILE", help="the file")
    parser.add_argument("--device", help="cuda, cuda:1, cpu; default: cuda if available")
    parser.add_argument(
        "--backend", choices=("auto", "torch", "triton"), help="default: the file's"
    )
    add_json(parser)
    parser.set_defaults(command=command)


def command(args: argparse.Namespace) -> int:
    """Run the call and print what was found."""
    from moe_patch.cli.models import device_of
    from moe_patch.tools.replay import replay_file

    with progress(1, "running both paths"):
        result = replay_file(args.file, str(device_of(args)), args.backend)
    if args.json:
        print_json(asdict(result))
    else:
        print(result)
    return 0
