"""Whether the warp-specialised Hopper kernels can be had: asked without importing their Gluon.

Gluon is experimental and its names change between releases. Where the installed Triton is none that
these kernels know, their modules are not imported at all, and the portable kernels do the work.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from moe_patch.kernels.common.device import device_of

# Only versions this was tested on.
TRITON_VERSIONS = ("3.6",)


def known_triton() -> bool:
    """Whether the installed Triton is one of :data:`TRITON_VERSIONS`, in any of its builds."""
    return _known(triton.__version__)


@functools.cache
def _known(version: str) -> bool:
    return ".".join(version.split(".")[:2]) in TRITON_VERSIONS


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
