"""Select FP8 products for experts stored in FP8 and keep their transposed copies."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moe_patch.formats.packed import PackedWeight
from moe_patch.types import ExpertWeights

# Values of the option compute of PatchConfig with a meaning of their own; the third is "fp8".
DECODED, FP8_COPY = "decoded", "fp8_copy"


@dataclass
class Copies:
    """Transposed copies of an experts module's packed weights; not copied or pickled with it.

    Attributes:
        made: by projection: the packed values, their version, and the copy's values and scales.
    """

    made: dict[str, tuple[Tensor, int, tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Copies:
        return Copies()

    def __reduce__(self) -> tuple[Any, tuple]:
        return Copies, ()

    def of(self, name: str, w: PackedWeight) -> tuple[Tensor, ...]:
        """Return the copy's values and scales, made on first use and after the weight changed.

        While a compiler traces, an existing copy is used and none is made.
        """
        found = self.made.get(name)
        if torch.compiler.is_compiling():
            return () if found is None else found[2]
        if found is None or found[0] is not w.packed or found[1] != w.packed._version:
            copy = w.packed.transpose(1, 2).contiguous(), w.scales[0].transpose(1, 2).contiguous()
            self.made[name] = found = w.packed, w.packed._version, copy
        return found[2]


def in_fp8(w: ExpertWeights, compute: str, copies: Copies | None) -> ExpertWeights:
    """Return weights whose products compute in FP8 where the kernels support them.

    Args:
        w: the weights; those not stored in FP8 are returned unchanged.
        compute: option of :class:`moe_patch.PatchConfig`.
        copies: holds transposed copies for backward; None leaves backward as it is.
    """
    weights: dict[str, Any] = {"w13_EHD": w.w13_EHD, "w2_EDF": w.w2_EDF}
    if compute == DECODED:
        return w
    for name, weight in weights.items():
        if not isinstance(weight, PackedWeight) or weight.storage != "fp8":
            return w
        scales = weight.scales
        if copies is not None and compute == FP8_COPY and not weight.transposed:
            scales = (*scales, *copies.of(name, weight))
        weights[name] = replace(weight, in_fp8=True, scales=scales)
    return w._replace(**weights)
