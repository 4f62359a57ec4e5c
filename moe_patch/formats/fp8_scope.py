"""Experts that FP8 products support, by card, dtype, sizes and activation; needs no Triton."""

from __future__ import annotations

import torch

from moe_patch.formats import fp8
from moe_patch.types import Glu

HOPPER = (9, 0)


def why_not_in_scope(
    capability: tuple[int, int],
    dtype: torch.dtype,
    shape: tuple[int, int],
    glu: Glu,
    *,
    biased: bool,
    transposed: bool,
) -> str:
    """Return why experts stored in FP8 are decoded on every Triton, or "".

    Args:
        capability: compute capability of the device.
        dtype: dtype of the rows.
        shape: (outputs, inputs) of the up projection.
        glu: the activation.
        biased, transposed: the experts have biases; the weights are stored [E, in, out].
    """
    outputs, inputs = shape
    if capability != HOPPER:
        found = ".".join(map(str, capability))
        return f"FP8 products need compute capability 9.0, found {found}"
    if dtype.itemsize != 2:
        return f"FP8 products take bf16 and fp16, found {dtype}"
    if not glu.gated or glu.interleaved or biased or transposed:
        return "FP8 products need gate and up in halves, no biases and [E, out, in] storage"
    if inputs % fp8.BLOCK or outputs % (2 * fp8.BLOCK):
        width = outputs // 2
        return f"FP8 products need widths of multiples of 128, found {inputs} and {width}"
    return ""
