"""Memory of a block whose experts are multiplied in FP8: rows are quantised, nothing is decoded.

Bytes throughout; the sizes are those of :mod:`moe_patch.tools.plan_memory`.
"""

from __future__ import annotations

from moe_patch.formats import fp8
from moe_patch.tools.plan_types import Moe, Recipe

Moments = tuple[int, ...]


def is_in_fp8(moe: Moe, recipe: Recipe) -> bool:
    """Return whether a block's forward is in FP8; backward is with ``recipe.copied`` alone."""
    return recipe.compute != "decoded" and recipe.storage == "fp8" and not moe.decoded


def quantised_bytes(rows: int, width: int) -> int:
    """Return the bytes of rows in e4m3 with an fp32 scale per 128 columns."""
    return rows * width + 4 * rows * (width // fp8.BLOCK)


def forward_moments(moe: Moe, recipe: Recipe, a: int, y: int, out: int) -> Moments:
    """Return what forward holds at its peak: the quantised x and a stay beside y and out.

    Args:
        moe, recipe: the block and the run.
        a, y, out: bytes of a, y and the output in 16 bits. Only adapters read a in 16 bits.
    """
    T, K = recipe.tokens, moe.top_k
    quantised = quantised_bytes(T, moe.hidden) + quantised_bytes(T * K, moe.width)
    return (quantised + (a if moe.adapted else 0) + y + out,)


def backward_moments(moe: Moe, recipe: Recipe, wa: int, dx: int, out: int) -> Moments:
    """Return what backward holds: the quantised dout beside w a, and dh beside all of it.

    Args:
        moe, recipe: the block and the run, which has transposed copies.
        wa, dx, out: bytes of w a, of the rows of dx, and of dout or dx.
    """
    T, K = recipe.tokens, moe.top_k
    dh, again = quantised_bytes(T * K, moe.up), 0
    if recipe.recompute:  # h is computed as in forward
        again = quantised_bytes(T, moe.hidden) + quantised_bytes(T * K, moe.width)
    first = out + wa + quantised_bytes(T, moe.hidden)
    return first + dh + again, out + dx + dh + again, 2 * out + dx + dh + again
