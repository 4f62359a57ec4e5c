"""Parts of the FP8 kernels for Hopper: the ring with e4m3 operands, and sums with scales.

The geometry in bytes is that of kernels/hopper/common.py, so a stage is 128 elements deep. Both
sides are contiguous in depth, as the FP8 product requires. A consumer multiplies 64 rows by two
halves of 128 columns, one after the other. Each product over 128 elements is multiplied by the
scales of its rows and of its weight block in fp32, and added to that half's total. Meanwhile the
other consumer's product occupies the tensor cores.
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

from moe_patch.kernels.common.e4m3_scale import GROUP, row_scale
from moe_patch.kernels.common.launcher import Box
from moe_patch.kernels.hopper.common import (
    BK,
    BK_C,
    BM,
    BN,
    BN_C,
    CHUNK_C,
    HALF_C,
    PART,
    RANK2,
    RANK2_C,
    RANK3,
    RANK3_C,
    STAGES_C,
    Ring,
    claim,
    ragged_box,
    whole_box,
)
from moe_patch.kernels.hopper.gluon_names import cast_as, tma_load, tma_store

RANK2_8, RANK3_8, RANK4_8 = (gl.NVMMASharedLayout(128, 8, rank=rank) for rank in (2, 3, 4))
RANK2_8C, RANK3_8C, RANK4_8C = map(gl.constexpr, (RANK2_8, RANK3_8, RANK4_8))
# Depth of a stage in e4m3, and columns of one half; also the edge of a weight block.
BK8 = GROUP
BK8_C = gl.constexpr(BK8)
# Bytes of the right side of a stage, and of both sides.
RIGHT_BYTES_C, STAGE_BYTES_C = gl.constexpr(BN * BK8), gl.constexpr((BM + BN) * BK8)
# Layouts of the total of one half, for products in 8 and in 16 bits; registers are the same.
HALF_ACC, HALF_ACC16 = (
    gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, GROUP, depth]))
    for depth in (32, 16)
)


def value_box(rows: Tensor, width: int | None = None, first: int = 0) -> Box:
    """Return a ragged Box of e4m3 rows, for stores of 64 rows and 128 columns."""
    return ragged_box(rows, (BM // 2, GROUP), width, first, RANK4_8)


def low_rank_boxes(low_rank: tuple[Tensor, Tensor] | None, other: Any, factor: Any) -> Any:
    """Return the Box of the low-rank rows and ``factor``, or ``other`` twice without such rows."""
    if low_rank is None:
        return other, other
    return whole_box(low_rank[0], (BM // 2, BK), RANK2), factor


def factor_box(l_EOR: Tensor, depth_last: bool) -> Box:
    """Return a Box of a factor in 16 bits, whose rank or output axis is contiguous."""
    if depth_last:
        return whole_box(l_EOR, (1, BN, BK), RANK3)
    E, O, R = l_EOR.shape
    stride_e, stride_o, stride_r = l_EOR.stride()
    return Box(l_EOR, (E, R, O), (stride_e, stride_r, stride_o), (1, BK, BN), RANK3)


@gluon.jit
def make_ring8(dtype: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate a ring with e4m3 operands; see make_ring in kernels/hopper/common.py."""
    left = gl.allocate_shared_memory(dtype, [2 * STAGES_C, HALF_C, BK8_C], RANK2_8C)
    right = gl.allocate_shared_memory(dtype, [STAGES_C, BN_C, BK8_C], RANK2_8C)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES_C, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES_C, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES_C):
        mbarrier.init(ready.index(stage), count=ARRIVALS)
        mbarrier.init(empty.index(stage), count=2)
    return Ring(left, right, ready, empty)


@gluon.jit
def load_low_rank(
    u, factor, e, start, column, low_steps, ring, step, dtype: gl.constexpr,
    DEPTH_LAST: gl.constexpr, GATHERED: gl.constexpr,
):  # fmt: skip
    """Producer: load all steps of the low-rank product; return the next step."""
    for i in range(0, low_steps):
        stage = claim(ring, step, STAGE_BYTES_C)
        bar = ring.ready.index(stage)
        k0 = i * BK_C
        right = ring.right.index(stage)
        if DEPTH_LAST:
            tma_load(
                factor, [e, column, k0], bar, cast_as(right, dtype, [1, BN_C, BK_C], RANK3_C)
            )  # fmt: skip
        else:
            tma_load(
                factor, [e, k0, column], bar, cast_as(right, dtype, [1, BK_C, BN_C], RANK3_C)
            )  # fmt: skip
        for half in gl.static_range(2):
            left = cast_as(ring.left.index(2 * stage + half), dtype, [HALF_C, BK_C], RANK2_C)
            tma_load(u, [start + half * HALF_C, k0], bar, left)
        if GATHERED:
            # Arrive for the 128 threads, which gather only in the other stages.
            mbarrier.arrive(bar, count=128)
        step += 1
    return step


@gluon.jit
def _half_product(left, right, half: gl.constexpr):
    """Multiply a stage's rows by one half of its columns."""
    zero = gl.zeros((HALF_C, BK8_C), dtype=gl.float32, layout=HALF_ACC)
    columns = right.slice(half * BK8_C, BK8_C, dim=0).permute((1, 0))
    part = warpgroup_mma(left, columns, zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[part])


@gluon.jit
def sum_scaled(
    first, second, steps, step, half, ring, rows_at, first_at, second_at, GATHERED: gl.constexpr
):  # fmt: skip
    """Consumer: add the next ``steps`` stages to the totals of both halves.

    Args:
        first, second: totals of the halves.
        rows_at: pointers to the scales of each row at step 0; that of the next step follows.
        first_at, second_at: pointers to the scales of the weight blocks, likewise.

    Returns:
        (first, second, next step).
    """
    for i in range(0, steps):
        stage = step % STAGES_C
        row = gl.load(rows_at + i)
        one = gl.load(first_at + i)
        two = gl.load(second_at + i)
        mbarrier.wait(ring.ready.index(stage), (step // STAGES_C) & 1)
        if GATHERED:
            # cp.async writes through the generic proxy, but wgmma reads through the async proxy.
            fence_async_shared()
        left = ring.left.index(2 * stage + half)
        right = ring.right.index(stage)
        part = _half_product(left, right, 0)
        first += part * (row * one)[:, None]
        part = _half_product(left, right, 1)
        mbarrier.arrive(ring.empty.index(stage), count=1)
        second += part * (row * two)[:, None]
        step += 1
    return first, second, step


@gluon.jit
def _low_rank_product(left, right):
    # A sum of its own leaves the totals in the registers that the main loop chose.
    zero = gl.zeros((HALF_C, BK8_C), dtype=gl.float32, layout=HALF_ACC16)
    part = warpgroup_mma(left, right, zero, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=[part])
    return gl.convert_layout(part, HALF_ACC, assert_trivial=True)


@gluon.jit
def sum_low_rank(
    first, second, steps, step, half, ring, dtype: gl.constexpr, DEPTH: gl.constexpr,
    DEPTH_LAST: gl.constexpr,
):  # fmt: skip
    """Consumer: add a low-rank product in 16 bits, DEPTH deep per stage, to both totals."""
    for _ in range(0, steps):
        stage = step % STAGES_C
        mbarrier.wait(ring.ready.index(stage), (step // STAGES_C) & 1)
        left = cast_as(ring.left.index(2 * stage + half), dtype, [HALF_C, BK_C], RANK2_C)
        left = left.slice(0, DEPTH, dim=1)
        if DEPTH_LAST:
            right = cast_as(ring.right.index(stage), dtype, [BN_C, BK_C], RANK2_C)
            right = right.slice(0, DEPTH, dim=1).permute((1, 0))
        else:
            right = cast_as(ring.right.index(stage), dtype, [BK_C, BN_C], RANK2_C)
            right = right.slice(0, DEPTH, dim=0)
        first += _low_rank_product(left, right.slice(0, BK8_C, dim=1))
        second += _low_rank_product(left, right.slice(BK8_C, BK8_C, dim=1))
        mbarrier.arrive(ring.empty.index(stage), count=1)
        step += 1
    return first, second, step


@gluon.jit
def chunk_of(total, c: gl.constexpr, layout: gl.constexpr = PART):
    """Return columns [c, c + 1) * 64 of one half, without leaving registers."""
    low, high = gl.split(total.reshape((HALF_C, 2, CHUNK_C)).permute((0, 2, 1)))
    return gl.convert_layout(low if c == 0 else high, layout)


@gluon.jit
def store_values(
    values, scales_at, scales_in, buffer, descriptor, at, PENDING: gl.constexpr
):  # fmt: skip
    """Consumer: quantise 128 columns, store them by TMA and their scales by pointers."""
    E4M3: gl.constexpr = gl.float8e4nv
    scale, inverse = row_scale(gl.max(gl.abs(values), axis=1))
    gl.store(scales_at, scale, mask=scales_in)
    quantised = (values * inverse[:, None]).to(E4M3)
    tma.store_wait(PENDING)
    box = cast_as(buffer, E4M3, [HALF_C, BK8_C], RANK2_8C)
    box.store(quantised)
    fence_async_shared()
    tma_store(descriptor, at, cast_as(box, E4M3, [1, 1, HALF_C, BK8_C], RANK4_8C))


@gluon.jit
def store_quantised(
    low, high, largest, scales_at, inside, buffer, out, at, dtype: gl.constexpr
):  # fmt: skip
    """Consumer: quantise two chunks, from shared memory because registers cannot hold them."""
    E4M3: gl.constexpr = gl.float8e4nv
    scale, inverse = row_scale(largest.to(dtype).to(gl.float32))
    gl.store(scales_at, scale, mask=inside)
    first = (low.load(PART).to(gl.float32) * inverse[:, None]).to(E4M3)
    second = (high.load(PART).to(gl.float32) * inverse[:, None]).to(E4M3)
    both = gl.join(first, second).permute((0, 2, 1)).reshape((HALF_C, BK8_C))
    box = cast_as(buffer, E4M3, [HALF_C, BK8_C], RANK2_8C)
    box.store(both)
    fence_async_shared()
    tma_store(out, at, cast_as(box, E4M3, [1, 1, HALF_C, BK8_C], RANK4_8C))
