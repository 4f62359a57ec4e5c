"""Weight gradients on Hopper, in Gluon: the sum of :mod:`moe_patch.kernels.dw`, warp-specialised.

One warpgroup produces, two consume. The producer brings BK token rows of both sides into a ring of
buffers: the side in plan order by TMA, whose ragged descriptor clips at the expert's end, and the
gathered side by cp.async, row by row. Each consumer multiplies 64 of the left side's 128 columns by
all 256 of the right and stores its tile by TMA while the producer runs ahead into the next tile.

    ready[stage]   128 arrivals of the gathering threads + 1 for the TMA bytes
    empty[stage]   one arrival of each consumer
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_patch.kernels.device import device_of
from moe_patch.types import Plan

# Gluon is experimental and its names change between releases: only versions this was tested on.
TRITON_VERSIONS = ("3.6",)
BM, BN, BK, STAGES = 128, 256, 64, 4
# A ragged descriptor clips at 2^30 rows; two leading axes shift the origin to any expert's end,
# with 64-bit wrap-around in the first one's stride.
RAGGED_ROWS = 1 << 30
RAGGED_WRAP = 1 << 34
RAGGED_AXIS = 0x7FFF0000


def supported(
    left: Tensor, right: Tensor, like_EOI: Tensor, *, gather_left: bool, gather_right: bool
) -> bool:
    """Whether this kernel takes the operands: 16-bit, one side gathered, 16-byte aligned rows."""
    grad_strides = like_EOI.stride()
    return (
        device_of(left).capability == (9, 0)
        and triton.__version__.rpartition(".")[0] in TRITON_VERSIONS
        and left.dtype.itemsize == 2
        and gather_left != gather_right
        and grad_strides[2] == 1
        and all(stride % 8 == 0 for stride in grad_strides[:2])
        and all(side.stride(0) % 8 == 0 and side.data_ptr() % 16 == 0 for side in (left, right))
        and all(side.shape[1] % 8 == 0 for side in (left, right))
        and 0 < left.shape[0] < RAGGED_ROWS
        and right.shape[0] < RAGGED_ROWS
    )


def specialised_outer_sum(
    left: Tensor, right: Tensor, plan: Plan, like_EOI: Tensor, *, gather_left: bool
) -> Tensor:
    """[E, O,
    I] in the dtype and strides of ``like_EOI``; see :func:`moe_patch.kernels.dw.outer_sum`.

    Args:
        left, right: [N, O] and [N, I] in plan order, one of them by token.
        plan: where each row sits.
        like_EOI: the weight whose gradient this is.
        gather_left: the left side is by token; otherwise the right one is.
    """
    E, O, I = like_EOI.shape
    grad_EOI = torch.empty_like(like_EOI)
    left_layout = gl.NVMMASharedLayout(128, 16, rank=4)
    grad_layout = gl.NVMMASharedLayout(128, 16, rank=3)
    row_tiles, columns = triton.cdiv(O, BM), triton.cdiv(I, BN)
    tiles = E * row_tiles * columns
    sorted_side, box = (right, BN) if gather_left else (left, BM // 2)
    gathered = left if gather_left else right
    _specialised_dw_kernel[(min(tiles, device_of(left).multiprocessors),)](
        ragged_descriptor(sorted_side, [1, 1, BK, box], left_layout), gathered,
        TensorDescriptor(grad_EOI, list(grad_EOI.shape), list(grad_EOI.stride()), [1, BM // 2,
        BN // 2], grad_layout),
        plan.row_of_N, plan.offsets_S, tiles, row_tiles, columns, gathered.shape[1] // 8,
        gathered.stride(0) // 8,
        K=plan.slot_of_TK.shape[1], GATHER_LEFT=gather_left, BM=BM, BN=BN, BK=BK, STAGES=STAGES,
        num_warps=4, maxnreg=168,
    )  # fmt: skip
    return grad_EOI


def ragged_descriptor(
    rows: Tensor, box: list[int], layout: gl.NVMMASharedLayout
) -> TensorDescriptor:
    """Rows whose loads and stores clip at any given row: see :data:`RAGGED_ROWS`."""
    stride = rows.stride(0)
    shape = [RAGGED_AXIS, RAGGED_AXIS, RAGGED_ROWS, rows.shape[1]]
    return TensorDescriptor(rows, shape, [RAGGED_WRAP - stride, stride, stride, 1], box, layout)


@gluon.jit
def _tile(tile, row_tiles, columns):
    """(expert, row tile, column tile), columns slowest inside an expert."""
    per_expert = row_tiles * columns
    e = tile // per_expert
    local = tile - e * per_expert
    return e, local % row_tiles, local // row_tiles


@gluon.jit
def _produce(
    sorted_side, gathered_ptr, row_ptr, offsets_ptr, left_bufs, right_bufs, ready, empty,
    tiles, row_tiles, columns, width_8, stride_8, K: gl.constexpr, GATHER_LEFT: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BM // 2
    WIDE: gl.constexpr = BN if not GATHER_LEFT else HALF
    # 8 lanes copy 128 bytes of a row, so that a thread looks up few rows and copies many columns.
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    BOX: gl.constexpr = BN if GATHER_LEFT else HALF
    box_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    # In units of 8, so that the compiler knows that rows keep the 16 bytes of a copy aligned.
    width, stride = width_8 * 8, stride_8 * 8
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        e, row_tile, column_tile = _tile(tile, row_tiles, columns)
        start = gl.load(offsets_ptr + e)
        end = gl.load(offsets_ptr + e + 1)
        for n0 in range(start, end, BK):
            stage = step % STAGES
            # Looked up before the wait, which hides the latency.
            n = n0 + gl.arange(0, BK, layout=gl.SliceLayout(1, copy))
            token = gl.load(row_ptr + n, mask=n < end, other=0) // K
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(stage), BK * (BN if GATHER_LEFT else BM) * 2)
            clip = RAGGED_ROWS_C - (end - n0)
            if GATHER_LEFT:
                box = right_bufs.index(stage)._reinterpret(
                    right_bufs.dtype, [1, 1, BK, BOX], box_layout
                )
                tma.async_copy_global_to_shared(
                    sorted_side,
                    [RAGGED_ROWS_C, end, clip, column_tile * BN],
                    ready.index(stage),
                    box,
                )
            else:
                for half in gl.static_range(2):
                    box = left_bufs.index(2 * stage + half)._reinterpret(
                        left_bufs.dtype, [1, 1, BK, BOX], box_layout
                    )
                    tma.async_copy_global_to_shared(
                        sorted_side, [RAGGED_ROWS_C, end, clip, row_tile * BM + half * HALF],
                        ready.index(stage), box,
                    )  # fmt: skip
            source = gathered_ptr + token.to(gl.int64)[:, None] * stride
            lane = gl.arange(0, WIDE, layout=gl.SliceLayout(0, copy))
            if GATHER_LEFT:
                for half in gl.static_range(2):
                    column = row_tile * BM + half * HALF + lane
                    mask = (n < end)[:, None] & (column < width)[None, :]
                    async_copy.async_copy_global_to_shared(
                        left_bufs.index(2 * stage + half), source + column[None, :], mask=mask
                    )
            else:
                column = column_tile * BN + lane
                mask = (n < end)[:, None] & (column < width)[None, :]
                async_copy.async_copy_global_to_shared(
                    right_bufs.index(stage), source + column[None, :], mask=mask
                )
            async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
            step += 1


@gluon.jit
def _consume(
    half, grad, offsets_ptr, left_bufs, right_bufs, out_bufs, ready, empty, tiles, row_tiles,
    columns,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BM // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    out_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        e, row_tile, column_tile = _tile(tile, row_tiles, columns)
        start = gl.load(offsets_ptr + e)
        end = gl.load(offsets_ptr + e + 1)
        acc = gl.zeros((HALF, BN), dtype=gl.float32, layout=layout)
        first = step
        for _n0 in range(start, end, BK):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            # cp.async wrote through the generic proxy, wgmma reads through the asynchronous one.
            fence_async_shared()
            left = left_bufs.index(2 * stage + half).permute((1, 0))
            acc = warpgroup_mma(left, right_bufs.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=step > first)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=step > first)
        low, high = gl.split(acc.reshape((HALF, 2, BN // 2)).permute((0, 2, 1)))
        out = out_bufs.index(half)
        for side in gl.static_range(2):
            tma.store_wait(0)
            out.store((low if side == 0 else high).to(out.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(
                grad, [e, row_tile * BM + half * HALF, column_tile * BN + side * (BN // 2)],
                out._reinterpret(out.dtype, [1, HALF, BN // 2], out_layout),
            )  # fmt: skip
    tma.store_wait(0)


RAGGED_ROWS_C = gl.constexpr(RAGGED_ROWS)


@gluon.jit
def _specialised_dw_kernel(
    sorted_side, gathered_ptr, grad, row_ptr, offsets_ptr, tiles, row_tiles, columns, width_8,
    stride_8,
    K: gl.constexpr, GATHER_LEFT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Grid: the multiprocessors. Each program takes tiles of BM x BN in turn."""
    dtype: gl.constexpr = gathered_ptr.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    left_bufs = gl.allocate_shared_memory(dtype, [2 * STAGES, BK, BM // 2], shared)
    right_bufs = gl.allocate_shared_memory(dtype, [STAGES, BK, BN], shared)
    out_bufs = gl.allocate_shared_memory(dtype, [2, BM // 2, BN // 2], shared)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=129)
        mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (_consume, (0, grad, offsets_ptr, left_bufs, right_bufs, out_bufs, ready, empty,
                        tiles, row_tiles, columns, BM, BN, BK, STAGES)),
            (_consume, (1, grad, offsets_ptr, left_bufs, right_bufs, out_bufs, ready, empty,
                        tiles, row_tiles, columns, BM, BN, BK, STAGES)),
            (_produce, (sorted_side, gathered_ptr, row_ptr, offsets_ptr, left_bufs, right_bufs,
                        ready, empty, tiles, row_tiles, columns, width_8, stride_8,
                        K, GATHER_LEFT, BM, BN, BK, STAGES)),
        ],
        [4, 4],
        [216, 56],
    )  # fmt: skip
