"""Check numbers from the command line against torch's generators and the device's memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moe_patch.cli.output import bytes_text
from moe_patch.errors import UnsupportedOptionError, first_line

# torch.manual_seed accepts any 64-bit integer, signed or unsigned.
LEAST_SEED, MOST_SEED = -(2**63), 2**64 - 1
_ALLOCATOR = "DefaultCPUAllocator: "


def check_seed(seed: int) -> None:
    """Refuse a seed that torch's generators do not accept.

    Raises:
        UnsupportedOptionError: it does not fit into 64 bits.
    """
    if not LEAST_SEED <= seed <= MOST_SEED:
        raise UnsupportedOptionError(f"--seed {seed}: accepted: {LEAST_SEED} to {MOST_SEED}")


def check_fits(what: str, needed: int, holds: str, device: torch.device) -> None:
    """Refuse a size whose largest tensors alone exceed the device's memory.

    Args:
        what: the options, with their values.
        needed: a lower bound in bytes.
        holds: the tensors that need them, in words.
        device: the device that would hold them.

    Raises:
        UnsupportedOptionError: says how much is needed and how much the device has.
    """
    there = memory_of(device)
    if there is not None and needed > there:
        raise UnsupportedOptionError(
            f"{what}: {holds} alone would take {bytes_text(needed)}, {device} has "
            f"{bytes_text(there)}; accepted: sizes that fit (fewer, or another --dtype)"
        )


def memory_of(device: torch.device) -> int | None:
    """Return the bytes of the device's memory, or None if they are unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu" or not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def cpu_memory_named() -> Iterator[None]:
    """Raise OutOfMemoryError, as on a GPU, where a CPU raises a plain RuntimeError.

    Raises:
        OutOfMemoryError: the CPU's allocator has no memory.
    """
    try:
        yield
    except RuntimeError as error:
        said = first_line(error)
        if _ALLOCATOR not in said:
            raise
        raise torch.OutOfMemoryError(f"{said.partition(_ALLOCATOR)[2]}.") from error
