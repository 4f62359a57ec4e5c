"""Parts of the warp-specialised Hopper kernels, in Gluon: one producer, two consumers and a ring.

A program processes one tile of BM rows by BN columns after another. Its producer fills a ring of
STAGES pairs of buffers, with BK elements of the summed axis in each. It runs ahead into the next
tile while the consumers, with 64 rows each, still write their results.

Barriers of a stage:

- ready: the bytes that TMA loads, and 128 threads if cp.async gathers the left side.
- empty: one arrival from each consumer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moe_patch.kernels.common.device import device_of
from moe_patch.kernels.common.glu import glu_constants
from moe_patch.kernels.common.launcher import Box, Constants
from moe_patch.kernels.common.versions import available
from moe_patch.kernels.hopper.gluon_names import seen_as, tma_add, tma_load, tma_store
from moe_patch.kernels.plan.row_tiles import RowTiling, depth_block
from moe_patch.types import Glu

BM, BN, BK, STAGES = 128, 256, 64, 4
# Columns written from the accumulator at a time, and the number of output buffers per consumer.
CHUNK, OUTS = 64, 2
# A ragged descriptor clips at 2^30 rows. Two leading axes shift its origin to the end of any
# expert; the stride of the first one relies on 64-bit wrap-around.
RAGGED_ROWS = 1 << 30
RAGGED_WRAP = 1 << 34
RAGGED_AXIS = 0x7FFF0000
RANK2, RANK3, RANK4 = (gl.NVMMASharedLayout(128, 16, rank=rank) for rank in (2, 3, 4))
# The same values as constexpr, because kernels cannot read other globals.
BM_C, BN_C, BK_C, HALF_C, STAGES_C = map(gl.constexpr, (BM, BN, BK, BM // 2, STAGES))
CHUNK_C, OUTS_C, RAGGED_ROWS_C = map(gl.constexpr, (CHUNK, OUTS, RAGGED_ROWS))
RANK2_C, RANK3_C, RANK4_C = map(gl.constexpr, (RANK2, RANK3, RANK4))
# Layouts of a consumer's accumulator and of one chunk of it.
ACC, PART = (
    gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16]))
    for columns in (BN, CHUNK)
)


class Ring(NamedTuple):
    """Buffers of both sides and barriers of all stages, in shared memory; see :func:`make_ring`."""

    left: Any
    right: Any
    ready: Any
    empty: Any


def copies_rows(*sides: Tensor) -> bool:
    """Return whether TMA and cp.async can copy rows: all sizes and addresses in 16-byte units."""
    for side in sides:
        (count, width), (step, unit) = side.shape, side.stride()
        if unit != 1 or step % 8 or width % 8 or count >= RAGGED_ROWS or side.data_ptr() % 16:
            return False
    return True


def copies_boxes(*weights_EOI: Tensor, axis: int) -> bool:
    """Return whether TMA can load boxes of [E, out, in] weights; ``axis`` must be contiguous."""
    for w in weights_EOI:
        strides = w.stride()
        if strides[axis] != 1 or strides[0] % 8 or strides[3 - axis] % 8:
            return False
        if w.shape[axis] % 8 or w.data_ptr() % 16:
            return False
    return True


def takes(
    rows: RowTiling,
    sides: Sequence[Tensor],
    w_EOI: Tensor,
    low_rank: tuple[Tensor, Tensor] | None,
    axis: int = 2,
) -> bool:
    """Return whether rows, weight and factor are in 16-byte units and tiles have :data:`BM` rows.

    Args:
        rows: the plan and its tile table.
        sides: rows to be copied.
        w_EOI, low_rank: the weight; rows and factor of the low-rank term.
        axis: axis of weight and factor that must be contiguous.
    """
    weights = (w_EOI,)
    if low_rank is not None:
        sides, weights = (*sides, low_rank[0]), (w_EOI, low_rank[1])
    return (
        rows.block_m == BM
        and available(sides[0])
        and copies_rows(*sides)
        and copies_boxes(*weights, axis=axis)
    )


def rank_depth(low_rank: tuple[Tensor, Tensor] | None) -> int:
    """Return the depth of a stage that the low-rank product uses; 0 without one."""
    return 0 if low_rank is None else depth_block(low_rank[0].shape[1])


def whole_box(base: Tensor, block: tuple[int, ...], layout: Any) -> Box:
    """Return a Box of a whole tensor in its own strides."""
    return Box(base, base.shape, base.stride(), block, layout)


def ragged_box(
    rows: Tensor,
    block: tuple[int, int],
    width: int | None = None,
    first: int = 0,
    layout: Any = RANK4,
) -> Box:
    """Return a Box of rows whose loads and stores clip at any row; see :data:`RAGGED_ROWS`.

    Args:
        rows: [N, O].
        block: rows and columns of one copy.
        width, first: number of columns and the first one, which is cheaper than a slice.
        layout: layout of a block in shared memory.
    """
    return Box(rows, *_ragged(rows.stride(0), width or rows.shape[1], block), layout, first)


@functools.cache
def _ragged(stride: int, width: int, block: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """Return the shape, strides and block of a ragged Box."""
    shape = (RAGGED_AXIS, RAGGED_AXIS, RAGGED_ROWS, width)
    return shape, (RAGGED_WRAP - stride, stride, stride, 1), (1, 1, *block)


@functools.cache
def constants(group: int, glu: Glu | None = None, fast: bool = False, **own: Any) -> Constants:
    """Return a kernel's compile-time arguments: group, activation if any, and ``own``."""
    activation = {} if glu is None else glu_constants(glu, fast=fast)
    return Constants(**activation, **own, GROUP=group, num_warps=4, maxnreg=168)


def programs(tiles: int, tensor: Tensor) -> int:
    """Return the grid size: the number of multiprocessors, or of tiles if that is smaller."""
    return min(tiles, device_of(tensor).multiprocessors)


@gluon.jit
def claim(ring, step, BYTES: gl.constexpr):
    """Producer: wait for the next stage of the ring, and expect BYTES from TMA in it."""
    stage = step % STAGES_C
    mbarrier.wait(ring.empty.index(stage), ((step // STAGES_C) & 1) ^ 1)
    mbarrier.expect(ring.ready.index(stage), BYTES)
    return stage


@gluon.jit
def load_box(
    descriptor, at, bar, buffer, SHAPE: gl.constexpr, LAYOUT: gl.constexpr = RANK3_C
):  # fmt: skip
    """Load the box at ``at`` into a 2-D buffer with the same bytes in the same order."""
    tma_load(descriptor, at, bar, seen_as(buffer, SHAPE, LAYOUT))


@gluon.jit
def sum_steps(
    acc, steps, step, half, ring,
    LEFT_T: gl.constexpr, RIGHT_T: gl.constexpr, GATHERED: gl.constexpr, DEPTH: gl.constexpr = 0,
):  # fmt: skip
    """Consumer: add the products of the next ``steps`` stages to acc; return (acc, next step).

    If DEPTH is not 0, only the first DEPTH elements of a stage's summed axis are used. The summed
    axis is then the last one on the left side, and the last (RIGHT_T) or first on the right.
    """
    for i in range(0, steps):
        stage = step % STAGES_C
        mbarrier.wait(ring.ready.index(stage), (step // STAGES_C) & 1)
        if GATHERED:
            # cp.async writes through the generic proxy, but wgmma reads through the async proxy.
            fence_async_shared()
        left = ring.left.index(2 * stage + half)
        right = ring.right.index(stage)
        if DEPTH > 0:
            left = left.slice(0, DEPTH, dim=1)
            right = right.slice(0, DEPTH, dim=1 if RIGHT_T else 0)
        if LEFT_T:
            left = left.permute((1, 0))
        if RIGHT_T:
            right = right.permute((1, 0))
        acc = warpgroup_mma(left, right, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(ring.empty.index((step + STAGES_C - 1) % STAGES_C), count=1, pred=i > 0)
        step += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(ring.empty.index((step + STAGES_C - 1) % STAGES_C), count=1, pred=steps > 0)
    return acc, step


@gluon.jit
def sum_both(
    acc, steps, low_steps, step, half, ring,
    RIGHT_T: gl.constexpr, GATHERED: gl.constexpr, LOW_RANK: gl.constexpr,
):  # fmt: skip
    """Consumer: add the product and the low-rank product, LOW_RANK deep per stage, to acc."""
    acc, step = sum_steps(acc, steps, step, half, ring, False, RIGHT_T, GATHERED)
    if LOW_RANK > 0:
        acc, step = sum_steps(acc, low_steps, step, half, ring, False, RIGHT_T, GATHERED, LOW_RANK)
    return acc, step


@gluon.jit
def quarter(acc, q: gl.constexpr, layout: gl.constexpr):
    """Return a quarter of the accumulator's columns, without leaving registers."""
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    low, high = gl.split(acc.reshape((ROWS, 2, COLUMNS // 2)).permute((0, 2, 1)))
    both = low if q < 2 else high
    first, second = gl.split(both.reshape((ROWS, 2, COLUMNS // 4)).permute((0, 2, 1)))
    return gl.convert_layout(first if q % 2 == 0 else second, layout)


@gluon.jit
def store_box(
    value, buffer, descriptor, at,
    SHAPE: gl.constexpr, LAYOUT: gl.constexpr, PENDING: gl.constexpr,
    TRANSPOSED: gl.constexpr = False, ADD: gl.constexpr = False,
):  # fmt: skip
    """Consumer: store a chunk by TMA, or add it to what is there.

    Up to PENDING earlier stores may still be in flight.
    """
    tma.store_wait(PENDING)
    if TRANSPOSED:
        buffer.permute((1, 0)).store(value)
    else:
        buffer.store(value)
    fence_async_shared()
    if ADD:
        tma_add(descriptor, at, seen_as(buffer, SHAPE, LAYOUT))
    else:
        tma_store(descriptor, at, seen_as(buffer, SHAPE, LAYOUT))


@gluon.jit
def make_ring(
    dtype: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, ARRIVALS: gl.constexpr
):  # fmt: skip
    """Allocate the buffers and barriers of a ring: per stage two LEFT buffers and one RIGHT."""
    left = gl.allocate_shared_memory(dtype, [2 * STAGES_C, LEFT[0], LEFT[1]], RANK2_C)
    right = gl.allocate_shared_memory(dtype, [STAGES_C, RIGHT[0], RIGHT[1]], RANK2_C)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES_C, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES_C, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES_C):
        mbarrier.init(ready.index(stage), count=ARRIVALS)
        mbarrier.init(empty.index(stage), count=2)
    return Ring(left, right, ready, empty)


@gluon.jit
def _call(function, first, rest):
    # Concatenating the two tuples would lose compile-time strings.
    function(*first, *rest)


@gluon.jit
def specialise(
    consume, consumed, produce, produced,
    WARPS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Run two consumers, whose first argument is 0 or 1, and a producer of WARPS warps.

    REGISTERS holds the registers per thread of the second consumer and of the producer.
    """
    gl.warp_specialize(
        [
            (_call, (consume, (0,), consumed)),
            (_call, (consume, (1,), consumed)),
            (_call, (produce, (), produced)),
        ],
        [4, WARPS],
        REGISTERS,
    )
