"""Scales of rows that are quantised to FP8 e4m3: device functions.

A scale is the smallest power of two that brings the largest magnitude of a group to at most 448.
Scaling by a power of two is exact. So a value is rounded once, and kernels and definition agree bit
for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns that share a scale.
GROUP = 128
# Smallest magnitude that sets a scale, so that scale and inverse are normal fp32.
TINY = tl.constexpr(2.0**-100)
# 448 is 1.75 * 2^8: a fraction above 0.75 needs the next power of two.
_ABOVE = tl.constexpr(0x1FFFFF)
_EXPONENT = tl.constexpr(0x7F800000)
_EIGHT = tl.constexpr(8 << 23)
_ONE_TWICE = tl.constexpr(254 << 23)


@triton.jit
def row_scale(largest):
    """Return (scale, 1 / scale) from the largest magnitudes; the scale of infinity is infinite."""
    known = tl.where(largest > TINY, largest, TINY)
    bits = ((known.to(tl.int32, bitcast=True) + _ABOVE) & _EXPONENT) - _EIGHT
    scale, inverse = bits.to(tl.float32, bitcast=True), (_ONE_TWICE - bits)
    scale = tl.where(largest == float("inf"), float("inf"), scale)
    return scale, inverse.to(tl.float32, bitcast=True)
