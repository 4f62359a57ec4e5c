"""Record in an adapter's folder the base model on which it was trained.

A hash over every tensor's name, dtype and shape in the safetensors headers identifies a checkpoint.
The hash also covers some bytes of some tensors, because two fine-tunings of one model have equal
indices. The hash does not depend on how the checkpoint is split into shards.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.tools.model_files import ADAPTER

RECORD = "moe_patch_base.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Tensors whose names differ only in numbers are of one kind; some of each kind are sampled.
SAMPLES_PER_KIND = 4
SAMPLE_BYTES = 4096
_NUMBER = re.compile(r"\d+")


class TensorEntry(NamedTuple):
    """A tensor of a safetensors file: its header entry, and its byte range in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Base(NamedTuple):
    """Name and hash of a checkpoint."""

    name: str
    sha256: str


def base_hash(folder: str | Path) -> str | None:
    """Return the sha256 that identifies a checkpoint, in hexadecimal.

    Only headers and a few hundred pieces of 4 KiB are read.

    Args:
        folder: folder of the checkpoint.

    Returns:
        None if the folder holds no safetensors files, whose headers are needed.

    Raises:
        UnsupportedOptionError: a shard is missing, or a file is truncated or broken.
    """
    entries: dict[str, TensorEntry] = {}
    for file in weight_files(folder):
        entries.update(read_header(file))
    if not entries:
        return None
    found = hashlib.sha256()
    for name in sorted(entries):
        found.update(f"{name} {entries[name].dtype} {list(entries[name].shape)}\n".encode())
    for name in _samples(sorted(entries)):
        found.update(_piece(entries[name]))
    return found.hexdigest()


def weight_files(folder: str | Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, in order; empty if it has none.

    Raises:
        UnsupportedOptionError: the index cannot be read, or names a missing file.
    """
    folder = Path(folder)
    if not (folder / INDEX).is_file():
        return [folder / SINGLE] if (folder / SINGLE).is_file() else []
    names = sorted(set(read_index(folder).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UnsupportedOptionError(
            f"{folder}: missing {len(missing)} of the {len(names)} files that {INDEX} lists "
            f"(first: {missing[0]}); accepted: a complete checkpoint (download it again)"
        )
    return [folder / name for name in names]


def read_index(folder: Path) -> dict[str, str]:
    """Return the file name of each tensor by the index; empty if the checkpoint is one file.

    Raises:
        UnsupportedOptionError: the index cannot be read.
    """
    if not (folder / INDEX).is_file():
        return {}
    try:
        found: dict[str, Any] = json.loads((folder / INDEX).read_bytes())["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UnsupportedOptionError(
            f"{folder / INDEX}: not an index of safetensors files ({type(error).__name__}: "
            f"{error}); accepted: a complete checkpoint (download it again)"
        ) from error


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file by name.

    Raises:
        UnsupportedOptionError: the file is not in safetensors, or is shorter than its header says.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > size:
                raise ValueError(f"header of {length} bytes in a file of {size} bytes")
            header: dict[str, Any] = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        entries = {name: _entry(file, 8 + length, one) for name, one in header.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UnsupportedOptionError(
            f"{file}: not a safetensors file: {error}; accepted: a complete safetensors file"
        ) from error
    end = max((one.end for one in entries.values()), default=0)
    if end > size:
        raise UnsupportedOptionError(
            f"{file} is truncated: its header describes {end} bytes, but the file has {size}; "
            "accepted: a complete file"
        )
    return entries


def find_base(name: str, revision: str | None = None) -> Path | None:
    """Return the folder of a checkpoint on this machine; download nothing.

    Args:
        name: a folder, or a hub id whose files are in the cache.
        revision: revision of the hub id; None means the main branch.

    Returns:
        None if the checkpoint is not on this machine.
    """
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:  # the name of a deleted folder
        return None
    return Path(found).parent if isinstance(found, str) else None


def known_base(folder: str | Path | None) -> Base | None:
    """Return a base with its hash; None without a folder or without safetensors files in it.

    Raises:
        UnsupportedOptionError: see :func:`base_hash`.
    """
    found = None if folder is None else base_hash(folder)
    return None if found is None else Base(str(folder), found)


def base_of(model: nn.Module) -> Base | None:
    """Return the base of a PEFT model, or None if its checkpoint is not on this machine.

    Raises:
        UnsupportedOptionError: see :func:`base_hash`.
    """
    peft, transformers = sys.modules.get("peft"), sys.modules.get("transformers")
    if peft is None or transformers is None or not isinstance(model, peft.PeftModel):
        return None
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            revision = next(iter(model.peft_config.values())).revision
            return known_base(find_base(module.config.name_or_path, revision))
    return None


def note_base(adapter: str | Path, base: Base) -> None:
    """Write the identity of a base into the folder of an adapter.

    Args:
        adapter: folder with an adapter_config.json.
        base: from :func:`known_base` or :func:`base_of`.
    """
    text = json.dumps({"base": base.name, "sha256": base.sha256}, indent=2)
    (Path(adapter) / RECORD).write_text(text + "\n", encoding="utf-8")


def note_checkpoint(args: Any, state: Any, base: Base | None) -> None:
    """Write the identity of a base beside the adapter that a Trainer has just saved, if any.

    Args:
        args, state: the Trainer's arguments and state.
        base: from :func:`base_of`; None writes nothing.
    """
    folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
    if base is not None and args.should_save and (folder / ADAPTER).is_file():
        note_base(folder, base)


def check_base(adapter: str | Path, base: str | Path) -> None:
    """Refuse a base that differs from the one on which an adapter was trained.

    Accept an adapter without a record, and a base without safetensors files.

    Args:
        adapter: folder written by PEFT.
        base: folder of a checkpoint.

    Raises:
        UnsupportedModelError: the adapter was trained on another base.
        UnsupportedOptionError: a file of either folder is missing or broken.
    """
    adapter = Path(adapter)
    noted = read_record(adapter)
    if noted is None:
        return
    found = base_hash(base)
    if found not in (None, noted.sha256):
        raise UnsupportedModelError(
            f"{adapter} was trained on another base ({noted.name}), not on {base}: tensor names, "
            "shapes, dtypes or sampled values differ; accepted: the adapter's own base; "
            f"if you are sure that both are the same model, delete {adapter / RECORD}"
        )


def read_record(adapter: Path) -> Base | None:
    """Return the base recorded by :func:`note_base`; None if there is no record.

    Raises:
        UnsupportedOptionError: the folder holds no adapter, or its record is broken.
    """
    if not (adapter / ADAPTER).is_file():
        raise UnsupportedOptionError(
            f"{adapter} has no {ADAPTER}; accepted: a folder written by PEFT's save_pretrained"
        )
    if not (adapter / RECORD).is_file():
        return None
    try:
        noted = json.loads((adapter / RECORD).read_bytes())
        return Base(str(noted["base"]), str(noted["sha256"]))
    except (ValueError, LookupError, TypeError) as error:
        raise UnsupportedOptionError(
            f"{adapter / RECORD}: not a record written by moe_patch ({type(error).__name__}: "
            f"{error}); delete it to use the adapter without this check"
        ) from error


def _entry(file: Path, data: int, about: dict[str, Any]) -> TensorEntry:
    start, end = about["data_offsets"]
    return TensorEntry(file, str(about["dtype"]), tuple(about["shape"]), data + start, data + end)


def _samples(names: list[str]) -> Iterator[str]:
    """Yield evenly spaced names of every kind, including the first and the last."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_NUMBER.sub("#", name), []).append(name)
    for same in kinds.values():
        last = len(same) - 1
        count = min(SAMPLES_PER_KIND, len(same))
        yield from (same[last * i // max(count - 1, 1)] for i in range(count))


def _piece(entry: TensorEntry) -> bytes:
    """Return bytes from the middle of a tensor; first rows of embeddings often stay untrained."""
    middle = (entry.start + entry.end) // 2
    # An even offset within the tensor, which does not depend on the tensor's place in its file.
    start = entry.start + max(0, (middle - entry.start - SAMPLE_BYTES // 2) // 2 * 2)
    with entry.file.open("rb") as opened:
        opened.seek(start)
        return opened.read(min(SAMPLE_BYTES, entry.end - start))
