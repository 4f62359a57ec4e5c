"""Gather 8-bit rows in the producers of the FP8 kernels, by cp.async; see hopper/gather.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from moe_patch.kernels.hopper.common import HALF_C, claim
from moe_patch.kernels.hopper.fp8 import BK8_C, RIGHT_BYTES_C
from moe_patch.kernels.hopper.gluon_names import load_rows, seen_as, tma_load

# Layout of a producer's threads over 64 rows of a stage, with 16 bytes per copy.
COPY8 = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def gather_steps8(
    low_at, high_at, low_in, high_in, weight, e, column, ring, steps, step, WHOLE: gl.constexpr,
    SHAPE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Producer: gather 8-bit rows and load the weight for all steps of a tile."""
    for i in range(0, steps):
        stage = claim(ring, step + i, RIGHT_BYTES_C)
        bar = ring.ready.index(stage)
        k0 = i * BK8_C
        right = seen_as(ring.right.index(stage), SHAPE, LAYOUT)
        if len(SHAPE) == 4:
            tma_load(weight, [e, 0, column, k0], bar, right)
        else:
            tma_load(weight, [e, column, k0], bar, right)
        if WHOLE:
            load_rows(ring.left.index(2 * stage), low_at + k0)
            load_rows(ring.left.index(2 * stage + 1), high_at + k0)
        else:
            load_rows(ring.left.index(2 * stage), low_at + k0, mask=low_in)
            load_rows(ring.left.index(2 * stage + 1), high_at + k0, mask=high_in)
        async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def gather_tile8(
    source, row_ptr, K, start, end, width, weight, e, column, ring, steps, step,
    SHAPE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Producer: run all steps of a tile of gathered rows; return the next step.

    Rows past the expert's end are set to zero without being read, and are never stored.
    """
    n = start + gl.arange(0, HALF_C, layout=gl.SliceLayout(1, COPY8))
    k = gl.arange(0, BK8_C, layout=gl.SliceLayout(0, COPY8))[None, :]
    low = gl.load(row_ptr + gl.minimum(n, end - 1)) // K
    high = gl.load(row_ptr + gl.minimum(n + HALF_C, end - 1)) // K
    low_at = source + low.to(gl.int64)[:, None] * width + k
    high_at = source + high.to(gl.int64)[:, None] * width + k
    low_in, high_in = (n < end)[:, None], (n + HALF_C < end)[:, None]
    if start + 2 * HALF_C <= end:
        gather_steps8(
            low_at, high_at, low_in, high_in, weight, e, column, ring, steps, step, True, SHAPE,
            LAYOUT,
        )  # fmt: skip
    else:
        gather_steps8(
            low_at, high_at, low_in, high_in, weight, e, column, ring, steps, step, False, SHAPE,
            LAYOUT,
        )  # fmt: skip
    return step + steps
