"""Device properties that a launch needs, and the few switches that depend on them."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_patch.errors import PatchStateError


class Device(NamedTuple):
    """Properties by which tiles are chosen; the device's name is never used.

    Attributes:
        capability: (major, minor); (0, 0) for Triton's CPU interpreter. (8, 0) on HIP, whose own
            numbers mean something else (an MI200 reports 9.0).
        shared_memory: bytes of shared memory that one block can opt in to.
        multiprocessors: number of programs that a persistent kernel starts.
    """

    capability: tuple[int, int]
    shared_memory: int
    multiprocessors: int


INTERPRETER = Device((0, 0), 1 << 30, 2)


def device_of(tensor: Tensor) -> Device:
    """Return the device that runs kernels over ``tensor``."""
    index = tensor.get_device()
    return INTERPRETER if index < 0 else _cuda_device(index)


def device_at(device: torch.device) -> Device:
    """Return a CUDA or HIP device by its index; without an index, the current one."""
    return _cuda_device(torch.cuda.current_device() if device.index is None else device.index)


def approximate(tensor: Tensor) -> bool:
    """Return whether a kernel may use CUDA's approximate functions: only for 16-bit results."""
    on_cuda = device_of(tensor) != INTERPRETER and torch.version.hip is None
    return on_cuda and tensor.dtype.itemsize == 2


@functools.cache
def _cuda_device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(
        (properties.major, properties.minor) if torch.version.hip is None else (8, 0),
        properties.shared_memory_per_block_optin,
        properties.multi_processor_count,
    )


class _OnThisDevice(contextlib.AbstractContextManager):
    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        _explain(error)


class _OnAnotherDevice(torch.cuda.device):
    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        _explain(error)


def _explain(error: BaseException | None) -> None:
    """Replace CUDA's error for a kernel that is loaded during graph capture by what to do."""
    if isinstance(error, RuntimeError) and "stream is capturing" in str(error):
        raise PatchStateError(
            "moe_patch: a kernel had to be loaded while a CUDA graph was captured, which CUDA "
            "forbids; accepted: kernels that have run before. Run the block once on the same "
            "number of tokens, or moe_patch.tools.warmup.warmup(model), and capture again"
        ) from error


_ON_THIS_DEVICE = _OnThisDevice()
# The private function does not check that CUDA is initialised; it is, if a tensor is on the device.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager:
    """Return a context in which the tensor's device is current: Triton launches on that one.

    Raises:
        PatchStateError: a kernel has to be loaded while a CUDA graph is captured.
    """
    return _ON_THIS_DEVICE if is_current(tensor) else _OnAnotherDevice(tensor.device)


def is_current(tensor: Tensor) -> bool:
    """Return whether a tensor is on the current device, or on a CPU under the interpreter."""
    index = tensor.get_device()
    return index < 0 or index == _current_device()


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


@functools.cache
def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least ``n``; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()
