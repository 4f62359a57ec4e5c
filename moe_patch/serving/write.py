"""Write a checkpoint tensor by tensor into a folder that gets its name once it is complete.

A safetensors file is the length of a JSON header, the header and the values. The layout is known
before the first byte, so no file is held in memory, and free space is checked at the start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from moe_patch.errors import UnsupportedOptionError
from moe_patch.quant.shard_files import by_size, file_names, written_aside
from moe_patch.serving.checkpoint import DTYPES, Entry, Part
from moe_patch.tools.base_identity import SINGLE

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack")


class ShardFile:
    """A safetensors file of known layout, whose tensors may be written in any order."""

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        header, self._offsets = _header([part for entry in entries for part in entry.parts])
        self._file: BinaryIO = path.open("wb")
        self._file.write(header)

    def write(self, part: Part, value: Tensor, row: int = 0) -> int:
        """Write a tensor, or its rows from ``row`` on, and return the number of bytes."""
        flat = value.detach().cpu().contiguous().reshape(-1)
        row_bytes = part.bytes // part.shape[0] if part.shape and part.shape[0] else 0
        self._file.seek(self._offsets[part.name] + row * row_bytes)
        if flat.numel():
            self._file.write(flat.view(torch.uint8).numpy().data)
        return flat.numel() * flat.element_size()

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()


def _header(parts: list[Part]) -> tuple[bytes, dict[str, int]]:
    """Return the header and the offset of each tensor; readers expect wide dtypes first."""
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
    """Return the entries of each file to write.

    Args:
        entries: entries in the order of writing.
        base_files: names of the base's files, which are kept if there is no limit.
        limit: largest size of a file in bytes; a larger tensor gets its own file.
    """
    if limit is None:
        found: dict[str, list[Entry]] = {name: [] for name in base_files}
        for entry in entries:
            found[entry.file].append(entry)
        return found
    sizes = [sum(part.bytes for part in entry.parts) for entry in entries]
    groups = by_size(sizes, limit)
    names = file_names(SINGLE.removesuffix(".safetensors"), len(groups))
    return {
        name: [entries[number] for number in group]
        for name, group in zip(names, groups, strict=True)
    }


def index_text(files: dict[str, list[Entry]]) -> str:
    """Return the content of model.safetensors.index.json for the files."""
    where = {part.name: name for name, es in files.items() for e in es for part in e.parts}
    total = sum(part.bytes for es in files.values() for e in es for part in e.parts)
    table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return json.dumps(table, indent=2) + "\n"


@contextmanager
def folder_in_one_step(out: Path, needed: int) -> Iterator[Path]:
    """Yield a folder beside ``out``; rename it to ``out`` at the end, remove it after an error.

    Args:
        out: final folder; it must not exist, but its parent must.
        needed: number of bytes to be written.

    Raises:
        UnsupportedOptionError: ``out`` exists, or the disk is or becomes full.
    """
    refuse_existing(out)
    unfinished = out.with_name(f"{out.name}.unfinished-{os.getpid()}")
    with written_aside(unfinished, needed, f"--out {out}"):
        yield unfinished
        unfinished.rename(out)


def refuse_existing(out: Path) -> None:
    """Refuse a folder that exists, or whose parent is not a folder.

    Raises:
        UnsupportedOptionError: ``out`` exists, or its parent is not a folder.
    """
    if out.exists() or out.is_symlink():
        raise UnsupportedOptionError(
            f"--out {out} already exists; accepted: the name of a new folder"
        )
    if not out.parent.is_dir():
        raise UnsupportedOptionError(
            f"--out {out}: {out.parent} is not a folder; accepted: a new folder in an existing one"
        )


def side_files(folder: Path) -> list[Path]:
    """Return all files of a checkpoint except weights: config, tokenizer, generation config .."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and path.suffix not in _WEIGHTS
        and not path.name.endswith(".index.json")
    ]
