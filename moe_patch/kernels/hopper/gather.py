"""Gather rows in the producers of the Hopper kernels: by cp.async, into a stage of the ring."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from moe_patch.kernels.hopper.common import BK_C, HALF_C, claim, load_box
from moe_patch.kernels.hopper.gluon_names import load_rows

# Layout of a producer's threads over a block of rows, with 16 bytes per copy.
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def halves(start, end):
    """Return the slots of both halves of a tile; past the expert's end, its last slot."""
    n = start + gl.arange(0, HALF_C, layout=gl.SliceLayout(1, COPY))
    return gl.minimum(n, end - 1), gl.minimum(n + HALF_C, end - 1)


@gluon.jit
def rows_at(base, index, stride):
    """Return pointers to rows."""
    return base + index.to(gl.int64)[:, None] * stride


@gluon.jit
def gather_steps(
    source, low_row, high_row, stride, start, end, width, descriptor, e, column, ring, steps, step,
    SHAPE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Producer: run all steps of a tile whose left rows are gathered, 64 for each consumer.

    Rows past the expert's end are set to zero without being read, and are never stored. Most tiles
    have no such rows and skip the comparisons.

    Args:
        source, stride: base and stride of the rows, which the compiler must know to be multiples of
            16 bytes.
        low_row, high_row: row indices of the first and the second half of the tile.
        start, end: first slot of the tile, and end of its expert's slots.
        descriptor: descriptor of the right side, loaded at [e, 0, column, k], or at [e, k, column]
            if its rank is 3.

    Returns:
        The next step.
    """
    n = start + gl.arange(0, HALF_C, layout=gl.SliceLayout(1, COPY))
    low_at, high_at = rows_at(source, low_row, stride), rows_at(source, high_row, stride)
    low_in, high_in = (n < end)[:, None], (n + HALF_C < end)[:, None]
    if start + 2 * HALF_C <= end:
        for i in range(0, steps):
            _gather_step(
                low_at, high_at, low_in, high_in, i * BK_C, width, descriptor, e, column, ring,
                step + i, SHAPE, LAYOUT, True,
            )  # fmt: skip
    else:
        for i in range(0, steps):
            _gather_step(
                low_at, high_at, low_in, high_in, i * BK_C, width, descriptor, e, column, ring,
                step + i, SHAPE, LAYOUT, False,
            )  # fmt: skip
    return step + steps


@gluon.jit
def _gather_step(
    low_at, high_at, low_in, high_in, k0, width, descriptor, e, column, ring, step,
    SHAPE: gl.constexpr, LAYOUT: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = SHAPE[0] * SHAPE[1] * SHAPE[2] * (SHAPE[3] if len(SHAPE) == 4 else 1) * 2
    stage = claim(ring, step, BYTES)
    right = ring.right.index(stage)
    if len(SHAPE) == 4:
        load_box(descriptor, [e, 0, column, k0], ring.ready.index(stage), right, SHAPE, LAYOUT)
    else:
        load_box(descriptor, [e, k0, column], ring.ready.index(stage), right, SHAPE, LAYOUT)
    k = k0 + gl.arange(0, BK_C, layout=gl.SliceLayout(0, COPY))
    within = (k < width)[None, :]
    load_rows(
        ring.left.index(2 * stage), low_at + k[None, :], mask=within if WHOLE else within & low_in
    )
    load_rows(
        ring.left.index(2 * stage + 1), high_at + k[None, :],
        mask=within if WHOLE else within & high_in,
    )  # fmt: skip
    async_copy.mbarrier_arrive(ring.ready.index(stage), increment_count=False)
