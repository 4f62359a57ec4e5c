"""The gradients through the activation on Hopper, in Gluon: a warp-specialised form of dh.py.

One warpgroup produces: it gathers rows of dout by cp.async and brings W2 by TMA. h follows through
the same ring (kernels/hopper/common.py), 64 columns of gate and up a stage, so that it is there
when the product ends. Two warpgroups consume: they multiply 64 rows each and turn da' and h into
dh, w·a and the partial sums. Gradients overwrite the h they came from in shared memory and leave
from there by TMA, clipped at the expert's end; only then the stage is free.
"""

from __future__ import annotations

import functools

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from moe_patch.kernels.common.device import approximate, cdiv
from moe_patch.kernels.common.glu import glu_backward, glu_constants, glu_forward, rounded
from moe_patch.kernels.common.launcher import Box, Constants, Launcher
from moe_patch.kernels.common.tiling import rows_of_tile
from moe_patch.kernels.common.versions import available
from moe_patch.kernels.hopper.common import (
    BK,
    BM,
    BN,
    CHUNK,
    RAGGED_ROWS_C,
    RANK3,
    RANK3_C,
    RANK4_C,
    claim,
    constants,
    copies_boxes,
    copies_rows,
    load_box,
    programs,
    quarter,
    ragged_box,
    rank_depth,
    ring,
    sum_both,
    whole_box,
    with_factors,
)
from moe_patch.kernels.hopper.gather import gather_steps, halves
from moe_patch.kernels.plan.row_tiles import Rows
from moe_patch.types import Glu


def supported(
    dout_TD: Tensor,
    rows: Rows,
    w_EDF: Tensor,
    h_NH: Tensor,
    glu: Glu,
    low_rank: tuple[Tensor, Tensor] | None,
) -> bool:
    """Whether this kernel takes the operands: gate and up side by side, whole 16 bytes."""
    sides, weights = with_factors([dout_TD, h_NH], w_EDF, low_rank)
    return (
        rows.block_m == BM
        and available(h_NH)
        and glu.gated
        and not glu.interleaved
        and w_EDF.shape[2] % 8 == 0
        and copies_rows(*sides)
        and copies_boxes(*weights, axis=2)
    )


def specialised_hidden_gradients(
    dout_TD: Tensor,
    rows: Rows,
    w_EDF: Tensor,
    weights_TK: Tensor,
    h_NH: Tensor,
    glu: Glu,
    into: tuple[Tensor, Tensor, Tensor],
    low_rank: tuple[Tensor, Tensor] | None,
    group: int,
) -> None:
    """Writes the tensors of ``into``.

    Args:
        dout_TD, w_EDF, weights_TK, h_NH, glu, low_rank: see
            :func:`moe_patch.kernels.experts.dh.hidden_gradients`.
        rows: the plan and its tile table for :data:`BM`.
        into: (dh_NH, wa_NF, partial_NC), where wa_NF may be empty and partial_NC has a column for
            every :data:`BN` columns of a.
        group: row tiles that share a pass over the columns.
    """
    dh_NH, wa_NF, partial_NC = into
    D, F = w_EDF.shape[1:]
    columns = cdiv(F, BN)
    weight = _boxes(w_EDF)
    q_NR, factor = dout_TD, weight
    if low_rank is not None:
        q_NR, factor = low_rank[0], _boxes(low_rank[1])
    wa = wa_NF if wa_NF.numel() > 0 else dh_NH
    sides = (h_NH, h_NH[:, F:], dh_NH, dh_NH[:, F:], wa)
    _launch(
        (programs(rows.bound * columns, h_NH),),
        (dout_TD, q_NR, weight, factor,
         *(ragged_box(side, (BM // 2, CHUNK), F) for side in sides),
         weights_TK, partial_NC, rows.plan.row_of_N, rows.plan.offsets_S, rows.table),
        (rows.bound,),
        (columns, D // 8, q_NR.shape[1] // 8, dout_TD.stride(0) // 8, q_NR.stride(0) // 8,
         rows.top_k),
        _constants(glu, approximate(h_NH), rank_depth(low_rank), wa_NF.numel() > 0, group),
    )  # fmt: skip


@functools.cache
def _constants(glu: Glu, fast: bool, low_rank: int, wa: bool, group: int) -> Constants:
    return constants(group, **glu_constants(glu, fast=fast), LOW_RANK=low_rank, WA=wa)


def _boxes(w_EIO: Tensor) -> Box:
    return whole_box(w_EIO, (1, BK, BN), RANK3)


@gluon.jit
def _h_boxes(right_bufs, stage, half, CHUNK: gl.constexpr, HALF: gl.constexpr):
    """The buffers of gate and up of one consumer in a stage that carries h."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    SHAPE: gl.constexpr = [4, HALF, CHUNK]
    boxes = right_bufs.index(stage)._reinterpret(right_bufs.dtype, SHAPE, layout)
    return boxes.index(half), boxes.index(2 + half)


@gluon.jit
def _produce(
    dout_ptr, q_ptr, weight, factor, h_gate, h_up, row_ptr, offsets_ptr, table_ptr, left_bufs,
    right_bufs, ready, empty, M, columns, steps, low_steps,
    width_8, rank_8, stride_8, stride_q8, K,
    LOW_RANK: gl.constexpr, GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BM // 2
    row_tiles = gl.load(table_ptr)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * columns, gl.num_programs(0)):
        e, start, end, column_tile = rows_of_tile(
            tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP
        )
        column = column_tile * BN
        low, high = halves(start, end, HALF)
        # Strides in units of 8, so that the compiler knows that copies of 16 bytes are aligned.
        step = gather_steps(
            dout_ptr, gl.load(row_ptr + low) // K, gl.load(row_ptr + high) // K, stride_8 * 8,
            start, end, width_8 * 8, weight, e, column, left_bufs, right_bufs, ready, empty, steps,
            step, [1, BK, BN], RANK3_C, BK, STAGES,
        )  # fmt: skip
        if LOW_RANK > 0:
            step = gather_steps(
                q_ptr, low, high, stride_q8 * 8, start, end, rank_8 * 8, factor, e, column,
                left_bufs, right_bufs, ready, empty, low_steps, step, [1, BK, BN], RANK3_C, BK,
                STAGES,
            )  # fmt: skip
        for chunk in gl.static_range(BN // CHUNK):
            stage = claim(ready, empty, step, BM * CHUNK * 4, STAGES)
            for half in gl.static_range(2):
                gate, up = _h_boxes(right_bufs, stage, half, CHUNK, HALF)
                clip = RAGGED_ROWS_C - (end - start) + half * HALF
                at = [RAGGED_ROWS_C, end, clip, column + chunk * CHUNK]
                load_box(h_gate, at, ready.index(stage), gate, [1, 1, HALF, CHUNK], RANK4_C)
                load_box(h_up, at, ready.index(stage), up, [1, 1, HALF, CHUNK], RANK4_C)
            # In place of the threads that gather in the other stages.
            mbarrier.arrive(ready.index(stage), count=128)
            step += 1


@gluon.jit
def _consume(
    half, dh_gate, dh_up, wa, weights_ptr, partial_ptr, row_ptr, offsets_ptr, table_ptr,
    left_bufs, right_bufs, wa_bufs, ready, empty, M, columns, steps, low_steps,
    KIND: gl.constexpr, GATED: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    CLAMPED: gl.constexpr, FAST: gl.constexpr, WA: gl.constexpr, LOW_RANK: gl.constexpr,
    GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    CHUNK: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BM // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    part: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    dtype: gl.constexpr = wa_bufs.dtype
    SHAPE: gl.constexpr = [1, 1, HALF, CHUNK]
    row_tiles = gl.load(table_ptr)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * columns, gl.num_programs(0)):
        _e, start, end, column_tile = rows_of_tile(
            tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP
        )
        n = start + half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, part))
        row = gl.load(row_ptr + gl.minimum(n, end - 1))
        weight = gl.load(weights_ptr + row).to(gl.float32)[:, None]
        acc = gl.zeros((HALF, BN), dtype=gl.float32, layout=layout)
        acc, step = sum_both(
            acc, steps, low_steps, step, half, left_bufs, right_bufs, ready, empty, False, True,
            STAGES, LOW_RANK,
        )  # fmt: skip
        partial = gl.zeros((HALF,), dtype=gl.float32, layout=gl.SliceLayout(1, part))
        clip = RAGGED_ROWS_C - (end - start) + half * HALF
        for chunk in gl.static_range(BN // CHUNK):
            da = quarter(acc, chunk, part)
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            gate_buf, up_buf = _h_boxes(right_bufs, stage, half, CHUNK, HALF)
            gate = gate_buf.load(part).to(gl.float32)
            up = up_buf.load(part).to(gl.float32)
            a = glu_forward(gate, up, KIND, GATED, ALPHA, LIMIT, CLAMPED, FAST)
            a = rounded(a, dtype, FAST)
            partial += gl.sum(da * a, axis=1)
            dgate, dup = glu_backward(
                gate, up, da * weight, KIND, GATED, ALPHA, LIMIT, CLAMPED, FAST
            )
            # By now the chunk before has left its buffers.
            tma.store_wait(0)
            if chunk > 0:
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
            gate_buf.store(dgate.to(dtype))
            up_buf.store(dup.to(dtype))
            if WA:
                wa_bufs.index(half).store((weight * a).to(dtype))
            fence_async_shared()
            at = [RAGGED_ROWS_C, end, clip, column_tile * BN + chunk * CHUNK]
            tma.async_copy_shared_to_global(
                dh_gate, at, gate_buf._reinterpret(dtype, SHAPE, RANK4_C)
            )
            tma.async_copy_shared_to_global(dh_up, at, up_buf._reinterpret(dtype, SHAPE, RANK4_C))
            if WA:
                wa_box = wa_bufs.index(half)._reinterpret(dtype, SHAPE, RANK4_C)
                tma.async_copy_shared_to_global(wa, at, wa_box)
            step += 1
        tma.store_wait(0)
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        gl.store(partial_ptr + n.to(gl.int64) * columns + column_tile, partial, mask=n < end)


@gluon.jit(do_not_specialize=["M"])
def _specialised_dh_kernel(
    dout_ptr, q_ptr, weight, factor, h_gate, h_up, dh_gate, dh_up, wa, weights_ptr, partial_ptr,
    row_ptr, offsets_ptr, table_ptr, M, columns, width_8, rank_8, stride_8, stride_q8, K,
    KIND: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr, CLAMPED: gl.constexpr, FAST: gl.constexpr,
    LOW_RANK: gl.constexpr, WA: gl.constexpr, GROUP: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Grid: the multiprocessors. Each program takes tiles of BM rows x BN columns of a in turn."""
    dtype: gl.constexpr = dout_ptr.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    left_bufs, right_bufs, ready, empty = ring(dtype, (BM // 2, BK), (BK, BN), 129, STAGES)
    wa_bufs = gl.allocate_shared_memory(dtype, [2, BM // 2, CHUNK], shared)
    steps = (width_8 * 8 + BK - 1) // BK
    low_steps = (rank_8 * 8 + BK - 1) // BK
    gl.warp_specialize(
        [
            (_consume, (0, dh_gate, dh_up, wa, weights_ptr, partial_ptr, row_ptr, offsets_ptr,
                        table_ptr, left_bufs, right_bufs, wa_bufs, ready, empty, M, columns,
                        steps, low_steps, KIND, GATED, ALPHA, LIMIT, CLAMPED, FAST, WA, LOW_RANK,
                        GROUP, BM, BN, STAGES, CHUNK)),
            (_consume, (1, dh_gate, dh_up, wa, weights_ptr, partial_ptr, row_ptr, offsets_ptr,
                        table_ptr, left_bufs, right_bufs, wa_bufs, ready, empty, M, columns,
                        steps, low_steps, KIND, GATED, ALPHA, LIMIT, CLAMPED, FAST, WA, LOW_RANK,
                        GROUP, BM, BN, STAGES, CHUNK)),
            (_produce, (dout_ptr, q_ptr, weight, factor, h_gate, h_up, row_ptr, offsets_ptr,
                        table_ptr, left_bufs, right_bufs, ready, empty, M, columns, steps,
                        low_steps, width_8, rank_8, stride_8, stride_q8, K, LOW_RANK, GROUP,
                        BM, BN, BK, STAGES, CHUNK)),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip


_launch = Launcher(_specialised_dh_kernel)
