"""Compute W + scaling * B * A for a checkpoint tensor by tensor, without loading its model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_patch.serving.adapter import place, read_adapter
from moe_patch.serving.checkpoint import PLAIN, Checkpoint, Entry, Part, encode
from moe_patch.serving.edits import Edits
from moe_patch.serving.write import (
    ShardFile,
    folder_in_one_step,
    index_text,
    refuse_existing,
    shards,
    side_files,
)
from moe_patch.tools.base_identity import INDEX, check_base

CONFIG = "config.json"


class Merged(NamedTuple):
    """Counts, errors and notes of a merge.

    Attributes:
        changed: number of the checkpoint's weights that changed.
        copied: number of the checkpoint's weights that were copied.
        parameters: number of values in the result.
        bytes: number of bytes written as weights.
        errors: storage -> relative error of encoding the merged values again, as a ratio of
            2-norms over all of them.
        notes: sentences for the user.
    """

    changed: int
    copied: int
    parameters: int
    bytes: int
    errors: dict[str, float]
    notes: list[str]


def merge(
    adapter: str | Path,
    base: str | Path,
    out: str | Path,
    plain: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> Merged:
    """Write the base with an adapter merged into it, in the base's own names and layout.

    Every changed value is W + scaling * B * A in fp32 as PEFT computes it, rounded once to the
    dtype of its tensor. All other values are copied.

    Args:
        adapter: folder written by PEFT's ``save_pretrained``.
        base: folder of the checkpoint, in safetensors.
        out: folder to create.
        plain: the base's model on the meta device.
        dtype: dtype of the result; None keeps each tensor's own.
        max_shard_size: largest size of a file in bytes; None keeps the base's files.
        device: device that computes the sums.
        progress: called with the bytes written and the bytes to write.

    Raises:
        UnsupportedOptionError: a file is missing or broken, ``out`` exists, or the disk is full.
        UnsupportedModelError: the adapter does not belong to this base.
    """
    out, device = Path(out), torch.device(device)
    refuse_existing(out)
    checkpoint = Checkpoint(base)
    check_base(adapter, checkpoint.folder)
    found = read_adapter(adapter, plain)
    place(found, device)
    edits = Edits(checkpoint, found, device)
    kept = _kept_in_fp32(plain, dtype)
    entries = {
        one: _stored_as(one, dtype, kept)
        for one in (*checkpoint.entries.values(), *edits.extra.values())
    }
    files = shards(in_order(entries.values()), checkpoint.files, max_shard_size)
    copies = side_files(checkpoint.folder)
    total = sum(part.bytes for one in entries.values() for part in one.parts)
    job = _Job(checkpoint, edits, {new: old for old, new in entries.items()}, total, progress)
    with folder_in_one_step(out, total + sum(path.stat().st_size for path in copies)) as folder:
        for name, group in files.items():
            job.file(folder / name, group)
        if len(files) > 1 or (checkpoint.folder / INDEX).is_file():
            (folder / INDEX).write_text(index_text(files), encoding="utf-8")
        # Copy the config last: without it, no reader takes the folder for a model.
        for path in sorted(copies, key=lambda one: one.name == CONFIG):
            shutil.copyfile(path, folder / path.name)
        _rewrite_config(folder / CONFIG, dtype, untied=bool(edits.extra))
    return job.result()


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Sort entries by name, experts by number, so that cached deltas are reused."""
    from transformers.core_model_loading import dot_natural_key

    return sorted(entries, key=lambda one: dot_natural_key(one.name))


def _kept_in_fp32(plain: Any, dtype: torch.dtype | None) -> tuple[str, ...]:
    """Return name parts of tensors that stay fp32 when the model is cast to 16 bits."""
    kept: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        kept |= set(plain._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(plain._keep_in_fp32_modules or ())
    return tuple(kept)


def _stored_as(entry: Entry, dtype: torch.dtype | None, kept: tuple[str, ...]) -> Entry:
    """Return the entry in the storage of the result."""
    if dtype is None or not entry.is_number:
        return entry
    own = entry.parts[0].dtype
    if own == torch.float32 and any(f".{name}." in f".{entry.name}." for name in kept):
        return entry
    return replace(entry, storage=PLAIN, parts=(Part(entry.name, dtype, entry.shape),))


class _Job:
    """The loop over the tensors, and its counts."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        edits: Edits,
        before: dict[Entry, Entry],
        total: int,
        progress: Callable[[int, int], Any],
    ) -> None:
        self.checkpoint, self.edits, self.before = checkpoint, edits, before
        self.changed = {*edits.changed, *edits.extra}
        self.total, self.done, self.progress = total, 0, progress
        self.squares: dict[str, list[float]] = {}

    def file(self, path: Path, entries: list[Entry]) -> None:
        """Write one file."""
        file = ShardFile(path, entries)
        try:
            for entry in entries:
                for row, values in self._values(entry):
                    for part, value in zip(entry.parts, values, strict=True):
                        self.done += file.write(part, value, row)
                self.progress(self.done, self.total)
        finally:
            file.close()

    def _values(self, entry: Entry) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yield the parts of an entry, whole or in steps along the first axis."""
        old = self.before[entry]
        if entry.name in self.changed:
            for row, value in self.edits.values(old):
                yield row, self._encoded(entry, value)
        elif entry == old:
            yield 0, tuple(self.checkpoint.raw(part) for part in entry.parts)
        else:
            yield 0, self._encoded(entry, self.checkpoint.read(old))

    def _encoded(self, entry: Entry, value: Tensor) -> tuple[Tensor, ...]:
        """Encode fp32 values in the storage of the result, and add up the encoding error."""
        if entry.storage == PLAIN:
            return (value.to(entry.parts[0].dtype),)
        packed, scales, again = encode(entry.storage, value)
        sums = self.squares.setdefault(entry.storage, [0.0, 0.0])
        sums[0] += float((again - value).square().sum(dtype=torch.float64))
        sums[1] += float(value.square().sum(dtype=torch.float64))
        return packed, scales.to(entry.parts[1].dtype)

    def result(self) -> Merged:
        """Return the counts."""
        parameters = sum(torch.Size(one.shape).numel() for one in self.before)
        return Merged(
            len(self.changed),
            len(self.before) - len(self.changed),
            parameters,
            self.done,
            {name: (error / norm) ** 0.5 for name, (error, norm) in self.squares.items() if norm},
            self.edits.notes,
        )


def _rewrite_config(path: Path, dtype: torch.dtype | None, untied: bool) -> None:
    """Change config.json if the dtype or a tie changed; otherwise leave it byte for byte."""
    if dtype is None and not untied:
        return
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for one in (config, *(part for part in config.values() if isinstance(part, dict))):
        if dtype is not None:
            one.pop("quantization_config", None)
            for key in ("dtype", "torch_dtype"):
                if key in one:
                    one[key] = str(dtype).removeprefix("torch.")
        if untied and one.get("tie_word_embeddings"):
            one["tie_word_embeddings"] = False
    if untied:
        config["tie_word_embeddings"] = False
    text = json.dumps(config, indent=2, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")
