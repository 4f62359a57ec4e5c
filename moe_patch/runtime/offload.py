"""Experts in host memory: the device holds copies of two blocks' weights at a time.

patch_model gives every experts module a Seat, its place in the order of the blocks. The seats of a
model share one Offload, which has a Lane for every device that computes. A lane has two slots. A
call borrows its block's weights from one of them; meanwhile the next block's are copied into the
other. Forward runs in the order of the blocks, backward and the forward that checkpointing repeats
inside it in reverse. Autograd never saves a copy: backward borrows again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.formats.packed import PackedWeight
from moe_patch.runtime.taps import eagerly
from moe_patch.runtime.transfers import LEAST_LOCKED, LockedMemory, Transfer, transfer_to
from moe_patch.types import ExpertWeights

# Parts of a slot start at multiples of this, as tensors of torch's own allocator do.
_ALIGNED = 512


class Block(NamedTuple):
    """One block's expert weights in host memory.

    Attributes:
        index: place in the order of the blocks.
        sources: what is copied, by part: packed bytes and scales, or the weight.
        split: True for parts of which expert e has the e-th of E equal pieces.
        stamps: address and version of every part; a copy with other stamps is out of date.
    """

    index: int
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
        holds: index and stamps of the block, or None.
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
            if not again and block.index <= self.last:
                self._forget()
            self.last = block.index
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
        wanted = block.index, block.stamps
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
            slot.holds = block.index, block.stamps
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


class Offload:
    """State that the offloaded experts of one model share.

    Copies and pickles of a model start with none of it and find their seats again.

    Attributes:
        seats: the experts modules' seats by place; a seat lives as long as its module's patch.
        transfer_to: makes the transfer to a device.
    """

    def __init__(self) -> None:
        self.seats: weakref.WeakValueDictionary[int, Seat] = weakref.WeakValueDictionary()
        self.lanes: dict[torch.device, Lane] = {}
        self.transfer_to: Callable[[torch.device], Transfer] = transfer_to

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Offload.__init__(self)

    def lane(self, device: torch.device) -> Lane:
        """Return the lane of a device."""
        if device not in self.lanes:
            self.lanes[device] = Lane(self.transfer_to(device), self._largest)
        return self.lanes[device]

    def _largest(self) -> int:
        return max((seat.block.nbytes for seat in self.seats.values() if seat.block), default=0)

    def following(self, seat: Seat, again: bool) -> Block | None:
        """Return the block that is likely to be next on a seat's device, if it is known."""
        found = self.seats.get(seat.index + (-1 if again else 1))
        here = found is not None and found.device in (None, seat.device)
        return found.block if found is not None and here else None


class Seat:
    """One experts module's place among the offloaded ones.

    Attributes:
        offload: what the model's seats share.
        index: place in the order of the blocks.
        where: path and class of the module, for errors.
        homes: parameter -> device on which it was before the patch.
        block: the weights as last read.
        device: the device that last computed with them.
        eagerly: calls ``function(*args)`` outside compiled code (one graph break).
    """

    def __init__(self, offload: Offload, index: int, where: str) -> None:
        self.__setstate__({"offload": offload, "index": index, "where": where, "homes": {}})

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("offload", "index", "where", "homes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.offload: Offload = state["offload"]
        self.index: int = state["index"]
        self.where: str = state["where"]
        self.homes: dict[str, torch.device] = dict(state["homes"])
        self.block: Block | None = None
        self.device: torch.device | None = None
        self.locked: list[LockedMemory] | None = None
        self.eagerly = eagerly()
        self.offload.seats[self.index] = self

    def read(self, weights: ExpertWeights, lock: bool) -> Block:
        """Return the block of these weights; page-lock them first if ``lock`` and not done yet.

        Raises:
            UnsupportedModelError: a weight is not in host memory.
            UnsupportedOptionError: CUDA cannot lock the memory.
        """
        parts = [part for w in (weights.w13_EHD, weights.w2_EDF) for part in parts_of(w)]
        stamps = stamps_of(parts)
        done = self.locked is not None or not lock
        if self.block is not None and self.block.stamps == stamps and done:
            return self.block
        for part in parts:
            if part.device.type != "cpu":
                raise UnsupportedModelError(
                    f"{self.where}: the experts are on {part.device}, but offload_experts keeps "
                    "them in host memory; accepted: weights that stay there (replace them on the "
                    "CPU), or unpatch_model before moving them"
                )
        packed = isinstance(weights.w13_EHD, PackedWeight)
        split = (True, *(i == 1 for i in range(1, len(parts) // 2))) * 2
        sources = self._lock(parts, packed) if lock else parts
        self.block = Block(self.index, tuple(sources), split, stamps)
        return self.block

    def _lock(self, parts: list[Tensor], packed: bool) -> list[Tensor]:
        """Page-lock the parts in place; of a packed weight's few small ones lock a copy."""
        self.locked, sources, seen = [], [], set()
        for part in parts:
            storage = part.untyped_storage()
            if storage.nbytes() >= LEAST_LOCKED:
                if not part.is_pinned() and storage.data_ptr() not in seen:
                    self.locked.append(LockedMemory(storage, self.where))
                seen.add(storage.data_ptr())
            sources.append(part.pin_memory() if packed and not part.is_pinned() else part)
        return sources

    def unlock(self) -> None:
        """Give up all that this seat holds; lanes lose what they copied."""
        for one in self.locked or ():
            one.unlock()
        self.locked = self.block = None

    def loan(self, weights: ExpertWeights, dtype: torch.dtype, device: torch.device) -> Loan:
        """Return a loan of these weights, in a compute dtype, to a device.

        Raises:
            UnsupportedOptionError: gradients are on and an expert weight requires one.
        """
        if torch.is_grad_enabled() and any(
            isinstance(w, Tensor) and w.requires_grad for w in (weights.w13_EHD, weights.w2_EDF)
        ):
            raise UnsupportedOptionError(
                f"{self.where}: requires_grad is True, but offloaded experts get no gradient and "
                "no optimiser state; accepted: frozen experts (adapters on them, requires_grad_"
                "(False)), torch.no_grad(), or offload_experts=False to train them"
            )
        self.device = device
        return Loan(self, weights, dtype)


class Loan:
    """Weights of one call, borrowed for its forward and again for its backward."""

    def __init__(self, seat: Seat, weights: ExpertWeights, dtype: torch.dtype) -> None:
        assert seat.device is not None
        self.seat, self.weights, self.dtype = seat, weights, dtype
        self.lane = seat.offload.lane(seat.device)
        self.block = seat.read(weights, self.lane.transfer.locks)

    @contextmanager
    def forward(self, ids_TK: Tensor) -> Iterator[ExpertWeights]:
        """Lend the weights on the device; with few rows and no gradients only those in use."""
        E = self.weights.w2_EDF.shape[0]
        if not torch.is_grad_enabled() and 2 * ids_TK.numel() <= E:
            used = sorted({e for e in ids_TK.flatten().tolist() if 0 <= e < E})
            with self.lane.lend_some(self.block, used, E) as parts:
                yield self._weights(parts)
        else:
            with self._whole(in_backward()) as weights:
                yield weights

    @contextmanager
    def backward(self) -> Iterator[ExpertWeights]:
        """Lend the weights on the device for backward.

        Raises:
            UnsupportedModelError: they were changed in place since forward.
        """
        parts = [part for w in (self.weights.w13_EHD, self.weights.w2_EDF) for part in parts_of(w)]
        if stamps_of(parts) != self.block.stamps:
            raise UnsupportedModelError(
                f"{self.seat.where}: the expert weights were changed in place between forward and "
                "backward; accepted: changes before forward or after backward"
            )
        with self._whole(again=True) as weights:
            yield weights

    @contextmanager
    def _whole(self, again: bool) -> Iterator[ExpertWeights]:
        following = self.seat.offload.following(self.seat, again)
        with self.lane.lend(self.block, following, again) as parts:
            yield self._weights(parts)

    def _weights(self, parts: list[Tensor]) -> ExpertWeights:
        half = len(parts) // 2
        w = self.weights
        return w._replace(
            w13_EHD=_on_device(w.w13_EHD, parts[:half], self.dtype),
            w2_EDF=_on_device(w.w2_EDF, parts[half:], self.dtype),
        )


def _on_device(weight: Any, parts: list[Tensor], dtype: torch.dtype) -> Any:
    if isinstance(weight, PackedWeight):
        return replace(weight, packed=parts[0], scales=tuple(parts[1:]), dtype=dtype)
    return parts[0].to(dtype)


def parts_of(weight: Tensor | PackedWeight) -> tuple[Tensor, ...]:
    """Return the tensors that hold a weight."""
    return (weight.packed, *weight.scales) if isinstance(weight, PackedWeight) else (weight,)


def stamps_of(parts: list[Tensor]) -> tuple[tuple[int, int], ...]:
    """Return address and version of tensors; those made in inference mode have no version."""
    return tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in parts)


def in_backward() -> bool:
    """Return whether this thread runs a backward: a forward inside is one that is repeated."""
    return torch._C._current_graph_task_id() != -1
