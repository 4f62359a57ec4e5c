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
        help="write an adapter in the layout that vLLM, SGLang or another PEFT reads",
        description=f"The layouts are those of {releases}, and PEFT's own of 0.18 and 0.19. An "
        "architecture whose experts the release loads no adapter for is refused; merge is the way "
        "on.",
    )
    adapted.add_adapter(parser)
    parser.add_argument("--to", choices=(*ENGINES, PEFT), required=True, help="the reader")
    parser.add_argument("--release", metavar="X.Y", help="of PEFT; default: the installed one")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder to make")
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
