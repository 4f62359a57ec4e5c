"""Choice of the backend that runs a block, from the request, the device and the dtype."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import warnings
from typing import NamedTuple, NoReturn

import torch

from moe_patch.errors import UnsupportedOptionError
from moe_patch.schema import check_choice

BACKENDS = ("auto", "torch", "triton")
_INTERPRETED = (
    "TRITON_INTERPRET is set, so Triton would run each kernel in NumPy on the host; unset it"
)
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class BackendChoice(NamedTuple):
    """The backend that runs ("torch" or "triton") and the reason, worded for the report."""

    name: str
    reason: str


def why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why Triton cannot run on this device and dtype, or None if it can."""
    if dtype not in TRITON_DTYPES:
        return f"Triton kernels take bf16, fp16 and fp32, not {dtype}"
    if device.type != "cuda":
        return f"no Triton kernels on {device.type}"
    # Look at sys.modules first: find_spec walks the file system, and every call of a block runs
    # this.
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if _interpreting():
        return _INTERPRETED
    if torch.version.hip is not None:
        return None
    major, minor = capability_of(device)
    if major < 8:
        return f"compute capability {major}.{minor} is below 8.0"
    return None


def _interpreting() -> bool:
    # Dynamo warns about functools.cache in code that it traces.
    return _set_to_interpret() if torch.compiler.is_compiling() else _read_once()


def _set_to_interpret() -> bool:
    """Return whether TRITON_INTERPRET has one of the values that Triton accepts as true."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@functools.cache
def _read_once() -> bool:
    """Read TRITON_INTERPRET once per process, as Triton does when a kernel is defined."""
    found = _set_to_interpret()
    if found:
        warnings.warn(f"moe_patch: using the torch backend: {_INTERPRETED}", stacklevel=2)
    return found


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device, also in code that Dynamo traces."""
    # Dynamo treats torch's function as a constant but warns about functools.cache in traced code.
    if device.index is None or torch.compiler.is_compiling():
        return torch.cuda.get_device_capability(device)
    return _cached_capability(device)


@functools.cache
def _cached_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability, cached: torch's function takes the host 4 µs per call."""
    return torch.cuda.get_device_capability(device)


def choose_backend(
    requested: str, device: torch.device, dtype: torch.dtype, batch_invariant: bool = False
) -> BackendChoice:
    """Resolve ``requested``: "auto" means Triton on CUDA (capability >= 8.0) and torch elsewhere.

    Raises:
        UnsupportedOptionError: "triton" was requested and cannot run on this device and dtype, or
            ``batch_invariant`` was requested and the torch backend would run.
    """
    choice = _choose(requested, device, dtype)
    if batch_invariant and choice.name == "torch":
        refuse_batch_invariant(choice.reason)
    return choice


def refuse_batch_invariant(why: str) -> NoReturn:
    """Raise: torch cannot guarantee the same bits for any number of rows.

    Raises:
        UnsupportedOptionError: always, with the reason ``why``.
    """
    raise UnsupportedOptionError(
        f"batch_invariant=True cannot hold: {why}, and torch selects its matrix products by the "
        "number of rows; accepted: experts on the Triton backend (CUDA, capability 8.0 and up, in "
        "bf16, fp16 or fp32); use batch_invariant=False"
    )


def _choose(requested: str, device: torch.device, dtype: torch.dtype) -> BackendChoice:
    if requested == "torch":
        return BackendChoice("torch", "requested")
    if requested not in BACKENDS:
        check_choice("backend", requested, BACKENDS)
    why_not = why_not_triton(device, dtype)
    if requested == "triton":
        if why_not is not None:
            raise UnsupportedOptionError(
                f"backend='triton' cannot hold: {why_not}; use backend='auto' or 'torch'"
            )
        return BackendChoice("triton", "requested")
    if why_not is None and torch.version.hip is not None:
        why_not = "on HIP, Triton runs only on request (backend='triton')"
    return BackendChoice("triton", "auto") if why_not is None else BackendChoice("torch", why_not)
