"""What the warp-specialised Hopper kernels share, in Gluon: a producer, two consumers and a ring.

A program takes tiles of BM rows by BN columns in turn. Its producer fills a ring of STAGES pairs of
buffers, BK of the summed axis at a time, and runs ahead into the next tile while the consumers, 64
rows each, still write theirs out.

    ready[stage]   the bytes that TMA brings, and where cp.async gathers the left side 128 threads
    empty[stage]   one arrival of each consumer
"""

from __future__ import annotations

from typing import Any

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
from moe_patch.kernels.common.launcher import Box, Constants
from moe_patch.kernels.plan.row_tiles import depth_block

BM, BN, BK, STAGES = 128, 256, 64, 4
# Columns that leave the accumulator at a time, and the buffers of a consumer that they leave by.
CHUNK, OUTS = 64, 2
# A ragged descriptor clips at 2^30 rows; two leading axes shift the origin to any expert's end,
# with 64-bit wrap-around in the first one's stride.
RAGGED_ROWS = 1 << 30
RAGGED_WRAP = 1 << 34
RAGGED_AXIS = 0x7FFF0000
RAGGED_ROWS_C = gl.constexpr(RAGGED_ROWS)
RANK2, RANK3, RANK4 = (gl.NVMMASharedLayout(128, 16, rank=rank) for rank in (2, 3, 4))
RANK3_C, RANK4_C = gl.constexpr(RANK3), gl.constexpr(RANK4)


def copies_rows(*sides: Tensor) -> bool:
    """Whether TMA and cp.async can copy rows: whole 16 bytes, from multiples of 16 bytes."""
    for side in sides:
        (count, width), (step, unit) = side.shape, side.stride()
        if unit != 1 or step % 8 or width % 8 or count >= RAGGED_ROWS or side.data_ptr() % 16:
            return False
    return True


def copies_boxes(*weights_EOI: Tensor, axis: int) -> bool:
    """Whether TMA can bring boxes of [E, out, in] weights whose ``axis`` has to be contiguous."""
    for w in weights_EOI:
        strides = w.stride()
        if strides[axis] != 1 or strides[0] % 8 or strides[3 - axis] % 8:
            return False
        if w.shape[axis] % 8 or w.data_ptr() % 16:
            return False
    return True


def with_factors(
    sides: list[Tensor], w_EOI: Tensor, low_rank: tuple[Tensor, Tensor] | None
) -> tuple[list[Tensor], list[Tensor]]:
    """(sides, weights) to be copied, those of a low-rank product included."""
    if low_rank is None:
        return sides, [w_EOI]
    return [*sides, low_rank[0]], [w_EOI, low_rank[1]]


def rank_depth(low_rank: tuple[Tensor, Tensor] | None) -> int:
    """How much of a stage's summed axis the low-rank product fills; 0 without one."""
    return 0 if low_rank is None else depth_block(low_rank[0].shape[1])


def whole_box(base: Tensor, block: tuple[int, ...], layout: Any) -> Box:
    """Boxes of a tensor as it lies."""
    return Box(base, base.shape, base.stride(), block, layout)


def ragged_box(rows: Tensor, block: tuple[int, int], width: int | None = None) -> Box:
    """Rows whose loads and stores clip at any given row: see :data:`RAGGED_ROWS`.

    Args:
        rows: [N, O].
        block: rows and columns that are copied at a time.
        width: only so many first columns; it saves the host a slice.
    """
    stride = rows.stride(0)
    shape = (RAGGED_AXIS, RAGGED_AXIS, RAGGED_ROWS, rows.shape[1] if width is None else width)
    strides = (RAGGED_WRAP - stride, stride, stride, 1)
    return Box(rows, shape, strides, (1, 1, *block), RANK4)


def constants(group: int, **own: Any) -> Constants:
    """A kernel's compile-time arguments: what all of them have, and its own."""
    return Constants(
        **own, GROUP=group, BM=BM, BN=BN, BK=BK, CHUNK=CHUNK, STAGES=STAGES, num_warps=4,
        maxnreg=168,
    )  # fmt: skip


def programs(tiles: int, tensor: Tensor) -> int:
    """Grid size: the multiprocessors, or fewer where there are fewer tiles."""
    return min(tiles, device_of(tensor).multiprocessors)


@gluon.jit
def claim(ready, empty, step, BYTES: gl.constexpr, STAGES: gl.constexpr):
    """Producer: wait for the next stage of the ring and announce what TMA will bring into it."""
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(stage), BYTES)
    return stage


@gluon.jit
def load_box(
    descriptor, at, bar, buffer, SHAPE: gl.constexpr, LAYOUT: gl.constexpr = RANK3_C
):  # fmt: skip
    """Bring the box at ``at`` into a 2-D buffer, which has the same bytes in the same order."""
    box = buffer._reinterpret(buffer.dtype, SHAPE, LAYOUT)
    tma.async_copy_global_to_shared(descriptor, at, bar, box)


@gluon.jit
def sum_steps(
    acc, steps, step, half, left_bufs, right_bufs, ready, empty,
    LEFT_T: gl.constexpr, RIGHT_T: gl.constexpr, GATHERED: gl.constexpr, STAGES: gl.constexpr,
    DEPTH: gl.constexpr = 0,
):  # fmt: skip
    """Consumer: acc plus the products of the next ``steps`` stages; returns (acc, next step).

    DEPTH, where not 0, is how much of a stage's summed axis is there, for sides that do not have it
    first on the left and first or last on the right.
    """
    for i in range(0, steps):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        if GATHERED:
            # cp.async wrote through the generic proxy, wgmma reads through the asynchronous one.
            fence_async_shared()
        left = left_bufs.index(2 * stage + half)
        right = right_bufs.index(stage)
        if DEPTH > 0:
            left = left.slice(0, DEPTH, dim=1)
            right = right.slice(0, DEPTH, dim=1 if RIGHT_T else 0)
        if LEFT_T:
            left = left.permute((1, 0))
        if RIGHT_T:
            right = right.permute((1, 0))
        acc = warpgroup_mma(left, right, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=i > 0)
        step += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=steps > 0)
    return acc, step


@gluon.jit
def sum_both(
    acc, steps, low_steps, step, half, left_bufs, right_bufs, ready, empty,
    RIGHT_T: gl.constexpr, GATHERED: gl.constexpr, STAGES: gl.constexpr, LOW_RANK: gl.constexpr,
):  # fmt: skip
    """Consumer: acc plus the product and, LOW_RANK deep at a stage, the low-rank one."""
    acc, step = sum_steps(
        acc, steps, step, half, left_bufs, right_bufs, ready, empty, False, RIGHT_T, GATHERED,
        STAGES,
    )  # fmt: skip
    if LOW_RANK > 0:
        acc, step = sum_steps(
            acc, low_steps, step, half, left_bufs, right_bufs, ready, empty, False, RIGHT_T,
            GATHERED, STAGES, LOW_RANK,
        )  # fmt: skip
    return acc, step


@gluon.jit
def quarter(acc, q: gl.constexpr, layout: gl.constexpr):
    """A quarter of the accumulator's columns, without leaving the registers."""
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
    TRANSPOSED: gl.constexpr = False,
):  # fmt: skip
    """Consumer: write a chunk out by TMA; PENDING earlier ones may still be leaving."""
    tma.store_wait(PENDING)
    if TRANSPOSED:
        buffer.permute((1, 0)).store(value)
    else:
        buffer.store(value)
    fence_async_shared()
    tma.async_copy_shared_to_global(
        descriptor, at, buffer._reinterpret(buffer.dtype, SHAPE, LAYOUT)
    )


@gluon.jit
def ring(
    dtype: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    ARRIVALS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The buffers and barriers of a ring: two LEFT buffers and one RIGHT buffer a stage."""
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    left_bufs = gl.allocate_shared_memory(dtype, [2 * STAGES, LEFT[0], LEFT[1]], shared)
    right_bufs = gl.allocate_shared_memory(dtype, [STAGES, RIGHT[0], RIGHT[1]], shared)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=ARRIVALS)
        mbarrier.init(empty.index(stage), count=2)
    return left_bufs, right_bufs, ready, empty
