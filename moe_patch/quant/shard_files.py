"""Split a checkpoint into safetensors files by size, write them aside, then move them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from moe_patch.errors import UnsupportedOptionError

INDEX = "model.safetensors.index.json"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "": 1}
# Files that show that a folder holds a model.
_MODEL = ("config.json", "*.safetensors", "*.bin", "*.index.json")
# Bytes reserved for a config, an index and headers.
_SPARE = 1 << 24


class Shards:
    """Tensors in files of a given size.

    Args:
        tensors: name -> tensor; tensors may be views of the same memory.
        stem: first part of the files' names.
        max_size: largest size of a file in bytes, or as "5GB"; a larger tensor gets its own file.

    Raises:
        UnsupportedOptionError: the size cannot be parsed.
    """

    def __init__(self, tensors: Mapping[str, Tensor], stem: str, max_size: int | str) -> None:
        named = list(tensors.items())
        sizes = [tensor.numel() * tensor.element_size() for _, tensor in named]
        self.nbytes = sum(sizes)
        groups = by_size(sizes, _bytes(max_size))
        self.files = [dict(named[number] for number in group) for group in groups]
        self.names = file_names(stem, len(groups))

    def __len__(self) -> int:
        return len(self.files)

    def write(self, folder: Path) -> None:
        """Write the files, one after the other."""
        from safetensors.torch import save_file

        for name, tensors in zip(self.names, self.files, strict=True):
            whole = {key: value.detach().contiguous().cpu() for key, value in tensors.items()}
            save_file(whole, folder / name, {"format": "pt"})

    def index(self) -> dict[str, object]:
        """Return the file of each tensor, and the total size."""
        where = {key: n for n, one in zip(self.names, self.files, strict=True) for key in one}
        return {"metadata": {"total_size": self.nbytes}, "weight_map": where}

    def write_index(self, file: Path) -> None:
        """Write the index, which transformers reads if there are several files."""
        file.write_text(json.dumps(self.index(), indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def new_folder(target: str | Path, nbytes: int) -> Iterator[Path]:
    """Yield a folder to write to; move its files to ``target`` if the block ends without an error.

    Args:
        target: a folder without a model in it; it need not exist.
        nbytes: number of bytes to be written.

    Raises:
        UnsupportedOptionError: the target holds a model, or the disk is full; nothing remains.
    """
    target = Path(target).absolute()
    where = f"save_pretrained: {target}"
    if target.is_file() or any(file for pattern in _MODEL for file in target.glob(pattern)):
        raise UnsupportedOptionError(
            f"{where} already holds a model, or is a file; accepted: a folder without a model"
        )
    partial = target.with_name(f".{target.name}.partial")
    if partial.exists():
        raise UnsupportedOptionError(
            f"{where}: {partial} exists: another save is running, or one was interrupted; if "
            "none is running, delete it"
        )
    with written_aside(partial, nbytes + _SPARE, where):
        yield partial
        target.mkdir(exist_ok=True)
        for file in sorted(partial.iterdir()):
            file.rename(target / file.name)


@contextmanager
def written_aside(partial: Path, needed: int, where: str) -> Iterator[None]:
    """Make a folder for a result that is not complete yet; remove what is left of it at the end.

    Args:
        partial: folder to make, beside the final one; the block moves its content there.
        needed: number of bytes to be written.
        where: beginning of errors, which names the final folder.

    Raises:
        UnsupportedOptionError: the disk is or becomes full, or nothing can be written there.
    """
    from safetensors import SafetensorError

    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(partial.parent).free
        if needed > free:
            raise UnsupportedOptionError(
                f"{where}: the result needs {needed:,} bytes, but the disk has {free:,} free; "
                "accepted: a folder on a disk with enough space"
            )
        partial.mkdir()
        yield
    except (OSError, SafetensorError) as error:
        raise UnsupportedOptionError(
            f"{where}: cannot be written: {error}; the partial result was removed"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def by_size(sizes: Iterable[int], limit: int) -> list[list[int]]:
    """Return the numbers of the items of each file.

    Args:
        sizes: bytes of the items in the order of writing.
        limit: largest size of a file in bytes; a larger item gets its own file.
    """
    groups: list[list[int]] = [[]]
    total = 0
    for number, own in enumerate(sizes):
        if groups[-1] and total + own > limit:
            groups.append([])
            total = 0
        groups[-1].append(number)
        total += own
    return groups


def file_names(stem: str, count: int) -> list[str]:
    """Return the names of a checkpoint's files, numbered if there are several."""
    numbers = [f"-{i:05d}-of-{count:05d}" if count > 1 else "" for i in range(1, count + 1)]
    return [f"{stem}{number}.safetensors" for number in numbers]


def _bytes(size: int | str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMGT]B|)", str(size).upper())
    if found is None:
        raise UnsupportedOptionError(
            f"save_pretrained: max_shard_size is {size!r}; accepted: a number of bytes, or a size "
            "such as '5GB'"
        )
    return int(found[1]) * _UNITS[found[2]]
