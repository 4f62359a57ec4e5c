"""Integer sizes on the host. Triton's own functions also serve kernels, which costs 2 µs a call."""

from __future__ import annotations

import functools


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@functools.cache
def next_power_of_2(n: int) -> int:
    """The least power of two that is at least ``n``; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()
