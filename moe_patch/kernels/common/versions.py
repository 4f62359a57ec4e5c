"""Releases of Triton, and what was tested on each: the one table that decides by release.

Gluon is experimental and its names change between releases. On a release that the table does not
have, the Hopper kernels are not imported and launches go through Triton.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from moe_patch.kernels.common.device import device_of


class Tested(NamedTuple):
    """What was tested of a release.

    Attributes:
        hopper: the Hopper kernels in Gluon, and that matrix instructions leave the registers of
            their operands alone (scripts/wgmma_operands.py).
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
# kernels passed the GPU suite on an H200 with 3.6.0 and 3.8.0; 3.7.1 only compiled them.
TRITON_VERSIONS = {
    "3.6": Tested(hopper=True, direct=True),
    "3.7": Tested(hopper=False, direct=True, as_tuple=True),
    "3.8": Tested(hopper=True, direct=True, as_tuple=True, encoding=(None,)),
}
_UNTESTED = Tested(hopper=False, direct=False)


def tested() -> Tested:
    """The entry of :data:`TRITON_VERSIONS` for the installed Triton, in any of its builds."""
    return _tested(triton.__version__)


@functools.cache
def _tested(version: str) -> Tested:
    return TRITON_VERSIONS.get(".".join(version.split(".")[:2]), _UNTESTED)


def known_triton() -> bool:
    """Return whether the Hopper kernels were tested on the installed Triton."""
    return _tested(triton.__version__).hopper


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
