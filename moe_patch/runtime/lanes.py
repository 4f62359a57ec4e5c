"""Two slots of device memory, into which blocks' weights are copied from host memory.

The order of the blocks is in :mod:`moe_patch.runtime.offload`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_patch.runtime.transfers import Transfer

# Parts of a slot start at multiples of this, as tensors of torch's own allocator do.
_ALIGNED = 512


class Block(NamedTuple):
    """One block's expert weights in host memory.

    Attributes:
        place: its number in the order of the blocks.
        sources: what is copied, by part: packed bytes and scales, or the weight.
        split: True for parts of which expert e has the e-th of E equal pieces.
        stamps: address and version of every part; a copy with other stamps is out of date.
    """

    place: int
    sources: tuple[Tensor, ...]
    split: tuple[bool, ...]
    stamps: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Size of a slot that holds it."""
        return sum(-(-t.nbytes // _ALIGNED) * _ALIGNED for t in self.sources)


class Slot:
    """Device memory for one block.

    Attributes:
        buffer: the memory; empty before the first use.
        views: the parts of the block in it.
        holds: place and stamps of the block, or None.
        ready, used: events: the copy is complete; the last call that borrowed it is done.
    """

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.views: list[Tensor] = []
        self.holds: tuple[int, Any] | None = None
        self.ready: Any = None
        self.used: Any = None


class Lane:
    """The two slots of one device."""

    def __init__(self, transfer: Transfer, largest: Callable[[], int]) -> None:
        self.transfer, self.largest = transfer, largest
        self.slots = [Slot(), Slot()]
        self.lock = threading.Lock()
        self.last = -1

    @contextmanager
    def lend(self, block: Block, following: Block | None, again: bool) -> Iterator[list[Tensor]]:
        """Lend a block's parts for the calls inside; start to copy the following block.

        Args:
            block: the block.
            following: the block that is likely to be next.
            again: the call is part of a backward. Otherwise it begins a new pass over the model
                unless the blocks ascend, and nothing copied in an earlier pass is used.
        """
        # The lock holds until the call's kernels are launched: another thread's copy comes after.
        with self.lock:
            if not again and block.place <= self.last:
                self._forget()
            self.last = block.place
            slot = self._holding(block)
            if slot is None:
                slot = self._fill(self.slots[0], block)
            self.slots.remove(slot)
            self.slots.append(slot)
            if following is not None and self._holding(following) is None:
                self._fill(self.slots[0], following)
            yield from self._lent(slot)

    @contextmanager
    def lend_some(self, block: Block, experts: list[int], count: int) -> Iterator[list[Tensor]]:
        """Lend a block of ``count`` experts; only some are copied, the others are undefined."""
        with self.lock:
            self._forget()
            slot = self._fill(self.slots[0], block, experts, count)
            self.slots.reverse()
            yield from self._lent(slot)

    def _lent(self, slot: Slot) -> Iterator[list[Tensor]]:
        self.transfer.wait(slot.ready)
        try:
            yield slot.views
        finally:
            slot.used = self.transfer.mark()

    def _forget(self) -> None:
        for slot in self.slots:
            slot.holds = None

    def _holding(self, block: Block) -> Slot | None:
        wanted = block.place, block.stamps
        return next((slot for slot in self.slots if slot.holds == wanted), None)

    def _fill(
        self, slot: Slot, block: Block, experts: list[int] | None = None, count: int = 0
    ) -> Slot:
        """Start to copy a block, or some of its experts, into a slot."""
        slot.holds = None
        # In inference mode, memory would be made that no later training step may write.
        with torch.inference_mode(False), torch.no_grad():
            if slot.buffer is None or slot.buffer.numel() < block.nbytes:
                slot.views, slot.buffer = [], None
                slot.buffer = self.transfer.buffer(max(block.nbytes, self.largest()))
            slot.views = _laid_out(slot.buffer, block.sources)
            pairs = list(zip(slot.views, block.sources, strict=True))
            if experts is not None:
                pairs = _pieces(pairs, block.split, experts, count)
            slot.ready = self.transfer.copy(pairs, slot.used)
        if experts is None:
            slot.holds = block.place, block.stamps
        return slot


def _laid_out(buffer: Tensor, parts: tuple[Tensor, ...]) -> list[Tensor]:
    """Return views of a buffer with the dtypes, shapes and order of axes of the parts."""
    views, start = [], 0
    for part in parts:
        own = buffer[start : start + part.nbytes].view(part.dtype)
        # A part with gaps is laid out without them, any other one as it is.
        strides = torch.empty_like(part, device="meta").stride()
        views.append(own.as_strided(part.shape, strides, own.storage_offset()))
        start += -(-part.nbytes // _ALIGNED) * _ALIGNED
    return views


def _pieces(
    pairs: list[tuple[Tensor, Tensor]], split: tuple[bool, ...], experts: list[int], count: int
) -> list[tuple[Tensor, Tensor]]:
    """Return the pairs of pieces that hold some of ``count`` experts; unsplit parts are whole."""
    found = []
    for (into, source), by_expert in zip(pairs, split, strict=True):
        if not by_expert:
            found.append((into, source))
            continue
        if into.dim() == 1:  # NF4's scales, numbered through all experts
            into, source = into.view(count, -1), source.view(count, -1)
        found += [(into[e], source[e]) for e in experts]
    return found
