"""What a launch needs to know of the device, and the few switches that depend on it."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_patch.errors import PatchStateError


class Device(NamedTuple):
    """The properties that choose tiles: never a device's name.

    Attributes:
        capability: (major, minor); (0, 0) for Triton's CPU interpreter, (8, 0) on HIP, whose own
            numbers are of another series (an MI200 says 9.0).
        shared_memory: bytes one block may opt in to.
        multiprocessors: how many programs a persistent kernel starts.
    """

    capability: tuple[int, int]
    shared_memory: int
    multiprocessors: int


INTERPRETER = Device((0, 0), 1 << 30, 2)


def device_of(tensor: Tensor) -> Device:
    """The device that will run kernels over ``tensor``."""
    index = tensor.get_device()
    return INTERPRETER if index < 0 else _cuda_device(index)


def device_at(device: torch.device) -> Device:
    """A CUDA or HIP device by its place; without an index, the current one."""
    return _cuda_device(torch.cuda.current_device() if device.index is None else device.index)


def approximate(tensor: Tensor) -> bool:
    """Whether a kernel may use CUDA's approximate functions and conversions: 16-bit results."""
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
    """CUDA loads no kernel while a graph is captured: the cure, in place of CUDA's own words."""
    if isinstance(error, RuntimeError) and "stream is capturing" in str(error):
        raise PatchStateError(
            "moe_patch: a kernel had to be loaded while a CUDA graph was captured, which CUDA "
            "forbids; accepted: kernels that have run before. Run the block once on as many "
            "tokens, or moe_patch.tools.warmup.warmup(model), and capture again"
        ) from error


_ON_THIS_DEVICE = _OnThisDevice()
# Without the look whether CUDA was initialised: where a tensor is, it was.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be the tensor's.

    Raises:
        PatchStateError: a kernel has to be loaded while a CUDA graph is captured.
    """
    return _ON_THIS_DEVICE if is_current(tensor) else _OnAnotherDevice(tensor.device)


def is_current(tensor: Tensor) -> bool:
    """Return whether a tensor is on the current device, or the interpreter's."""
    index = tensor.get_device()
    return index < 0 or index == _current_device()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@functools.cache
def next_power_of_2(n: int) -> int:
    """The least power of two that is at least ``n``; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()
