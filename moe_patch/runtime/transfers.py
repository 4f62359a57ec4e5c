"""Copies of host memory to a device, beside its computation, and page-locked host memory.

Transfers are the only part of offloading that depends on the device. CUDA's has a stream of its own
and events. The other one copies at once, so that a machine without a card runs the same logic.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_patch.errors import UnsupportedOptionError

# Smaller storages share their pages with other memory, and CUDA locks a page only once.
LEAST_LOCKED = 1 << 20


class Transfer(Protocol):
    """Copies from host memory to one device. Events are None where nothing runs beside the host.

    Attributes:
        locks: sources have to be page-locked.
    """

    locks: bool

    def buffer(self, nbytes: int) -> Tensor:
        """Return device memory, uint8 [nbytes], that copies and computation may both use."""

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Any) -> Any:
        """Start to copy each second tensor into the first, after an event; return the end."""

    def wait(self, event: Any) -> None:
        """Let all that the host launches from now on start after an event."""

    def mark(self) -> Any:
        """Return the event that all that was launched so far is done."""


class HostTransfer:
    """Copies of the host itself, done when they return."""

    locks = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Any) -> Any:
        for into, source in pairs:
            into.copy_(source)

    def wait(self, event: Any) -> None:
        """Return: every copy is done already."""

    def mark(self) -> Any:
        return None


class CudaTransfer:
    """Copies on a side stream of a CUDA device."""

    locks = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def buffer(self, nbytes: int) -> Tensor:
        made = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        # When it is freed, the allocator waits for both streams. A block reused by the allocator
        # may still be read by kernels launched before, so copies wait for those as well.
        made.record_stream(self.stream)
        self.stream.wait_event(self.mark())
        return made

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Any) -> Any:
        if after is not None:
            self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            for into, source in pairs:
                into.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def mark(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event()


def transfer_to(device: torch.device) -> Transfer:
    """Return the transfer to a device."""
    return CudaTransfer(device) if device.type == "cuda" else HostTransfer(device)


class LockedMemory:
    """Page-locks a storage in place for as long as this object lives, without copying it.

    It keeps the storage alive: locked memory that is freed and handed out again would be read by
    CUDA at its old physical address.
    """

    def __init__(self, storage: torch.UntypedStorage, where: str) -> None:
        code = int(torch.cuda.cudart().cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0))
        if code != 0:
            raise UnsupportedOptionError(
                f"{where}: offload_experts needs page-locked host memory, and CUDA refused to lock "
                f"{storage.nbytes() / 2**30:.2f} GiB (error {code}, "
                f"{torch.cuda.cudart().cudaGetErrorString(torch.cuda.cudart().cudaError(code))}); "
                "accepted: enough free memory that may be locked (ulimit -l, the container's "
                "limit), a smaller storage (quantize_experts), or offload_experts=False"
            )
        self._unlock = weakref.finalize(self, _unlock, storage)
        self._unlock.atexit = False  # The process frees it, and CUDA may be gone by then.

    def unlock(self) -> None:
        """Unlock now; the memory stays."""
        self._unlock()


def _unlock(storage: torch.UntypedStorage) -> None:
    torch.cuda.synchronize()  # A copy may still read it.
    torch.cuda.cudart().cudaHostUnregister(storage.data_ptr())
