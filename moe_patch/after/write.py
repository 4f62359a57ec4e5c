"""Checkpoints written tensor by tensor into a folder that appears under its name when it is whole.

The layout of a file is known before its first byte (safetensors: the length of a JSON header, the
header, the values), so no file is held in memory and the free space is checked at once.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from moe_patch.after.checkpoint import DTYPES, SINGLE, Entry, Part
from moe_patch.errors import UnsupportedOptionError

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack")


class ShardFile:
    """One safetensors file of a known layout, its tensors written in any order."""

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        header, self._offsets = _header([part for entry in entries for part in entry.parts])
        self._file: BinaryIO = path.open("wb")
        self._file.write(header)

    def write(self, part: Part, value: Tensor, row: int = 0) -> int:
        """Write a tensor, or rows of it from ``row`` on; returns the bytes."""
        flat = value.detach().cpu().contiguous().reshape(-1)
        row_bytes = part.bytes // part.shape[0] if part.shape and part.shape[0] else 0
        self._file.seek(self._offsets[part.name] + row * row_bytes)
        if flat.numel():
            self._file.write(flat.view(torch.uint8).numpy().data)
        return flat.numel() * flat.element_size()

    def close(self) -> None:
        """Write what is buffered."""
        self._file.close()


def _header(parts: list[Part]) -> tuple[bytes, dict[str, int]]:
    """The head of the file and where each tensor begins, wide dtypes first as readers expect."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place, starts = 0, {}
    for part in sorted(parts, key=lambda one: -one.dtype.itemsize):
        starts[part.name] = place
        table[part.name] = {
            "dtype": _NAMES[part.dtype],
            "shape": list(part.shape),
            "data_offsets": [place, place + part.bytes],
        }
        place += part.bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: start + len(head) for name, start in starts.items()}


def shards(
    entries: Sequence[Entry], base_files: Sequence[str], limit: int | None
) -> dict[str, list[Entry]]:
    """The entries of each file to write.

    Args:
        entries: in the order in which they are written.
        base_files: names of the base's files, which are kept without a limit.
        limit: bytes of a file; a tensor that is larger gets a file of its own.
    """
    if limit is None:
        found: dict[str, list[Entry]] = {name: [] for name in base_files}
        for entry in entries:
            found[entry.file].append(entry)
        return found
    groups: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        own = sum(part.bytes for part in entry.parts)
        if groups[-1] and size + own > limit:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += own
    n = len(groups)
    if n == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{n:05d}.safetensors": group for i, group in enumerate(groups, 1)}


def index_text(files: dict[str, list[Entry]]) -> str:
    """model.safetensors.index.json of the files."""
    where = {part.name: name for name, es in files.items() for e in es for part in e.parts}
    total = sum(part.bytes for es in files.values() for e in es for part in e.parts)
    table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return json.dumps(table, indent=2) + "\n"


@contextmanager
def folder_in_one_step(out: Path, needed: int) -> Iterator[Path]:
    """A folder beside ``out`` that is renamed to it at the end, and removed after an error.

    Args:
        out: must not exist; its parent must.
        needed: bytes that are going to be written.

    Raises:
        UnsupportedOptionError: ``out`` exists, or the disk is full or becomes so.
    """
    refuse_existing(out)
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise UnsupportedOptionError(
            f"--out {out}: {needed:,} bytes are needed, its disk has {free:,} free; accepted: a "
            "folder on another disk"
        )
    unfinished = out.with_name(f"{out.name}.unfinished-{os.getpid()}")
    try:
        unfinished.mkdir()
        yield unfinished
        unfinished.rename(out)
    except OSError as error:
        raise UnsupportedOptionError(
            f"--out {out}: cannot be written: {error}; nothing of it is left"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def refuse_existing(out: Path) -> None:
    """Refuse a folder that is there, or one that nothing can be made in.

    Raises:
        UnsupportedOptionError: says which.
    """
    if out.exists() or out.is_symlink():
        raise UnsupportedOptionError(f"--out {out} exists; accepted: a folder to be made")
    if not out.parent.is_dir():
        raise UnsupportedOptionError(
            f"--out {out}: {out.parent} is no folder; accepted: a folder to be made in one there is"
        )


def side_files(folder: Path) -> list[Path]:
    """Everything of a checkpoint beside its weights: config, tokenizer, generation config, .."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and path.suffix not in _WEIGHTS
        and not path.name.endswith(".index.json")
    ]
