"""Select FP8 products for experts stored in FP8 and keep their transposed copies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moe_patch.formats.packed import PackedWeight
from moe_patch.ops.backend import capability_of, choose_backend
from moe_patch.types import ExpertWeights, Glu

# Values of the option compute of PatchConfig with a meaning of their own; the third is "fp8".
DECODED, FP8_COPY = "decoded", "fp8_copy"


# Values and scales of a copy; empty if FP8 products do not run on the weight's device.
Copy = tuple[Tensor, ...]


@dataclass
class Copies:
    """Transposed copies of an experts module's packed weights; not copied or pickled with it.

    Attributes:
        made: by projection: the packed values, their version, and the copy.
    """

    made: dict[str, tuple[Tensor, int, Copy]] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Copies:
        return Copies()

    def __reduce__(self) -> tuple[Any, tuple]:
        return Copies, ()

    def of(self, name: str, w: PackedWeight, runs: Callable[[], bool]) -> Copy:
        """Return the copy's values and scales, made on first use and after the weight changed.

        Compiled code makes a copy in each forward, unless a forward outside it has left one. It
        cannot read a tensor's version, so only another tensor counts as a change there. Loading a
        state dict discards all copies (:mod:`moe_patch.quant.state`).

        Args:
            name, w: the projection and its weight.
            runs: returns whether a call's products are in FP8; if not, no copy is made.
        """
        found = self.made.get(name)
        if torch.compiler.is_compiling():
            if found is None or found[0] is not w.packed:
                return _transposed(w)
            return found[2]
        if found is None or found[0] is not w.packed or found[1] != w.packed._version:
            return self._make(name, w, runs)
        return found[2] or self._make(name, w, runs)

    def _make(self, name: str, w: PackedWeight, runs: Callable[[], bool]) -> Copy:
        copy: Copy = _transposed(w) if runs() else ()
        self.made[name] = w.packed, w.packed._version, copy
        return copy


def _transposed(w: PackedWeight) -> Copy:
    return w.packed.transpose(1, 2).contiguous(), w.scales[0].transpose(1, 2).contiguous()


def in_fp8(
    w: ExpertWeights,
    compute: str,
    copies: Copies | None,
    x_TD: Tensor,
    glu: Glu,
    backend: str = "auto",
) -> ExpertWeights:
    """Return weights whose products compute in FP8 where the kernels support them.

    The same object is returned if they do not: for another storage, card or backend.

    Args:
        w: the weights.
        compute: option of :class:`moe_patch.PatchConfig`.
        copies: holds transposed copies for backward; None leaves backward as it is. So do weights
            that FSDP2 gathered, whose copies would keep every layer on every rank.
        x_TD, glu, backend: of the call.
    """
    weights: dict[str, Any] = {"w13_EHD": w.w13_EHD, "w2_EDF": w.w2_EDF}
    if compute == DECODED or not _is_hopper(x_TD, backend):
        return w
    for name, weight in weights.items():
        if not isinstance(weight, PackedWeight) or weight.storage != "fp8":
            return w
        scales = weight.scales
        if copies is not None and compute == FP8_COPY and not weight.gathered:
            runs = functools.partial(_runs, w, glu, x_TD)
            scales = (*scales, *copies.of(name, weight, runs))
        weights[name] = replace(weight, in_fp8=True, scales=scales)
    return w._replace(**weights)


def _is_hopper(x_TD: Tensor, backend: str) -> bool:
    """Return whether a call runs on the Triton backend of a Hopper card."""
    device = x_TD.device
    if device.type != "cuda" or choose_backend(backend, device, x_TD.dtype).name != "triton":
        return False
    return torch.version.hip is None and capability_of(device) == (9, 0)


def _runs(w: ExpertWeights, glu: Glu, x_TD: Tensor) -> bool:
    """Return whether the kernels multiply a call's rows in FP8 if it has enough of them."""
    from moe_patch.kernels.common.device import device_of
    from moe_patch.kernels.experts.fp8 import why_not_fp8

    w13: Any = w.w13_EHD
    return not why_not_fp8(
        device_of(x_TD).capability,
        x_TD.dtype,
        (w13.shape[1], w13.shape[2]),
        glu,
        biased=w.b13_EH is not None or w.b2_ED is not None,
        transposed=w13.transposed,
    )
