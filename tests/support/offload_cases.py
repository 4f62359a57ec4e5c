"""A transfer for CPU tests of offloaded experts: as late as allowed, and with a diary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.runtime.module_patch import patch_of
from moe_patch.runtime.offload import Offload, Seat
from moe_patch.runtime.transfers import HostTransfer
from tests.support.adapters import expert_modules

POISON = 0xFF  # As bf16, fp32 or e4m3: NaN.


class LateTransfer(HostTransfer):
    """Copies when it is waited for; until then the target holds poison.

    Attributes:
        buffers: bytes of every buffer that was made.
        copied: the sources of every copy.
        marks: how many ends of a call were marked.
        lent: address of the slot that was waited for last.
        ends: the mark of each slot's last call.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.buffers: list[int] = []
        self.copied: list[list[Tensor]] = []
        self.marks = 0
        self.lent = 0
        self.ends: dict[int, int] = {}

    def buffer(self, nbytes: int) -> Tensor:
        self.buffers.append(nbytes)
        return super().buffer(nbytes).fill_(POISON)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Any) -> Any:
        pairs = list(pairs)
        slot = pairs[0][0].untyped_storage()
        # The first copy into a slot waits for nothing, any other one for the slot's last call.
        assert after == self.ends.get(slot.data_ptr())
        slot.fill_(POISON)
        self.copied.append([source for _, source in pairs])
        return slot.data_ptr(), pairs

    def wait(self, event: Any) -> None:
        self.lent, pairs = event
        for into, source in pairs:
            into.copy_(source)
        pairs.clear()

    def mark(self) -> int:
        self.marks += 1
        self.ends[self.lent] = self.marks
        return self.marks


def seats(model: nn.Module) -> list[Seat]:
    return [patch_of(experts).seat for experts in expert_modules(model)]  # type: ignore[union-attr]


def state_of(model: nn.Module) -> Offload:
    return seats(model)[0].offload


def transfer_of(model: nn.Module) -> LateTransfer:
    """Return the transfer of a model that has run once on the CPU."""
    (lane,) = state_of(model).lanes.values()
    found = lane.transfer
    assert isinstance(found, LateTransfer)
    return found


def blocks_copied(model: nn.Module) -> list[int]:
    """Return the place of the block of each copy since the last call of this function."""
    of = {seat.block.sources[0].data_ptr(): seat.index for seat in seats(model) if seat.block}
    copied = transfer_of(model).copied
    found = [of[sources[0].data_ptr()] for sources in copied]
    copied.clear()
    return found
