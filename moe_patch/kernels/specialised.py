"""Whether the warp-specialised Hopper kernels can be had: asked without importing their Gluon.

Gluon is experimental and its names change between releases. Where the installed Triton is none that
these kernels know, their modules are not imported at all, and the portable kernels do the work.
"""

from __future__ import annotations

import functools

import triton
from torch import Tensor

from moe_patch.kernels.device import device_of

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
