"""Gradients through the activation on Hopper, in Gluon: the counterpart of experts/dh.py.

One warpgroup is the producer. It gathers rows of dout by cp.async and loads W2 by TMA. Then it
loads h through the same ring (kernels/hopper/common.py), 64 columns of gate and up per stage. So h
has arrived when the product ends.

Two warpgroups are consumers. Each multiplies 64 rows and computes dh, w·a and the partial sums from
da' and h. Gradients overwrite h in shared memory and are stored from there by TMA, clipped at the
expert's end. Only then is the stage released.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from moe_patch.kernels.common.device import approximate, cdiv
from moe_patch.kernels.common.gemm_device import rows_of_tile
from moe_patch.kernels.common.glu import glu_backward, glu_forward, rounded
from moe_patch.kernels.common.launcher import Box, Launcher
from moe_patch.kernels.hopper.common import (
    ACC,
    BK,
    BK_C,
    BM,
    BM_C,
    BN,
    BN_C,
    CHUNK,
    CHUNK_C,
    HALF_C,
    PART,
    RAGGED_ROWS_C,
    RANK2_C,
    RANK3,
    RANK3_C,
    RANK4_C,
    STAGES_C,
    claim,
    constants,
    load_box,
    make_ring,
    programs,
    quarter,
    ragged_box,
    rank_depth,
    specialise,
    sum_both,
    takes,
    whole_box,
)
from moe_patch.kernels.hopper.gather import gather_steps, halves
from moe_patch.kernels.hopper.gluon_names import seen_as, tma_store
from moe_patch.kernels.plan.row_tiles import RowTiling
from moe_patch.types import Glu


def supported(
    dout_TD: Tensor,
    rows: RowTiling,
    w_EDF: Tensor,
    h_NH: Tensor,
    glu: Glu,
    low_rank: tuple[Tensor, Tensor] | None,
) -> bool:
    """Return whether the kernel supports the operands: gate and up in halves, 16-byte units."""
    side_by_side = glu.gated and not glu.interleaved
    return side_by_side and takes(rows, (h_NH, dout_TD), w_EDF, low_rank)


def hidden_gradients(
    dout_TD: Tensor,
    rows: RowTiling,
    w_EDF: Tensor,
    weights_TK: Tensor,
    h_NH: Tensor,
    glu: Glu,
    into: tuple[Tensor, Tensor, Tensor],
    low_rank: tuple[Tensor, Tensor] | None,
    group: int,
) -> None:
    """Write the tensors of ``into``.

    Args:
        dout_TD, w_EDF, weights_TK, h_NH, glu, low_rank: see
            :func:`moe_patch.kernels.experts.dh.hidden_gradients`.
        rows: the plan and its tile table for :data:`BM`.
        into: (dh_NH, wa_NF, partial_NC). wa_NF may be empty; partial_NC has one column for every
            :data:`BN` columns of a.
        group: row tiles that share a pass over the columns.
    """
    dh_NH, wa_NF, partial_NC = into
    D, F = w_EDF.shape[1:]
    columns = cdiv(F, BN)
    weight = _boxes(w_EDF)
    q_NR, factor = (dout_TD, weight) if low_rank is None else (low_rank[0], _boxes(low_rank[1]))
    wa, block = wa_NF if wa_NF.numel() > 0 else dh_NH, (BM // 2, CHUNK)
    _launch(
        (programs(rows.bound * columns, h_NH),),
        (dout_TD, q_NR, weight, factor,
         ragged_box(h_NH, block, F), ragged_box(h_NH, block, F, F),
         ragged_box(dh_NH, block, F), ragged_box(dh_NH, block, F, F), ragged_box(wa, block, F),
         weights_TK, partial_NC, rows.plan.row_of_N, rows.plan.offsets_S, rows.table),
        (rows.bound,),
        (columns, D // 8, q_NR.shape[1] // 8, dout_TD.stride(0) // 8, q_NR.stride(0) // 8,
         rows.top_k),
        constants(group, glu, approximate(h_NH), LOW_RANK=rank_depth(low_rank),
                  WA=wa is wa_NF),
    )  # fmt: skip


def _boxes(w_EIO: Tensor) -> Box:
    return whole_box(w_EIO, (1, BK, BN), RANK3)


@gluon.jit
def _h_boxes(ring, stage, half):
    """Return one consumer's buffers of gate and up in a stage that holds h."""
    SHAPE: gl.constexpr = [4, HALF_C, CHUNK_C]
    boxes = seen_as(ring.right.index(stage), SHAPE, RANK2_C)
    return boxes.index(half), boxes.index(2 + half)


@gluon.jit
def _produce(
    dout_ptr, q_ptr, weight, factor, h_gate, h_up, row_ptr, offsets_ptr, table_ptr, ring, M,
    columns, steps, low_steps, width_8, rank_8, stride_8, stride_q8, K,
    LOW_RANK: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    row_tiles = gl.load(table_ptr)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * columns, gl.num_programs(0)):
        e, start, end, column_tile = rows_of_tile(
            tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP
        )
        column = column_tile * BN_C
        low, high = halves(start, end)
        # Pass strides in units of 8, so that the compiler can prove 16-byte alignment.
        step = gather_steps(
            dout_ptr, gl.load(row_ptr + low) // K, gl.load(row_ptr + high) // K, stride_8 * 8,
            start, end, width_8 * 8, weight, e, column, ring, steps, step, [1, BK_C, BN_C], RANK3_C,
        )  # fmt: skip
        if LOW_RANK > 0:
            step = gather_steps(
                q_ptr, low, high, stride_q8 * 8, start, end, rank_8 * 8, factor, e, column, ring,
                low_steps, step, [1, BK_C, BN_C], RANK3_C,
            )  # fmt: skip
        for chunk in gl.static_range(BN_C // CHUNK_C):
            stage = claim(ring, step, BM_C * CHUNK_C * 4)
            bar = ring.ready.index(stage)
            for half in gl.static_range(2):
                gate, up = _h_boxes(ring, stage, half)
                clip = RAGGED_ROWS_C - (end - start) + half * HALF_C
                at = [RAGGED_ROWS_C, end, clip, column + chunk * CHUNK_C]
                load_box(h_gate, at, bar, gate, [1, 1, HALF_C, CHUNK_C], RANK4_C)
                load_box(h_up, at, bar, up, [1, 1, HALF_C, CHUNK_C], RANK4_C)
            # Arrive for the 128 threads, which gather only in the other stages.
            mbarrier.arrive(bar, count=128)
            step += 1


@gluon.jit
def _consume(
    half, dh_gate, dh_up, wa, weights_ptr, partial_ptr, row_ptr, offsets_ptr, table_ptr, ring,
    wa_bufs, M, columns, steps, low_steps, glu,
    FAST: gl.constexpr, WA: gl.constexpr, LOW_RANK: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = wa_bufs.dtype
    SHAPE: gl.constexpr = [1, 1, HALF_C, CHUNK_C]
    row_tiles = gl.load(table_ptr)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * columns, gl.num_programs(0)):
        _e, start, end, column_tile = rows_of_tile(
            tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP
        )
        n = start + half * HALF_C + gl.arange(0, HALF_C, layout=gl.SliceLayout(1, PART))
        row = gl.load(row_ptr + gl.minimum(n, end - 1))
        weight = gl.load(weights_ptr + row).to(gl.float32)[:, None]
        acc = gl.zeros((HALF_C, BN_C), dtype=gl.float32, layout=ACC)
        acc, step = sum_both(acc, steps, low_steps, step, half, ring, False, True, LOW_RANK)
        partial = gl.zeros((HALF_C,), dtype=gl.float32, layout=gl.SliceLayout(1, PART))
        clip = RAGGED_ROWS_C - (end - start) + half * HALF_C
        for chunk in gl.static_range(BN_C // CHUNK_C):
            da = quarter(acc, chunk, PART)
            stage = step % STAGES_C
            mbarrier.wait(ring.ready.index(stage), (step // STAGES_C) & 1)
            gate_buf, up_buf = _h_boxes(ring, stage, half)
            gate = gate_buf.load(PART).to(gl.float32)
            up = up_buf.load(PART).to(gl.float32)
            a = glu_forward(gate, up, *glu, FAST)
            a = rounded(a, dtype, FAST)
            partial += gl.sum(da * a, axis=1)
            dgate, dup = glu_backward(gate, up, da * weight, *glu, FAST)
            # Wait until the previous chunk is stored, then release its stage.
            tma.store_wait(0)
            if chunk > 0:
                mbarrier.arrive(ring.empty.index((step + STAGES_C - 1) % STAGES_C), count=1)
            gate_buf.store(dgate.to(dtype))
            up_buf.store(dup.to(dtype))
            if WA:
                wa_bufs.index(half).store((weight * a).to(dtype))
            fence_async_shared()
            at = [RAGGED_ROWS_C, end, clip, column_tile * BN_C + chunk * CHUNK_C]
            tma_store(dh_gate, at, seen_as(gate_buf, SHAPE, RANK4_C))
            tma_store(dh_up, at, seen_as(up_buf, SHAPE, RANK4_C))
            if WA:
                wa_box = seen_as(wa_bufs.index(half), SHAPE, RANK4_C)
                tma_store(wa, at, wa_box)
            step += 1
        tma.store_wait(0)
        mbarrier.arrive(ring.empty.index((step + STAGES_C - 1) % STAGES_C), count=1)
        gl.store(partial_ptr + n.to(gl.int64) * columns + column_tile, partial, mask=n < end)


@gluon.jit(do_not_specialize=["M"])
def _hopper_dh_kernel(
    dout_ptr, q_ptr, weight, factor, h_gate, h_up, dh_gate, dh_up, wa, weights_ptr, partial_ptr,
    row_ptr, offsets_ptr, table_ptr, M, columns, width_8, rank_8, stride_8, stride_q8, K,
    KIND: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr, CLAMPED: gl.constexpr, FAST: gl.constexpr,
    LOW_RANK: gl.constexpr, WA: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Grid: the multiprocessors. Each program loops over tiles of BM rows x BN columns of a."""
    dtype: gl.constexpr = dout_ptr.dtype.element_ty
    ring = make_ring(dtype, (HALF_C, BK_C), (BK_C, BN_C), 129)
    wa_bufs = gl.allocate_shared_memory(dtype, [2, HALF_C, CHUNK_C], RANK2_C)
    steps = (width_8 * 8 + BK_C - 1) // BK_C
    low_steps = (rank_8 * 8 + BK_C - 1) // BK_C
    specialise(
        _consume,
        (dh_gate, dh_up, wa, weights_ptr, partial_ptr, row_ptr, offsets_ptr, table_ptr, ring,
         wa_bufs, M, columns, steps, low_steps, (KIND, GATED, ALPHA, LIMIT, CLAMPED), FAST, WA,
         LOW_RANK, GROUP),
        _produce,
        (dout_ptr, q_ptr, weight, factor, h_gate, h_up, row_ptr, offsets_ptr, table_ptr, ring, M,
         columns, steps, low_steps, width_8, rank_8, stride_8, stride_q8, K, LOW_RANK, GROUP),
        4, [224, 56],
    )  # fmt: skip


_launch = Launcher(_hopper_dh_kernel)
