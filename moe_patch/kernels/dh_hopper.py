"""The gradients through the activation on Hopper, in Gluon: a warp-specialised form of dh.py.

One warpgroup produces: it gathers rows of dout by cp.async and brings W2 by TMA, and h too, 64
columns of gate and up at a time, the first two chunks while the product still runs. Two warpgroups
consume: they multiply 64 rows each and turn da' and h into dh, w·a and the partial sums. Gradients
overwrite the h they came from in shared memory and leave from there by TMA, whose ragged
descriptors clip loads and stores at the expert's end.

    ready, empty[stage]           operands of the product
    h_ready, h_empty[half, slot]  a chunk of h, two slots per consumer
"""

from __future__ import annotations

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

from moe_patch.kernels.device import approximate, device_of
from moe_patch.kernels.dw_hopper import (
    RAGGED_ROWS,
    RAGGED_ROWS_C,
    TRITON_VERSIONS,
    ragged_descriptor,
)
from moe_patch.kernels.glu import glu_backward, glu_constants, glu_forward, rounded
from moe_patch.kernels.launch import Rows
from moe_patch.types import Glu

BM, BN, BK, STAGES = 128, 256, 64, 3
CHUNK = 64


def supported(dout_TD: Tensor, w_EDF: Tensor, h_NH: Tensor, glu: Glu) -> bool:
    """Whether this kernel takes the operands: 16-bit, gate and up side by side, 16-byte rows."""
    strides = w_EDF.stride()
    return (
        device_of(h_NH).capability == (9, 0)
        and triton.__version__.rpartition(".")[0] in TRITON_VERSIONS
        and h_NH.dtype.itemsize == 2
        and glu.gated
        and not glu.interleaved
        and strides[2] == 1
        and all(stride % 8 == 0 for stride in strides[:2])
        and all(size % 8 == 0 for size in (*w_EDF.shape[1:], dout_TD.stride(0)))
        and min(w_EDF.shape[1:]) >= BK
        and all(t.data_ptr() % 16 == 0 for t in (dout_TD, w_EDF, h_NH))
        and h_NH.shape[0] < RAGGED_ROWS
    )


def specialised_hidden_gradients(
    dout_TD: Tensor,
    rows: Rows,
    w_EDF: Tensor,
    weights_TK: Tensor,
    h_NH: Tensor,
    glu: Glu,
    dh_NH: Tensor,
    wa_NF: Tensor,
    partial_NC: Tensor,
) -> None:
    """Writes dh_NH, wa_NF and partial_NC (one column per :data:`BN` columns of a).

    Args:
        dout_TD, w_EDF, weights_TK, h_NH, glu: see :func:`moe_patch.kernels.dh.hidden_gradients`.
        rows: the plan and its tile table for :data:`BM`.
    """
    E, D, F = w_EDF.shape
    columns = triton.cdiv(F, BN)
    chunk = gl.NVMMASharedLayout(128, 16, rank=4)
    box = [1, 1, BM // 2, CHUNK]
    weight = TensorDescriptor(
        w_EDF, [E, D, F], list(w_EDF.stride()), [1, BK, BN], gl.NVMMASharedLayout(128, 16, rank=3)
    )
    sides = [
        ragged_descriptor(t, box, chunk)
        for t in (h_NH[:, :F], h_NH[:, F:], dh_NH[:, :F], dh_NH[:, F:], wa_NF)
    ]
    _specialised_dh_kernel[(min(rows.bound * columns, device_of(h_NH).multiprocessors),)](
        dout_TD, weight, *sides, weights_TK, partial_NC, rows.plan.row_of_N, rows.plan.offsets_S,
        rows.table,
        rows.bound, columns, D // 8, dout_TD.stride(0) // 8,
        **glu_constants(glu, fast=approximate(h_NH)),
        K=rows.top_k, BM=BM, BN=BN, BK=BK, STAGES=STAGES, CHUNK=CHUNK, num_warps=4, maxnreg=168,
    )  # fmt: skip


@gluon.jit
def _locate(tile, row_tiles, columns):
    """(row tile, column tile): eight row tiles share one pass over the columns."""
    first = tile // (8 * columns) * 8
    height = min(row_tiles - first, 8)
    local = tile - first * columns
    return first + local % height, local // height


@gluon.jit
def _load_h(
    chunk: gl.constexpr, h_gate, h_up, gate_bufs, up_bufs, h_ready, h_empty, start, end, column,
    HALF: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Bring one chunk of gate and up to both consumers, once they have left its slot."""
    box_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    for half in gl.static_range(2):
        slot = half * 2 + chunk % 2
        # Two slots and four chunks a tile: a slot's phase is the same in every tile.
        mbarrier.wait(h_empty.index(slot), ((chunk // 2) & 1) ^ 1)
        mbarrier.expect(h_ready.index(slot), HALF * CHUNK * 4)
        at = [
            RAGGED_ROWS_C,
            end,
            RAGGED_ROWS_C - (end - start) + half * HALF,
            column + chunk * CHUNK,
        ]
        gate = gate_bufs.index(slot)._reinterpret(gate_bufs.dtype, [1, 1, HALF, CHUNK], box_layout)
        up = up_bufs.index(slot)._reinterpret(up_bufs.dtype, [1, 1, HALF, CHUNK], box_layout)
        tma.async_copy_global_to_shared(h_gate, at, h_ready.index(slot), gate)
        tma.async_copy_global_to_shared(h_up, at, h_ready.index(slot), up)


@gluon.jit
def _produce(
    dout_ptr, weight, h_gate, h_up, row_ptr, offsets_ptr, table_ptr, left_bufs, right_bufs,
    gate_bufs, up_bufs,
    ready, empty, h_ready, h_empty, M, columns, steps, width_8, stride_8, K: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BM // 2
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    box_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    # In units of 8, so that the compiler knows that rows keep the 16 bytes of a copy aligned.
    width, stride = width_8 * 8, stride_8 * 8
    row_tiles = gl.load(table_ptr)
    lane = gl.arange(0, BK, layout=gl.SliceLayout(0, copy))
    step = 0
    for tile in range(gl.program_id(0), row_tiles * columns, gl.num_programs(0)):
        row_tile, column_tile = _locate(tile, row_tiles, columns)
        e = gl.load(table_ptr + 1 + row_tile)
        start = gl.load(table_ptr + 1 + M + row_tile)
        end = gl.load(offsets_ptr + e + 1)
        n = start + gl.arange(0, HALF, layout=gl.SliceLayout(1, copy))
        low = gl.load(row_ptr + gl.minimum(n, end - 1)) // K
        high = gl.load(row_ptr + gl.minimum(n + HALF, end - 1)) // K
        low_at = dout_ptr + low.to(gl.int64)[:, None] * stride
        high_at = dout_ptr + high.to(gl.int64)[:, None] * stride
        for i in range(0, steps):
            k0 = i * BK
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(stage), BK * BN * 2)
            box = right_bufs.index(stage)._reinterpret(right_bufs.dtype, [1, BK, BN], box_layout)
            tma.async_copy_global_to_shared(
                weight, [e, k0, column_tile * BN], ready.index(stage), box
            )
            k = k0 + lane
            mask = (k < width)[None, :]
            async_copy.async_copy_global_to_shared(
                left_bufs.index(2 * stage), low_at + k[None, :], mask=mask
            )
            async_copy.async_copy_global_to_shared(
                left_bufs.index(2 * stage + 1), high_at + k[None, :], mask=mask
            )
            async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
            # Not before the ring is full: the slots are free only when the tile before is done.
            if i == gl.minimum(STAGES, steps) - 1:
                for chunk in gl.static_range(2):
                    _load_h(
                        chunk, h_gate, h_up, gate_bufs, up_bufs, h_ready, h_empty, start, end,
                        column_tile * BN, HALF, CHUNK,
                    )  # fmt: skip
            step += 1
        for chunk in gl.static_range(2, BN // CHUNK):
            _load_h(
                chunk, h_gate, h_up, gate_bufs, up_bufs, h_ready, h_empty, start, end,
                column_tile * BN, HALF, CHUNK,
            )  # fmt: skip


@gluon.jit
def _part(acc, chunk: gl.constexpr, HALF: gl.constexpr, BN: gl.constexpr, layout: gl.constexpr):
    """Columns of one of four chunks, without leaving the registers."""
    low, high = gl.split(acc.reshape((HALF, 2, BN // 2)).permute((0, 2, 1)))
    both = low if chunk < 2 else high
    first, second = gl.split(both.reshape((HALF, 2, BN // 4)).permute((0, 2, 1)))
    return gl.convert_layout(first if chunk % 2 == 0 else second, layout)


@gluon.jit
def _consume(
    half, dh_gate, dh_up, wa, weights_ptr, partial_ptr, row_ptr, offsets_ptr, table_ptr,
    left_bufs, right_bufs, gate_bufs, up_bufs, wa_bufs, ready, empty, h_ready, h_empty, M, columns,
    steps,
    KIND: gl.constexpr, GATED: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    CLAMPED: gl.constexpr,
    FAST: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    CHUNK: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BM // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    part: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    box_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    dtype: gl.constexpr = wa_bufs.dtype
    row_tiles = gl.load(table_ptr)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * columns, gl.num_programs(0)):
        row_tile, column_tile = _locate(tile, row_tiles, columns)
        e = gl.load(table_ptr + 1 + row_tile)
        start = gl.load(table_ptr + 1 + M + row_tile)
        end = gl.load(offsets_ptr + e + 1)
        n = start + half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, part))
        row = gl.load(row_ptr + gl.minimum(n, end - 1))
        weight = gl.load(weights_ptr + row).to(gl.float32)[:, None]
        acc = gl.zeros((HALF, BN), dtype=gl.float32, layout=layout)
        for i in range(0, steps):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            # cp.async wrote through the generic proxy, wgmma reads through the asynchronous one.
            fence_async_shared()
            acc = warpgroup_mma(
                left_bufs.index(2 * stage + half), right_bufs.index(stage), acc, is_async=True
            )
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=i > 0)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        partial = gl.zeros((HALF,), dtype=gl.float32, layout=gl.SliceLayout(1, part))
        at_row = RAGGED_ROWS_C - (end - start) + half * HALF
        for chunk in gl.static_range(BN // CHUNK):
            slot = half * 2 + chunk % 2
            da = _part(acc, chunk, HALF, BN, part)
            mbarrier.wait(h_ready.index(slot), (chunk // 2) & 1)
            gate = gate_bufs.index(slot).load(part).to(gl.float32)
            up = up_bufs.index(slot).load(part).to(gl.float32)
            a = glu_forward(gate, up, KIND, GATED, ALPHA, LIMIT, CLAMPED, FAST)
            a = rounded(a, dtype, FAST)
            partial += gl.sum(da * a, axis=1)
            dgate, dup = glu_backward(
                gate, up, da * weight, KIND, GATED, ALPHA, LIMIT, CLAMPED, FAST
            )
            # The chunk before has left its buffers by now: its slot of h is free, and so is w·a.
            tma.store_wait(0)
            if chunk > 0:
                mbarrier.arrive(h_empty.index(half * 2 + (chunk + 1) % 2), count=1)
            gate_bufs.index(slot).store(dgate.to(dtype))
            up_bufs.index(slot).store(dup.to(dtype))
            wa_bufs.index(half).store((weight * a).to(dtype))
            fence_async_shared()
            at = [RAGGED_ROWS_C, end, at_row, column_tile * BN + chunk * CHUNK]
            tma.async_copy_shared_to_global(
                dh_gate,
                at,
                gate_bufs.index(slot)._reinterpret(dtype, [1, 1, HALF, CHUNK], box_layout),
            )
            tma.async_copy_shared_to_global(
                dh_up, at, up_bufs.index(slot)._reinterpret(dtype, [1, 1, HALF, CHUNK], box_layout)
            )
            tma.async_copy_shared_to_global(
                wa, at, wa_bufs.index(half)._reinterpret(dtype, [1, 1, HALF, CHUNK], box_layout)
            )
        tma.store_wait(0)
        mbarrier.arrive(h_empty.index(half * 2 + (BN // CHUNK + 1) % 2), count=1)
        gl.store(partial_ptr + n.to(gl.int64) * columns + column_tile, partial, mask=n < end)


@gluon.jit(do_not_specialize=["M"])
def _specialised_dh_kernel(
    dout_ptr, weight, h_gate, h_up, dh_gate, dh_up, wa, weights_ptr, partial_ptr,
    row_ptr, offsets_ptr, table_ptr, M, columns, width_8, stride_8,
    KIND: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr, CLAMPED: gl.constexpr, FAST: gl.constexpr, K: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Grid: the multiprocessors. Each program takes tiles of BM rows x BN columns of a in turn."""
    dtype: gl.constexpr = dout_ptr.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    left_bufs = gl.allocate_shared_memory(dtype, [2 * STAGES, BM // 2, BK], shared)
    right_bufs = gl.allocate_shared_memory(dtype, [STAGES, BK, BN], shared)
    gate_bufs = gl.allocate_shared_memory(dtype, [4, BM // 2, CHUNK], shared)
    up_bufs = gl.allocate_shared_memory(dtype, [4, BM // 2, CHUNK], shared)
    wa_bufs = gl.allocate_shared_memory(dtype, [2, BM // 2, CHUNK], shared)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    h_ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    h_empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=129)
        mbarrier.init(empty.index(stage), count=2)
    for slot in gl.static_range(4):
        mbarrier.init(h_ready.index(slot), count=1)
        mbarrier.init(h_empty.index(slot), count=1)
    steps = (width_8 * 8 + BK - 1) // BK
    gl.warp_specialize(
        [
            (_consume, (0, dh_gate, dh_up, wa, weights_ptr, partial_ptr, row_ptr, offsets_ptr,
                        table_ptr,
                        left_bufs, right_bufs, gate_bufs, up_bufs, wa_bufs, ready, empty, h_ready,
                        h_empty,
                        M, columns, steps, KIND, GATED, ALPHA, LIMIT, CLAMPED, FAST, BM, BN,
                        STAGES, CHUNK)),
            (_consume, (1, dh_gate, dh_up, wa, weights_ptr, partial_ptr, row_ptr, offsets_ptr,
                        table_ptr,
                        left_bufs, right_bufs, gate_bufs, up_bufs, wa_bufs, ready, empty, h_ready,
                        h_empty,
                        M, columns, steps, KIND, GATED, ALPHA, LIMIT, CLAMPED, FAST, BM, BN,
                        STAGES, CHUNK)),
            (_produce, (dout_ptr, weight, h_gate, h_up, row_ptr, offsets_ptr, table_ptr,
                        left_bufs, right_bufs,
                        gate_bufs, up_bufs, ready, empty, h_ready, h_empty, M, columns, steps,
                        width_8, stride_8,
                        K, BM, BN, BK, STAGES, CHUNK)),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip
