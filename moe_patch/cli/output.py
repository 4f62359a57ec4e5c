"""Print tables, JSON, progress and errors for all subcommands.

Tables use rich if it is installed and stdout is a terminal; progress uses tqdm if it is installed
and stderr is a terminal. Both come with transformers. Otherwise the text is plain.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from moe_patch.cli.status import PROGRAM, UNUSABLE


class Parser(argparse.ArgumentParser):
    """Print parser errors in one line, like all other errors; subparsers inherit this."""

    def error(self, message: str) -> NoReturn:
        """Print the error and where to find help, then exit."""
        complain(f"{message}; see {self.prog} --help")
        self.exit(UNUSABLE)


def complain(message: str) -> None:
    """Print a message as one line on stderr."""
    print(f"{PROGRAM}: error: {' '.join(message.split())}", file=sys.stderr)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option --json, which every subcommand has."""
    parser.add_argument("--json", action="store_true", help="print one JSON document, nothing else")


def print_json(value: Any) -> None:
    """Print one JSON document; null replaces NaN and Infinity, which JSON lacks."""
    print(json.dumps(_in_json(value), indent=2, ensure_ascii=False, allow_nan=False))


def _in_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _in_json(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_in_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table on stdout; None becomes an empty cell."""
    cells = [["" if value is None else str(value) for value in row] for row in rows]
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        _rich_table(head, cells)
        return
    lines = [list(head), *cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        print("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())


def _rich_table(head: Sequence[str], cells: list[list[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in head:
        # A narrow terminal may break cells, but not the words of a heading.
        table.add_column(name, min_width=max(map(len, name.split()), default=0), overflow="fold")
    for row in cells:
        # Text disables markup: rich would read a path such as layers[0] as markup.
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


class Progress:
    """Named steps of a command, shown on a terminal while they run."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def step(self, what: str) -> None:
        """Begin the next step."""
        if self._bar is not None:
            self._bar.set_description_str(what)
            self._bar.update()


@contextmanager
def progress(steps: int, what: str) -> Iterator[Progress]:
    """Show a bar of ``steps`` if stderr is a terminal and tqdm is installed, else nothing."""
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        yield Progress(None)
        return
    from tqdm.auto import tqdm

    form = "{desc}: {n_fmt}/{total_fmt} [{elapsed}]"
    with tqdm(total=steps, desc=what, bar_format=form, leave=False, file=sys.stderr) as bar:
        yield Progress(bar)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Show only errors of other libraries, and their progress only on a terminal."""
    # The first import of this module sets its logger's level.
    from transformers.utils import logging as library

    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    hidden = library.is_progress_bar_enabled() and not sys.stderr.isatty()
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        if hidden:
            library.disable_progress_bar()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        if hidden:
            library.enable_progress_bar()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def bytes_text(count: float) -> str:
    """Format a number of bytes in a unit that leaves one to four digits before the point."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 10_000 or unit == "GiB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError("the last unit accepts any number")
