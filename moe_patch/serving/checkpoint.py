"""Read a safetensors checkpoint tensor by tensor, in the hub's own names and layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.formats import fp8, mxfp4
from moe_patch.tools.base_identity import (
    INDEX,
    SINGLE,
    TensorEntry,
    read_header,
    read_index,
    weight_files,
)

PLAIN, FP8, MXFP4 = "plain", "fp8", "mxfp4"
# Names of dtypes in the header of a safetensors file.
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
_READABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Part:
    """One tensor of a file: its name, dtype and shape there."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in the file, in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Entry:
    """One weight of a checkpoint, in any storage.

    Attributes:
        name: the weight's name; for MXFP4 the common prefix of the two stored tensors.
        storage: PLAIN, FP8 (values and scales of 128 x 128 blocks) or MXFP4 (blocks and scales).
        parts: the stored tensors.
        shape: the weight's shape in a transformers model.
        file: the file that holds the first part.
    """

    name: str
    storage: str
    parts: tuple[Part, ...]
    shape: tuple[int, ...]
    file: str

    @property
    def is_number(self) -> bool:
        """Return whether the values can be read as floating-point numbers."""
        return self.storage != PLAIN or self.parts[0].dtype in _READABLE


class Checkpoint:
    """The weights of a folder; headers are read at construction, values on access."""

    def __init__(self, folder: str | Path) -> None:
        """Read every header.

        Raises:
            UnsupportedOptionError: a file is missing, truncated, or does not match the index.
        """
        self.folder = Path(folder)
        found = weight_files(self.folder)
        if not found:
            raise UnsupportedOptionError(
                f"{self.folder} holds neither {SINGLE} nor {INDEX}; accepted: a safetensors "
                "checkpoint"
            )
        self._files = [file.name for file in found]
        self._opened: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        parts: dict[str, Part] = {}
        for file in found:
            for name, entry in read_header(file).items():
                parts[name] = Part(name, _dtype(name, entry), entry.shape)
                self._where[name] = file.name
        index = read_index(self.folder)
        if missing := sorted(set(index) - set(parts)):
            raise UnsupportedOptionError(
                f"{self.folder / INDEX} lists {missing[0]} in {index[missing[0]]}, but that "
                "file does not have it; accepted: a complete checkpoint (download it again)"
            )
        self.entries = {one.name: one for one in self._entries(parts)}

    @property
    def files(self) -> list[str]:
        """Names of the files, sorted."""
        return list(self._files)

    def raw(self, part: Part) -> Tensor:
        """Return a stored tensor on the CPU, memory-mapped from the file where possible."""
        found: Tensor = self._open(self._where[part.name]).get_tensor(part.name)
        return found

    def read(self, entry: Entry, rows: slice | None = None) -> Tensor:
        """Return a weight in fp32, or a slice of it along its first axis.

        Raises:
            UnsupportedModelError: the weight's dtype holds packed values.
        """
        if not entry.is_number:
            raise UnsupportedModelError(
                f"{self.folder}: {entry.name} is stored as {entry.parts[0].dtype}; accepted: 16-, "
                "32- or 64-bit floating point, FP8 in blocks of 128 x 128, MXFP4 experts"
            )
        first, *scales = (self._rows(part, rows) for part in entry.parts)
        if entry.storage == FP8:
            return fp8.dequantize(first, scales[0].to(torch.float32), torch.float32)
        if entry.storage == MXFP4:
            wide = mxfp4.dequantize(first.flatten(2), scales[0], torch.float32)
            return wide.transpose(1, 2)
        return first.to(torch.float32)

    def _rows(self, part: Part, rows: slice | None) -> Tensor:
        if rows is None:
            return self.raw(part)
        found: Tensor = self._open(self._where[part.name]).get_slice(part.name)[rows]
        return found

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._opened:
            path = self.folder / file
            try:
                self._opened[file] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UnsupportedOptionError(
                    f"{path}: not a complete safetensors file: {error}; accepted: a complete "
                    "checkpoint (download it again)"
                ) from error
        return self._opened[file]

    def _entries(self, parts: dict[str, Part]) -> Iterator[Entry]:
        taken = set()
        for name, part in parts.items():
            if name.endswith("_blocks") and f"{name[:-7]}_scales" in parts:
                scales = parts[f"{name[:-7]}_scales"]
                E, out, blocks = part.shape[:3]
                shape = (E, blocks * mxfp4.BLOCK, out)
                taken |= {name, scales.name}
                yield Entry(name[:-7], MXFP4, (part, scales), shape, self._where[name])
            elif part.dtype == fp8.DTYPE and f"{name}_scale_inv" in parts:
                scales = parts[f"{name}_scale_inv"]
                taken |= {name, scales.name}
                if scales.shape == tuple(-(-n // fp8.BLOCK) for n in part.shape):
                    yield Entry(name, FP8, (part, scales), part.shape, self._where[name])
                else:
                    yield Entry(name, PLAIN, (part, scales), part.shape, self._where[name])
        for name, part in parts.items():
            if name not in taken:
                yield Entry(name, PLAIN, (part,), part.shape, self._where[name])


def _dtype(name: str, entry: TensorEntry) -> torch.dtype:
    if entry.dtype not in DTYPES:
        raise UnsupportedModelError(
            f"{entry.file}: {name} is stored as {entry.dtype}; accepted: {', '.join(DTYPES)}"
        )
    return DTYPES[entry.dtype]


def encode(storage: str, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Encode a weight in FP8 or MXFP4.

    Args:
        storage: FP8 or MXFP4.
        value: fp32, with the shape of :attr:`Entry.shape`.

    Returns:
        Values and scales as a checkpoint stores them, and the encoded values in fp32.
    """
    if storage == FP8:
        packed, scales = fp8.quantize(value.reshape(-1, *value.shape[-2:]), value.device)
        packed, scales = packed.view(value.shape), scales.view(*value.shape[:-2], *scales.shape[1:])
        return packed, scales, fp8.dequantize(packed, scales, torch.float32)
    packed, scales = mxfp4.quantize(value.transpose(1, 2))
    again = mxfp4.dequantize(packed, scales, torch.float32).transpose(1, 2)
    return packed.unflatten(-1, (-1, mxfp4.BLOCK // 2)), scales, again
