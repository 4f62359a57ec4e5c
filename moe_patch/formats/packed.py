"""PackedWeight: one projection's expert weights in 4 or 8 bits for the experts operator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.formats import fp8, mxfp4, nf4
from moe_patch.types import ExpertWeights

# Storages into which weights can be packed; READABLE adds those found only in checkpoints.
STORAGES = ("nf4", "fp8")
READABLE = (*STORAGES, "mxfp4")
# Choices of an option; "bf16" stands for weights that are not packed, of any dtype.
NAMES = ("bf16", *READABLE)
# Words after a storage's name in the operator's options.
_TRANSPOSED, _IN_FP8 = "transposed", "in_fp8"
# Packed experts are decoded some at a time. Fewer parts mean fewer launches and fewer partial
# waves, so take the fewest parts whose buffer has at most _SMALL_BUFFER bytes.
_FEWEST, _MOST = 2, 4
_SMALL_BUFFER = 512 << 20
# Offsets of every part start at a multiple of 16 bytes, so all parts use one compiled kernel.
_ALIGNED = 4


def decoded_at_once(experts: int, rows: int, columns: int, itemsize: int) -> int:
    """Return how many of ``experts`` weights [rows, columns] the decode buffer holds at a time."""
    halves, quarters = (
        min(experts, -(-experts // (parts * _ALIGNED)) * _ALIGNED) for parts in (_FEWEST, _MOST)
    )
    return halves if halves * rows * columns * itemsize <= _SMALL_BUFFER else quarters


@dataclass(frozen=True)
class PackedWeight:
    """Stand-in for an [E, out, in] weight that is stored in 4 or 8 bits.

    It has the part of a tensor's interface that the backends use: shape, device, transpose, and one
    expert by index. It defines no arithmetic, so packed bytes cannot enter a product.

    Attributes:
        storage: a name in :data:`FORMATS`.
        packed: uint8 [E, rows, columns / 2] or e4m3 [E, rows, columns], contiguous.
        scales: scales of the format.
        dtype: dtype of a dequantised expert.
        transposed: rows are inputs and columns are outputs; if False, the other way round.
        in_fp8: fp8 only: products compute in FP8 where the kernels support them. The scales may
            then be followed by a copy with rows and columns exchanged: its values and scales.
        gathered: FSDP2 gathered the weight for the current call; nothing made of it may be kept.
    """

    storage: str
    packed: Tensor
    scales: tuple[Tensor, ...]
    dtype: torch.dtype
    transposed: bool = False
    in_fp8: bool = False
    gathered: bool = False

    @property
    def stored_shape(self) -> tuple[int, int, int]:
        """[E, rows, columns] as stored, in values."""
        E, rows, columns = self.packed.shape
        return E, rows, columns * FORMATS[self.storage].per_element

    @property
    def shape(self) -> torch.Size:
        """[E, out, in]."""
        E, rows, columns = self.stored_shape
        return torch.Size((E, columns, rows) if self.transposed else (E, rows, columns))

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def numel(self) -> int:
        return math.prod(self.stored_shape)

    def to(self, dtype: torch.dtype) -> PackedWeight:
        """Return the same storage with another dtype for dequantised experts."""
        return replace(self, dtype=dtype)

    def each(self, function: Callable[[Tensor], Tensor]) -> PackedWeight:
        """Return a weight of ``function`` of the packed tensor and of each scale."""
        return replace(self, packed=function(self.packed), scales=tuple(map(function, self.scales)))

    def transpose(self, first: int, second: int) -> PackedWeight:
        """Exchange in and out, without moving data."""
        assert {first % 3, second % 3} == {1, 2}, (first, second)
        return replace(self, transposed=not self.transposed)

    def __getitem__(self, e: int) -> Tensor:
        """Dequantise one expert, [out, in]."""
        return self.experts(e, e + 1)[0]

    def stored_experts(self, start: int, end: int) -> Tensor:
        """Dequantise experts ``start`` to ``end`` as stored, [end - start, rows, columns]."""
        return FORMATS[self.storage].dequantize(self, start, end)

    def experts(self, start: int, end: int) -> Tensor:
        """Dequantise experts ``start`` to ``end``, [end - start, out, in]."""
        stored = self.stored_experts(start, end)
        return stored.transpose(1, 2) if self.transposed else stored

    def nbytes(self) -> int:
        """Return the size in bytes, scales included."""
        return sum(t.numel() * t.element_size() for t in (self.packed, *self.scales))


@dataclass(frozen=True)
class Format:
    """Description of a storage.

    Attributes:
        per_element: number of values per element of the packed tensor.
        scales: number of scale tensors.
        dequantize: dequantises experts ``start`` to ``end`` of a weight, as stored, to its dtype.
    """

    per_element: int
    scales: int
    dequantize: Callable[[PackedWeight, int, int], Tensor]


def _nf4_experts(w: PackedWeight, start: int, end: int) -> Tensor:
    """Dequantise experts; blocks of 64 are numbered through the weights of all experts."""
    _, rows, columns = w.stored_shape
    first = start * rows * columns // nf4.BLOCK
    return nf4.dequantize(w.packed[start:end], nf4.Nf4Scales(*w.scales), w.dtype, first)


def _fp8_experts(w: PackedWeight, start: int, end: int) -> Tensor:
    return fp8.dequantize(w.packed[start:end], w.scales[0][start:end], w.dtype)


def _mxfp4_experts(w: PackedWeight, start: int, end: int) -> Tensor:
    return mxfp4.dequantize(w.packed[start:end], w.scales[0][start:end], w.dtype)


FORMATS = {
    "nf4": Format(2, len(nf4.Nf4Scales._fields), _nf4_experts),
    "fp8": Format(1, 1, _fp8_experts),
    "mxfp4": Format(2, 1, _mxfp4_experts),
}


def check_packable(weight: Tensor, storage: str, where: str) -> None:
    """Refuse a weight that cannot be packed into a storage.

    Args:
        weight: [E, rows, columns], as stored.
        storage: one of :data:`STORAGES`.
        where: name of the parameter, for errors.

    Raises:
        UnsupportedModelError: the storage is unknown or does not support the shape or dtype.
    """
    if storage not in STORAGES:
        raise UnsupportedModelError(
            f"{where}: unknown storage {storage!r}; accepted: {', '.join(STORAGES)}"
        )
    if weight.dim() != 3 or not weight.is_floating_point() or weight.dtype.itemsize < 2:
        raise UnsupportedModelError(
            f"{where}: cannot be quantised: {weight.dim()}-D {weight.dtype}; accepted: 3-D bf16, "
            "fp16 or fp32 expert weights"
        )
    if storage == "nf4" and weight.shape[-1] % nf4.BLOCK:
        raise UnsupportedModelError(
            f"{where}: nf4 needs rows of a multiple of {nf4.BLOCK} values, found "
            f"{weight.shape[-1]}; use fp8 or leave the experts as they are"
        )


def pack(weight: Tensor, storage: str, device: torch.device, where: str) -> PackedWeight:
    """Quantise a weight [E, rows, columns], as stored; the result is on ``device``.

    Raises:
        UnsupportedModelError: as :func:`check_packable`.
    """
    check_packable(weight, storage, where)
    scales: tuple[Tensor, ...]
    if storage == "nf4":
        packed, scales = nf4.quantize(weight, device)
    else:
        packed, scale_inv = fp8.quantize(weight, device)
        scales = (scale_inv,)
    return PackedWeight(storage, packed, tuple(scales), weight.dtype)


def plain_weights(w: ExpertWeights) -> tuple[ExpertWeights, list[Tensor], str]:
    """Split weights into plain tensors, their scales, and the storage ("" if not packed).

    Raises:
        UnsupportedOptionError: the two projections have different storage.
    """
    w13: Any = w.w13_EHD
    w2: Any = w.w2_EDF
    if not isinstance(w13, PackedWeight) and not isinstance(w2, PackedWeight):
        return w, [], ""
    storages = {_storage(w13), _storage(w2)}
    if len(storages) > 1:
        raise UnsupportedOptionError(
            f"experts_mlp: the two projections are stored as {' and '.join(sorted(storages))}; "
            "accepted: the same storage for both"
        )
    plain = w._replace(w13_EHD=w13.packed, w2_EDF=w2.packed)
    return plain, [*w13.scales, *w2.scales], storages.pop()


def packed_weights(
    w: ExpertWeights, scales: list[Tensor], storage: str, dtype: torch.dtype
) -> ExpertWeights:
    """Invert :func:`plain_weights`; experts are dequantised to ``dtype``."""
    if not storage:
        return w
    kind, *words = storage.split()
    half = len(scales) // 2

    def packed(tensor: Tensor, own: list[Tensor]) -> Any:
        transposed, in_fp8 = _TRANSPOSED in words, _IN_FP8 in words
        return PackedWeight(kind, tensor, tuple(own), dtype, transposed, in_fp8)

    return w._replace(
        w13_EHD=packed(w.w13_EHD, scales[:half]), w2_EDF=packed(w.w2_EDF, scales[half:])
    )


def _storage(weight: Tensor | PackedWeight) -> str:
    if not isinstance(weight, PackedWeight):
        return str(weight.dtype)
    transposed = f" {_TRANSPOSED}" if weight.transposed else ""
    return weight.storage + transposed + (f" {_IN_FP8}" if weight.in_fp8 else "")
