"""Experts in host memory: the device holds copies of two blocks' weights at a time.

patch_model gives every experts module a Seat, its place in the order of the blocks. The seats of a
model share one Offload, which has a Lane for every device that computes. A lane has two slots. A
call borrows its block's weights from one of them; meanwhile the next block's are copied into the
other. Forward runs in the order of the blocks, backward and the forward that checkpointing repeats
inside it in reverse. Autograd never saves a copy: backward borrows again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.formats.packed import PackedWeight
from moe_patch.runtime.lanes import Block, Lane
from moe_patch.runtime.taps import eagerly
from moe_patch.runtime.transfers import LEAST_LOCKED, LockedMemory, Transfer, transfer_to
from moe_patch.types import ExpertWeights, Lora


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

    def check_adapter(self, lora: Lora, device: torch.device) -> None:
        """Refuse an adapter that PEFT put beside the weights, in host memory.

        Raises:
            UnsupportedModelError: it is not on the device that computes.
        """
        if lora.A_ERI.device != device:
            raise UnsupportedModelError(
                f"{self.where}: an adapter is on {lora.A_ERI.device}, the hidden states are on "
                f"{device}; accepted: adapters on the device that computes (model.to({device}) "
                "moves them and leaves the experts)"
            )

    def loan(self, weights: ExpertWeights, dtype: torch.dtype, device: torch.device) -> Loan:
        """Return a loan of these weights, in a compute dtype, to a device.

        Raises:
            UnsupportedOptionError: gradients are on and an expert weight requires one, or a CUDA
                graph is being captured.
        """
        if torch.is_grad_enabled() and any(
            isinstance(w, Tensor) and w.requires_grad for w in (weights.w13_EHD, weights.w2_EDF)
        ):
            raise UnsupportedOptionError(
                f"{self.where}: requires_grad is True, but offloaded experts get no gradient and "
                "no optimiser state; accepted: frozen experts (adapters on them, requires_grad_"
                "(False)), torch.no_grad(), or offload_experts=False to train them"
            )
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UnsupportedOptionError(
                f"{self.where}: a CUDA graph is being captured, but offloaded experts are copied "
                "anew in each call; accepted: calls outside graphs, or offload_experts=False"
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
