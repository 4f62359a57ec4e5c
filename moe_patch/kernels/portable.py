"""Where the specialised Hopper kernels leave a block to the portable ones, for the report."""

from __future__ import annotations

import torch
import triton

from moe_patch.kernels.specialised import TRITON_VERSIONS, known_triton
from moe_patch.types import Glu


def portable_reason(
    capability: tuple[int, int],
    dtype: torch.dtype,
    shape: tuple[int, int],
    glu: Glu,
    *,
    transposed: bool,
) -> str:
    """Which products the portable kernels compute and why; "" where Hopper's do, or elsewhere.

    What the operands of a single call decide (their alignment) is not looked at.

    Args:
        capability: of the device.
        dtype: of the products.
        shape: (H, D) of the up projection.
        glu: the activation.
        transposed: the weights are stored [E, in, out].
    """
    if capability != (9, 0):
        return ""
    if dtype.itemsize != 2:
        return f"portable kernels: those for Hopper take bf16 and fp16, found {dtype}"
    H, D = shape
    F = H // 2 if glu.gated else H
    if not known_triton():
        known = ", ".join(TRITON_VERSIONS)
        return f"portable kernels: those for Hopper take triton {known}, found {triton.__version__}"
    if D % 8 or F % 8:
        return (
            f"portable kernels: those for Hopper take sizes of multiples of 8, found hidden size "
            f"{D}, expert width {F}"
        )
    if transposed:
        return (
            "portable kernels for up and dh: those for Hopper take weights stored "
            "[experts, out, in]"
        )
    if not glu.gated or glu.interleaved:
        return "portable kernels for up and dh: those for Hopper take gate and up side by side"
    return ""
