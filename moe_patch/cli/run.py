"""``run -- COMMAND ...``: run a training command built on Trainer, with its model patched."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from moe_patch.cli.output import complain
from moe_patch.cli.status import CHECK_FAILED, PROGRAM, UNUSABLE
from moe_patch.config import PatchConfig
from moe_patch.errors import MoePatchError, UnsupportedOptionError

NAME = "run"
NOTHING = (
    "nothing was patched: COMMAND built no transformers Trainer in this process; if it starts "
    "processes of its own, run moe-patch in each of them: "
    "accelerate launch -m moe_patch run -- SCRIPT ..."
)


def add(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        NAME,
        help="run another training command with its model patched",
        usage=f"{PROGRAM} {NAME} [--set KEY=VALUE] -- COMMAND ...",
        description="Run COMMAND (a Python console command of this environment, -m MODULE, or a "
        "script.py) in this process, with MoePatchCallback among the default callbacks of "
        "transformers' Trainer and nothing else changed. The last line says what was patched.",
        epilog="Exit status: that of COMMAND; 1 if it succeeds and nothing was patched.",
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="an option of the patch, for example recompute=true (repeatable)",
    )


def run(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    """Run ``run ...``; errors of COMMAND pass through, apart from SystemExit."""
    from moe_patch.train.text_file import parse_settings

    own, command = _split(argv)
    args = parser.parse_args(own)
    try:
        config = PatchConfig.parse(parse_settings(args.set))
        if not command:
            raise UnsupportedOptionError(f"{NAME}: expected -- COMMAND ...; see --help")
        import moe_patch.integrations.transformers  # noqa: F401
        from moe_patch.integrations import commands

        start = commands.prepare(command)
    except MoePatchError as error:
        complain(str(error))
        return UNUSABLE
    callback = commands.RunCallback(config)
    handover = commands.Handover([part for item in args.set for part in ("--set", item)])
    code: Any = None
    try:
        with commands.switched_on(callback, handover):
            code = start()
    except SystemExit as stop:
        code = stop.code
    finally:
        _say(callback.lines, handover.happened)
    if not code:
        return 0 if callback.lines or handover.happened else CHECK_FAILED
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)  # as the interpreter does
    return 1


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments at the first ``--``."""
    argv = list(argv)
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], argv[place + 1 :]


def _say(lines: dict[int, str], handed_over: bool) -> None:
    """Print the last line, unless a launcher's processes have printed theirs."""
    from moe_patch.integrations.announce import on_first_rank

    if on_first_rank() and (lines or not handed_over):
        said = "; ".join(dict.fromkeys(lines.values())) or NOTHING
        print(f"{PROGRAM} {NAME}: {said}", file=sys.stderr)
