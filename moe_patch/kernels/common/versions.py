"""Releases of Triton, and what was tested on each: the one table that decides by release.

Gluon is experimental and its names change between releases. On a release that the table does not
have the portable kernels run, until a user tests the Hopper kernels on their own card
(:mod:`moe_patch.kernels.common.trusted`), and launches go through Triton.
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
    """What was tested of a release.

    Attributes:
        hopper: the Hopper kernels in Gluon, and that matrix instructions leave the registers of
            their operands alone (tools/wgmma_operands.py).
        direct: the arguments of the function in C that launches a kernel.
        as_tuple: that function takes the kernel's own arguments as one tuple.
        encoding: what ``make_tensordesc_arg`` takes behind a descriptor and its metadata.
    """

    hopper: bool
    direct: bool
    as_tuple: bool = False
    encoding: tuple[Any, ...] = ()


# Launches were compared offline on every release here: each argument that reaches the function in
# C, for each kernel of tests/offline_launches.py (3.7.0 has the same driver as 3.7.1). The Hopper
# kernels passed their part of the GPU suite on an H200 with 3.6.0 and 3.8.0, and with 3.7.1 as much
# of it as ran before a limit of time (1,118 tests). 3.9.0 only compiled them.
TRITON_VERSIONS = {
    "3.6": Tested(hopper=True, direct=True),
    "3.7": Tested(hopper=True, direct=True, as_tuple=True),
    "3.8": Tested(hopper=True, direct=True, as_tuple=True, encoding=(None,)),
    "3.9": Tested(hopper=False, direct=True, as_tuple=True, encoding=(None,)),
}
_UNTESTED = Tested(hopper=False, direct=False)


def tested() -> Tested:
    """The entry of :data:`TRITON_VERSIONS` for the installed Triton, in any of its builds."""
    return _tested(triton.__version__)


@functools.cache
def _tested(version: str) -> Tested:
    return TRITON_VERSIONS.get(".".join(version.split(".")[:2]), _UNTESTED)


class Gates(NamedTuple):
    """What may run on the installed Triton.

    Attributes:
        hopper: the Hopper kernels.
        in_front: packed weights decoded in front of the product that reads them.
        reason: why one of them may not, or why a marker was ignored; else "".
    """

    hopper: bool
    in_front: bool
    reason: str = ""


PORTABLE = Gates(hopper=False, in_front=False)
HOW_TO_TRUST = "`moe-patch selftest --trust` tests them on this card and opens them"
HOPPER = ("dh", "dw", "linear", "up")
_GATES: dict[str, Gates] = {}


def gates() -> Gates:
    """Decide once a process, where a Hopper card first needs an answer; a closed gate warns."""
    found = _GATES.get(triton.__version__)
    if found is None:
        found = _GATES[triton.__version__] = _decide()
        if found.reason:
            warnings.warn(f"moe_patch: {found.reason}", stacklevel=2)
    return found


def decided() -> Gates | None:
    """The decision, None before it was needed."""
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
    return Gates(True, in_front, why)


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


@contextlib.contextmanager
def opened(chosen: Gates) -> Iterator[None]:
    """Run with these gates in place of the decision, in all threads: for tests on a user's card."""
    before = _GATES.get(triton.__version__)
    _GATES[triton.__version__] = chosen
    try:
        yield
    finally:
        decide_again()
        if before is not None:
            _GATES[triton.__version__] = before


def decide_again() -> None:
    """Forget the decision: a marker was written or removed."""
    _GATES.pop(triton.__version__, None)


@functools.cache
def hopper_module(name: str) -> ModuleType:
    """Return a module of :mod:`moe_patch.kernels.hopper`, imported at first use: it needs Gluon."""
    return importlib.import_module(f"moe_patch.kernels.hopper.{name}")


def available(tensor: Tensor) -> bool:
    """Whether these kernels serve the tensor's device and dtype: sm_90, 16 bits, a known Triton."""
    return device_of(tensor).capability == (9, 0) and known_triton() and tensor.dtype.itemsize == 2


def whole_rank(
    low_rank: tuple[Tensor, Tensor] | None, axis: int = 2
) -> tuple[Tensor, Tensor] | None:
    """(u_NR, factor) with zeros up to a rank of whole 16 bytes, in which these kernels copy.

    Without the zeros an odd rank would leave the whole product to the portable kernels. The factor
    keeps its contiguous axis.

    Args:
        low_rank: [N, R] rows and [E, O, R], with ``axis`` 1 [E, R, O].
        axis: the factor's rank.
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
