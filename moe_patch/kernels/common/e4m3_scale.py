"""Scales of rows that are quantised to FP8 e4m3: device functions.

The largest magnitude of a group becomes 448, the largest e4m3. The division is rounded to nearest,
so kernels and definition (ops/experts/fp8_definition.py) agree bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns that share a scale.
GROUP = 128
# Smallest magnitude that sets a scale, so that scale and inverse are normal fp32.
TINY = tl.constexpr(2.0**-100)
LARGEST, INVERSE = tl.constexpr(448.0), tl.constexpr(1 / 448)


@triton.jit
def row_scale(largest):
    """Return (scale, 1 / scale) from the largest magnitudes; infinity makes its group NaN."""
    known = tl.where(largest > TINY, largest, TINY)
    return known * INVERSE, tl.div_rn(LARGEST, known)
