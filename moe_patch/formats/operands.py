"""Packed weights as the plain tensors that an operator of torch can take, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_patch.errors import UnsupportedOptionError
from moe_patch.formats.packed import PackedWeight
from moe_patch.types import ExpertWeights


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
