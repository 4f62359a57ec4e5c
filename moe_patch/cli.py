"""The command line: ``moe-patch`` and ``python -m moe_patch``.

Exit status:
    0    done
    1    the run finished, but one of its checks failed (its results are kept)
    2    the command line, the configuration, a file, the data or the model cannot be used;
         one line on stderr says what, nothing was trained and nothing is left on the disk
    130  interrupted
A subcommand is a function that adds its parser and a function that runs it; see SUBCOMMANDS.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from moe_patch._version import __version__
from moe_patch.errors import MoePatchError

CHECK_FAILED = 1
UNUSABLE = 2
INTERRUPTED = 130


def _add_train(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        help="fine-tune a model as a YAML file says, patched, and check the result",
        description="Train with transformers' Trainer and PEFT as CONFIG says (see "
        "configs/quickstart.yaml), with `moe_patch: true` or a mapping of options in it.",
    )
    parser.add_argument("config", metavar="CONFIG", help="the YAML file")
    parser.add_argument("--output-dir", metavar="DIR", help="in place of the file's output_dir")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the results of an earlier run there"
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="put a value over the file's, for example training.max_steps=3 (repeatable)",
    )
    parser.set_defaults(command=_train)


def _train(args: argparse.Namespace) -> int:
    from moe_patch.train.config import load_config

    config = load_config(args.config, _overrides(args))
    # After the file was read: a typing error should not wait for transformers to be imported.
    from moe_patch.train.run import run

    result = run(config, overwrite=args.overwrite)
    if result.failed:
        print(f"moe_patch: failed: {'; '.join(map(str, result.failed))}", file=sys.stderr)
        return CHECK_FAILED
    return 0


def _overrides(args: argparse.Namespace) -> dict[str, Any]:
    from moe_patch.errors import UnsupportedOptionError
    from moe_patch.train.config import parse_yaml

    overrides = {}
    for item in args.set:
        key, equals, value = item.partition("=")
        if not (key and equals):
            raise UnsupportedOptionError(f"--set {item}: expected KEY=VALUE")
        overrides[key] = parse_yaml(value, f"--set {key}")
    if args.output_dir is not None:
        overrides["output_dir"] = args.output_dir
    return overrides


SUBCOMMANDS: tuple[Callable[[Any], None], ...] = (_add_train,)


def make_parser() -> argparse.ArgumentParser:
    """The parser with every subcommand; each sets ``command``, a function of the arguments."""
    parser = argparse.ArgumentParser(
        prog="moe_patch", description="Patch the MoE blocks of Hugging Face models in place."
    )
    parser.add_argument("--version", action="version", version=f"moe_patch {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND")
    for add in SUBCOMMANDS:
        add(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if "command" not in args:
        parser.print_help()
        return 0
    try:
        return args.command(args)
    except MoePatchError as error:
        print(f"moe_patch: error: {' '.join(str(error).split())}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        print("moe_patch: interrupted", file=sys.stderr)
        return INTERRUPTED
