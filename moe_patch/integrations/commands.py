"""Run a Python command in this process, with one more callback among Trainer's defaults.

Give a command as in a shell, with its arguments: an installed console command, ``-m MODULE``, or
the path of a script.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from accelerate.commands import launch
from transformers import trainer

from moe_patch.errors import UnsupportedOptionError
from moe_patch.integrations.ms_swift import PLUGIN
from moe_patch.integrations.trainer import MoePatchCallback
from moe_patch.patching.report import patch_report


class RunCallback(MoePatchCallback):
    """Patches every Trainer's model and keeps a line on each of them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lines: dict[int, str] = {}

    def _patch(self, model: Any) -> None:
        super()._patch(model)
        if patch_report(model).patched:
            self.lines[id(model)] = self.said


class Handover:
    """Makes accelerate's launcher start ``moe-patch run`` in the new processes."""

    def __init__(self, options: Sequence[str]) -> None:
        self.options = list(options)
        self.happened = False

    def __call__(self, args: Any) -> Any:
        """Replace ``accelerate.commands.launch.launch_command``."""
        if not args.no_python:
            command = [args.training_script, *args.training_script_args]
            command = ["-m", *command] if args.module else command
            args.training_script, args.module = "moe_patch", True
            args.training_script_args = ["run", *self.options, "--", *command]
            self.happened = True
        return _LAUNCH(args)


_LAUNCH = launch.launch_command


@contextmanager
def switched_on(callback: RunCallback, handover: Handover) -> Iterator[None]:
    """Add the callback to Trainer's default ones, and the handover to accelerate's launcher."""
    defaults = trainer.DEFAULT_CALLBACKS
    defaults.append(callback)
    launch.launch_command = handover
    try:
        yield
    finally:
        # Remove it from this list: a command may have assigned another list in the meantime.
        defaults.remove(callback)
        launch.launch_command = _LAUNCH


@contextmanager
def arguments(argv: Sequence[str], folder: str) -> Iterator[None]:
    """Set ``sys.argv`` and the command's folder as the interpreter would; then restore them."""
    before = sys.argv, sys.path[:]
    sys.argv = list(argv)
    if not sys.flags.safe_path:
        sys.path[0] = folder
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before


def prepare(command: Sequence[str]) -> Callable[[], Any]:
    """Return a function that runs a command and returns what it would pass to ``sys.exit``.

    Raises:
        UnsupportedOptionError: there is no such module, script or Python console command.
    """
    name, *rest = command
    if name == "-m":
        if not rest:
            raise UnsupportedOptionError("run: -m needs a module name")
        return lambda: _module(rest[0], rest[1:])
    if Path(name).is_file() and (name.endswith(".py") or "/" in name):
        return lambda: _script(name, rest)
    entry = _console_command(name)
    if entry.value == "swift.cli.main:cli_main" and rest:
        return _swift(rest[0], rest[1:])
    return lambda: _entry_point(entry, rest)


def _module(name: str, rest: Sequence[str]) -> None:
    with arguments(["-m", *rest], str(Path.cwd())):
        runpy.run_module(name, run_name="__main__", alter_sys=True)


def _script(path: str, rest: Sequence[str]) -> None:
    with arguments([path, *rest], str(Path(path).resolve().parent)):
        runpy.run_path(path, run_name="__main__")


def _entry_point(entry: metadata.EntryPoint, rest: Sequence[str]) -> Any:
    folder = sysconfig.get_path("scripts")
    with arguments([str(Path(folder) / entry.name), *rest], folder):
        return entry.load()()


def _swift(method: str, rest: list[str]) -> Callable[[], Any]:
    """Run ms-swift's command here, not in the process that it would start for the script.

    Raises:
        UnsupportedOptionError: it would start several processes.
    """
    from swift.cli import main as swift

    if "RANK" not in os.environ and swift.use_torchrun():
        raise UnsupportedOptionError(
            "run: NPROC_PER_NODE and NNODES make swift start torchrun; use ms-swift's plugin, "
            f"which every process loads: --external_plugins {PLUGIN} --callbacks moe_patch"
        )
    swift.parse_yaml_args(rest)
    # This import replaces the list of default callbacks, so it must run before we add ours.
    importlib.import_module("swift.trainers.patcher")
    return lambda: _module(swift.ROUTE_MAPPING[method.replace("_", "-")], rest)


def _console_command(name: str) -> metadata.EntryPoint:
    found = {
        entry.value: entry for entry in metadata.entry_points(group="console_scripts", name=name)
    }
    if len(found) != 1:
        several = f"several Python console commands {name!r}: {', '.join(sorted(found))}"
        raise UnsupportedOptionError(
            f"run: {sys.prefix} has {several if found else f'no Python console command {name!r}'}; "
            "accepted: a console command of this environment, -m MODULE, or a script.py that exists"
        )
    return next(iter(found.values()))
