"""``merge ADAPTER --out DIR``: write a merged checkpoint in the base's own layout."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe_patch.cli import adapted, models
from moe_patch.cli.output import add_json, bytes_text, print_json
from moe_patch.errors import UnsupportedOptionError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add(subparsers: Any) -> None:
    """Add the parser of ``merge``."""
    parser = subparsers.add_parser(
        "merge",
        help="merge an adapter into its base and write the checkpoint",
        description="Compute W + scaling * B * A in fp32 for every adapted weight, and round "
        "once. The base's safetensors files are streamed, so the model is never in memory as a "
        "whole. The result keeps the base's names, layout and dtypes. FP8 (128 x 128) and MXFP4 "
        "weights are decoded, changed and re-encoded, and the error of re-encoding is printed.",
    )
    adapted.add_adapter(parser)
    parser.add_argument("--out", metavar="DIR", required=True, help="folder to create")
    parser.add_argument(
        "--dtype",
        choices=tuple(models.DTYPES)[:3],
        help="dtype of every weight; default: the base's",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        help="largest size of a file, such as 5GB; default: the base's files",
    )
    parser.add_argument(
        "--device", default="cpu", help="device that computes the sums (default: cpu)"
    )
    add_json(parser)
    parser.set_defaults(command=command)


def command(args: argparse.Namespace) -> int:
    """Merge and print the result."""
    from moe_patch.serving.merge import merge
    from moe_patch.serving.write import refuse_existing

    started = time.monotonic()
    limit = None if args.max_shard_size is None else bytes_of(args.max_shard_size)
    refuse_existing(Path(args.out))
    device = models.device_of(args)
    folder = adapted.base_folder(args.adapter, args.base)
    _, plain = adapted.plain_model(folder, args.adapter)
    with byte_bar("merging") as progress:
        done = merge(
            args.adapter, folder, args.out, plain,
            dtype=models.DTYPES[args.dtype] if args.dtype else None,
            max_shard_size=limit, device=device, progress=progress,
        )  # fmt: skip
    result = {
        "adapter": args.adapter,
        "base": str(folder),
        "out": args.out,
        **done._asdict(),
        "seconds": time.monotonic() - started,
    }
    if args.json:
        print_json(result)
    else:
        _print(result)
    return 0


def _print(result: dict[str, Any]) -> None:
    print(
        f"{result['out']}: {result['changed']} weights changed, {result['copied']} copied, "
        f"{result['parameters']:,} values, {bytes_text(result['bytes'])} in "
        f"{result['seconds']:.1f} s"
    )
    for storage, error in result["errors"].items():
        print(f"merged values re-encoded in {storage}: relative error {error:.1e}")
    for note in result["notes"]:
        print(f"note: {note}")


def bytes_of(text: str) -> int:
    """Return the bytes of a size such as 5GB, 512MiB or 1000000.

    Raises:
        UnsupportedOptionError: the text is not a size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise UnsupportedOptionError(
            f"--max-shard-size {text}: accepted: a number of bytes, or a number with one of "
            f"{', '.join(_UNITS)[2:]}"
        )
    return int(float(found[1]) * unit)


@contextmanager
def byte_bar(what: str) -> Iterator[Callable[[int, int], Any]]:
    """Yield a progress callback; it shows a bar if stderr is a terminal and tqdm is installed."""
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        yield lambda done, total: None
        return
    from tqdm.auto import tqdm

    with tqdm(desc=what, unit="B", unit_scale=True, leave=False, file=sys.stderr) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
