"""``export ADAPTER --to vllm|sglang|peft``: write an adapter in another program's layout."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from moe_patch.cli import adapted
from moe_patch.cli.output import add_json, print_json

PEFT = "peft"


def add(subparsers: Any) -> None:
    """Add the parser of ``export``."""
    from moe_patch.serving.engines import ENGINES

    releases = ", ".join(one.release for one in ENGINES.values())
    parser = subparsers.add_parser(
        "export",
        help="write an adapter in the layout of vLLM, SGLang or another release of PEFT",
        description=f"Layouts: {releases}, and those of PEFT 0.18 and 0.19. An architecture is "
        "refused if the release cannot load adapters on its experts; use merge instead.",
    )
    adapted.add_adapter(parser)
    parser.add_argument(
        "--to", choices=(*ENGINES, PEFT), required=True, help="program that will load the adapter"
    )
    parser.add_argument(
        "--release",
        metavar="X.Y",
        help="release of PEFT, with --to peft; default: the installed one",
    )
    parser.add_argument("--out", metavar="DIR", required=True, help="folder to create")
    add_json(parser)
    parser.set_defaults(command=command)


def command(args: argparse.Namespace) -> int:
    """Export and print the result."""
    from moe_patch.serving.adapter import read_adapter
    from moe_patch.serving.checkpoint import Checkpoint
    from moe_patch.serving.engines import ENGINES
    from moe_patch.serving.export import export
    from moe_patch.serving.write import refuse_existing
    from moe_patch.tools.adapter_files import convert_adapter, installed_peft

    out = Path(args.out)
    refuse_existing(out)
    folder = adapted.base_folder(args.adapter, args.base)
    _, plain = adapted.plain_model(folder, args.adapter)
    adapter = read_adapter(args.adapter, plain)
    if args.to == PEFT:
        release = f"PEFT {args.release or installed_peft()}"
        pairs = convert_adapter(plain, args.adapter, out, args.release)
        said = f"{pairs} pairs of factors rewritten for {release}"
    else:
        release = ENGINES[args.to].release
        pairs = export(adapter, Checkpoint(folder), args.to, out)
        said = f"{pairs} pairs of factors for {release}"
    if args.json:
        print_json({"adapter": args.adapter, "out": args.out, "release": release, "pairs": pairs})
    else:
        print(f"{args.out}: {said}")
    return 0
