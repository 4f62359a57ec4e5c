"""Table of Triton releases and what was tested on each; all decisions by release are made here.

Gluon is experimental, and its names change between releases. On a release that is not in the table,
Triton itself launches the kernels. The portable kernels run there until the user tests the Hopper
kernels on their own card (:mod:`moe_patch.kernels.common.trusted`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from moe_patch.kernels.common import trusted
from moe_patch.kernels.common.device import device_of


class Tested(NamedTuple):
    """Test results of a Triton release.

    Attributes:
        hopper: the Hopper kernels in Gluon work, and the registers of a matrix instruction's
            operands are not overwritten while it runs (tools/wgmma_operands.py).
        direct: the arguments of the C function that launches a kernel are known.
        as_tuple: that function takes the kernel's own arguments as one tuple.
        encoding: further arguments of ``make_tensordesc_arg``, after a descriptor and its metadata.
    """

    hopper: bool
    direct: bool
    as_tuple: bool = False
    encoding: tuple[Any, ...] = ()


# Launches were compared offline on every release here, argument by argument, for each kernel of
# tests/support/offline_launches.py. 3.7.0 has the driver of 3.7.1. The Hopper kernels passed their
# part of the GPU suite on an H200 with 3.6.0 and 3.8.0. With 3.7.1 they passed 1,118 of its tests,
# about 94%, before a time limit. 3.9.0 only compiled them.
TRITON_VERSIONS = {
    "3.6": Tested(hopper=True, direct=True),
    "3.7": Tested(hopper=True, direct=True, as_tuple=True),
    "3.8": Tested(hopper=True, direct=True, as_tuple=True, encoding=(None,)),
    "3.9": Tested(hopper=False, direct=True, as_tuple=True, encoding=(None,)),
}
_UNTESTED = Tested(hopper=False, direct=False)


def tested() -> Tested:
    """Return the entry of :data:`TRITON_VERSIONS` for the installed Triton, whatever its build."""
    return _tested(triton.__version__)


@functools.cache
def _tested(version: str) -> Tested:
    return TRITON_VERSIONS.get(".".join(version.split(".")[:2]), _UNTESTED)


class Gates(NamedTuple):
    """Features that may run on the installed Triton.

    Attributes:
        hopper: the Hopper kernels.
        in_front: decoding packed weights inside the kernel, directly before each product.
        reason: why one of them may not run, or why a marker was ignored; else "".
        fp8: products of experts in FP8.
    """

    hopper: bool
    in_front: bool
    reason: str = ""
    fp8: bool = False


PORTABLE = Gates(hopper=False, in_front=False)
HOW_TO_TRUST = "`moe-patch selftest --trust` tests them on this card and enables them"
HOPPER = ("dh", "dw", "linear", "up", "fp8_dh", "fp8_linear", "fp8_up")
_GATES: dict[str, Gates] = {}


def gates() -> Gates:
    """Return the gates, decided once per process on first use on a Hopper card; warn if closed."""
    found = _GATES.get(triton.__version__)
    if found is None:
        found = _GATES[triton.__version__] = _decide()
        if found.reason:
            warnings.warn(f"moe_patch: {found.reason}", stacklevel=2)
    return found


def decided() -> Gates | None:
    """Return the decision, or None if it has not been made yet."""
    return _GATES.get(triton.__version__)


def _decide() -> Gates:
    entry, marker, ignored = tested(), None, ""
    if not entry.hopper:
        marker, ignored = trusted.read()
        if marker is None:
            releases = ", ".join(name for name, each in TRITON_VERSIONS.items() if each.hopper)
            why = (
                f"portable kernels: those for Hopper take triton {releases}, found "
                f"{triton.__version__}; {HOW_TO_TRUST}"
            )
            return Gates(False, False, f"{why}; {ignored}" if ignored else why)
    in_front = entry.hopper or (marker is not None and marker.in_front)
    if why := _without_gluon():
        return Gates(False, in_front, why)
    if not in_front:
        assert marker is not None
        why = (
            f"packed experts are decoded into a buffer, not in front of the product: on triton "
            f"{triton.__version__} that overwrites registers which are still read "
            f"({len(marker.hazards)} places, listed in {trusted.path()})"
        )
    return Gates(True, in_front, why, fp8=entry.hopper or (marker is not None and marker.fp8))


def _without_gluon() -> str:
    """Return why the Hopper kernels cannot be imported, or ""."""
    try:
        importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")
    except ImportError as error:
        return (
            f"portable kernels: those for Hopper need Gluon, which the installed triton "
            f"{triton.__version__} lacks ({error}); install triton's own wheel"
        )
    return ""


def known_triton() -> bool:
    """Return whether the Hopper kernels were tested on the installed Triton."""
    return gates().hopper


def why_no_fp8() -> str:
    """Return why FP8 products may not run on the installed Triton, or ""."""
    found = gates()
    if not found.hopper:
        return "FP8 products need a Triton on which the Hopper kernels may run"
    if not found.fp8:
        return (
            f"FP8 products stay off on triton {triton.__version__}: `moe-patch selftest --trust` "
            f"found overwritten registers or wrong results, listed in {trusted.path()}"
        )
    return ""


@contextlib.contextmanager
def opened(chosen: Gates) -> Iterator[None]:
    """Override the gates in all threads, to test the Hopper kernels on a user's card."""
    before = _GATES.get(triton.__version__)
    _GATES[triton.__version__] = chosen
    try:
        yield
    finally:
        decide_again()
        if before is not None:
            _GATES[triton.__version__] = before


def decide_again() -> None:
    """Discard the decision, after a marker was written or removed."""
    _GATES.pop(triton.__version__, None)


@functools.cache
def hopper_module(name: str) -> ModuleType:
    """Import a module of :mod:`moe_patch.kernels.hopper` on first use, because it needs Gluon."""
    return importlib.import_module(f"moe_patch.kernels.hopper.{name}")


def available(tensor: Tensor) -> bool:
    """Return whether the Hopper kernels support this: sm_90, a 16-bit dtype, a tested Triton."""
    return device_of(tensor).capability == (9, 0) and known_triton() and tensor.dtype.itemsize == 2


def whole_rank(
    low_rank: tuple[Tensor, Tensor] | None, axis: int = 2
) -> tuple[Tensor, Tensor] | None:
    """Pad (u_NR, factor) with zeros to a rank of a multiple of 16 bytes, for the Hopper kernels.

    Without padding, such a rank would send the whole product to the portable kernels. The
    contiguous axis of the factor is preserved.

    Args:
        low_rank: rows [N, R] and a factor [E, O, R], or [E, R, O] for ``axis`` 1.
        axis: axis of the rank in the factor.
    """
    if low_rank is None:
        return None
    u_NR, factor = low_rank
    missing = -u_NR.shape[1] % 8
    if missing == 0:
        return low_rank
    if axis == 1:
        factor = torch.constant_pad_nd(factor, (0, 0, 0, missing))
    elif factor.stride(2) == 1:
        factor = torch.constant_pad_nd(factor, (0, missing))
    else:
        factor = torch.constant_pad_nd(factor.mT, (0, 0, 0, missing)).mT
    return torch.constant_pad_nd(u_NR, (0, missing)), factor
