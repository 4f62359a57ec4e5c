"""A projection's weights in low precision, as the experts operator takes them."""

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

# What weights can be packed into; and with what checkpoints hold already.
STORAGES = ("nf4", "fp8")
READABLE = (*STORAGES, "mxfp4")


@dataclass(frozen=True)
class PackedWeight:
    """What stands in for an [E, out, in] weight that is stored in 4 or 8 bits.

    It has as much of a tensor's face as the backends use (shape, device, transpose, one expert by
    index); no arithmetic is defined on it, so packed bytes cannot enter a product.

    Attributes:
        storage: a name in :data:`FORMATS`.
        packed: uint8 [E, rows, columns / 2] or e4m3 [E, rows, columns], contiguous.
        scales: what the format keeps beside them.
        dtype: what an expert is dequantised to.
        transposed: rows are inputs and columns outputs, rather than the other way round.
    """

    storage: str
    packed: Tensor
    scales: tuple[Tensor, ...]
    dtype: torch.dtype
    transposed: bool = False

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
        """The same storage, dequantised to another dtype."""
        return replace(self, dtype=dtype)

    def transpose(self, first: int, second: int) -> PackedWeight:
        """In and out exchanged; nothing is moved."""
        assert {first % 3, second % 3} == {1, 2}, (first, second)
        return replace(self, transposed=not self.transposed)

    def __getitem__(self, e: int) -> Tensor:
        """One expert, [out, in], dequantised."""
        return self.experts(e, e + 1)[0]

    def stored_experts(self, start: int, end: int) -> Tensor:
        """Experts ``start`` to ``end`` dequantised, as stored: [end - start, rows, columns]."""
        return FORMATS[self.storage].dequantize(self, start, end)

    def experts(self, start: int, end: int) -> Tensor:
        """Experts ``start`` to ``end`` dequantised, [end - start, out, in]."""
        stored = self.stored_experts(start, end)
        return stored.transpose(1, 2) if self.transposed else stored

    def nbytes(self) -> int:
        """What the storage takes, scales included."""
        return sum(t.numel() * t.element_size() for t in (self.packed, *self.scales))


@dataclass(frozen=True)
class Format:
    """What the rest needs to know of a storage.

    Attributes:
        per_element: values to an element of the packed tensor.
        scales: tensors that are kept beside it.
        dequantize: experts ``start`` to ``end`` of a weight, as stored, in the weight's dtype.
    """

    per_element: int
    scales: int
    dequantize: Callable[[PackedWeight, int, int], Tensor]


def _nf4_experts(w: PackedWeight, start: int, end: int) -> Tensor:
    """The blocks of 64 are counted through the whole stack."""
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
    """Refuse what cannot be stored so.

    Args:
        weight: [E, rows, columns], as stored.
        storage: one of :data:`STORAGES`.
        where: names the parameter in errors.

    Raises:
        UnsupportedModelError: the storage is unknown or the weight's shape or dtype is not for it.
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
    """Quantise a weight [E, rows, columns], as stored, onto a device.

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
    """Weights as plain tensors, the scales that belong to them, and the storage ("" if none).

    Raises:
        UnsupportedOptionError: the two projections are not stored in the same way.
    """
    w13: Any = w.w13_EHD
    w2: Any = w.w2_EDF
    if not isinstance(w13, PackedWeight) and not isinstance(w2, PackedWeight):
        return w, [], ""
    storages = {_storage(w13), _storage(w2)}
    if len(storages) > 1:
        raise UnsupportedOptionError(
            f"experts_mlp: the two projections are stored as {' and '.join(sorted(storages))}; "
            "accepted: both in the same way"
        )
    plain = w._replace(w13_EHD=w13.packed, w2_EDF=w2.packed)
    return plain, [*w13.scales, *w2.scales], storages.pop()


def packed_weights(
    w: ExpertWeights, scales: list[Tensor], storage: str, dtype: torch.dtype
) -> ExpertWeights:
    """The inverse of :func:`plain_weights`; experts are dequantised to ``dtype``."""
    if not storage:
        return w
    kind, _, transposed = storage.partition(" ")
    half = len(scales) // 2

    def packed(tensor: Tensor, own: list[Tensor]) -> Any:
        return PackedWeight(kind, tensor, tuple(own), dtype, bool(transposed))

    return w._replace(
        w13_EHD=packed(w.w13_EHD, scales[:half]), w2_EDF=packed(w.w2_EDF, scales[half:])
    )


def _storage(weight: Tensor | PackedWeight) -> str:
    if not isinstance(weight, PackedWeight):
        return str(weight.dtype)
    return f"{weight.storage} transposed" if weight.transposed else weight.storage
