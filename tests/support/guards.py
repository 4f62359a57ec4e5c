"""Guard bands around every tensor a kernel can reach: stray reads give NaN, stray writes show.

    with Guards() as guards:
        x = guards.put(x)              an operand between two bands of poison
        out = kernel(x)                what it allocates lies between bands too, itself poisoned
    guards.check()                     every band is as it was

A band is NaN for floating tensors. For integers it is 1, an expert and a row that exist, so that a
stray read counts wrongly and shows in the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
BAND = 512  # elements; keeps the alignment that an allocation has
FILLED = {aten.new_zeros.default: 0, aten.zeros.default: 0, aten.zeros_like.default: 0}
EMPTY = (
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default,
    aten.new_empty.default, aten.new_empty_strided.default,
)  # fmt: skip


def poison_of(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else 1


class Guards(TorchDispatchMode):
    """Put bands around operands on request, and around everything that is allocated inside.

    Args:
        shift: elements by which operands are moved off the alignment of an allocation.
    """

    def __init__(self, shift: int = 0) -> None:
        super().__init__()
        self.shift = shift
        self.whole: list[tuple[Tensor, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in EMPTY and made.device.type == "meta":
            return made  # a recorded pass keeps the dtype of an operand this way
        if func in EMPTY:
            return self._banded(made, 0)
        if func in FILLED:
            return self._banded(made, 0).fill_(FILLED[func])
        return made

    def put(self, tensor: Tensor) -> Tensor:
        """Return a copy of ``tensor`` with its strides, between bands, also between its rows."""
        made = self._banded(tensor, self.shift)
        if 0 in tensor.stride():  # expanded: torch does not copy into overlapping memory
            narrow = [slice(0, 1) if s == 0 else slice(None) for s in tensor.stride()]
            made[tuple(narrow)].copy_(tensor[tuple(narrow)])
        else:
            made.copy_(tensor)
        return made

    def _banded(self, like: Tensor, shift: int) -> Tensor:
        """Return poisoned memory between bands, with ``like``'s shape and strides."""
        size = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
        size = size if like.numel() else 0
        whole = torch.full(
            (size + 2 * BAND + shift,), poison_of(like.dtype), dtype=like.dtype, device=like.device
        )
        self.whole.append((whole, BAND + shift, BAND + shift + size))
        return whole.as_strided(like.shape, like.stride(), BAND + shift)

    def check(self) -> int:
        """Expect every band to hold its poison, and return the number of guarded tensors."""
        for whole, start, end in self.whole:
            for band in (whole[:start], whole[end:]):
                clean = (
                    band.float().isnan()  # FP8 has no such operation
                    if whole.is_floating_point()
                    else band == poison_of(whole.dtype)
                )
                assert clean.all(), f"written outside a tensor of {end - start} {whole.dtype}"
        return len(self.whole)
