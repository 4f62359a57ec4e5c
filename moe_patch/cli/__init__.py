"""The command line: ``moe-patch`` and ``python -m moe_patch``.

Exit status:
    0    done
    1    the command finished, but a check failed or a model is refused (its results are kept)
    2    the command line, configuration, a file, the data or the model cannot be used;
         one line on stderr says why; nothing was trained and nothing is left on disk
    130  interrupted

A subcommand is one module of this package. Its ``add`` adds its parser, whose default ``command``
is the function that runs it. With ``--json`` stdout holds one JSON document and nothing else.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch

from moe_patch._version import __version__
from moe_patch.cli import (
    bench,
    export,
    families,
    inspect,
    merge,
    plan,
    replay,
    run,
    selftest,
    train,
    verify,
    warmup,
)
from moe_patch.cli.limits import cpu_memory_named
from moe_patch.cli.output import Parser, complain
from moe_patch.cli.status import CHECK_FAILED, INTERRUPTED, PROGRAM, UNUSABLE
from moe_patch.errors import MoePatchError, first_line

__all__ = ["CHECK_FAILED", "INTERRUPTED", "SUBCOMMANDS", "UNUSABLE", "main", "make_parser"]

SUBCOMMANDS = (
    families,
    inspect,
    plan,
    verify,
    selftest,
    warmup,
    bench,
    train,
    run,
    replay,
    merge,
    export,
)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; each subcommand sets ``command``, a function of the arguments."""
    parser = Parser(
        prog=PROGRAM,
        description="Patch the MoE blocks of Hugging Face models in place.",
        epilog="Exit status: 0 done; 1 a check failed or a model is refused; 2 an input cannot be "
        "used (one line on stderr says what to do); 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND")
    for command in SUBCOMMANDS:
        command.add(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = make_parser()
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == run.NAME:
        return run.run(parser, argv)
    try:
        status = bench.forward_to_script(argv)
        if status is not None:
            return status
        args = parser.parse_args(argv)
        if "command" not in args:
            parser.print_help()
            return 0
        with cpu_memory_named():
            return args.command(args)
    except MoePatchError as error:
        complain(str(error))
        return UNUSABLE
    except torch.OutOfMemoryError as error:
        complain(f"{first_line(error).rstrip('.')}. Use fewer tokens or layers, or another --dtype")
        return UNUSABLE
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) closed the pipe. Redirect stdout, or its flush at exit would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
