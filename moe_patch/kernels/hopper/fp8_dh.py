"""Gradients through the activation from an FP8 product on Hopper, in Gluon; see hopper/dh.py.

W2 is transposed beforehand, so that both sides are contiguous in depth. The epilogue works on one
half of a tile at a time: its 128 columns of gate and of up are one group of dh each. It writes them
in 16 bits and then quantises them. It is a loop over chunks of 64 columns. Unrolled, the kernel has
187 KB of code instead of 95, more than the instruction cache, and takes 1.3 to 1.65 times as long.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from moe_patch.kernels.common.device import approximate, cdiv
from moe_patch.kernels.common.e4m3_scale import GROUP
from moe_patch.kernels.common.gemm_device import rows_of_tile
from moe_patch.kernels.common.glu import glu_backward, glu_forward, rounded
from moe_patch.kernels.common.launcher import Launcher
from moe_patch.kernels.hopper.common import (
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
    RANK4_C,
    STAGES_C,
    claim,
    constants,
    load_box,
    programs,
    ragged_box,
    rank_depth,
    specialise,
    whole_box,
)
from moe_patch.kernels.hopper.fp8 import (
    BK8,
    BK8_C,
    HALF_ACC,
    RANK3_8,
    RANK3_8C,
    chunk_of,
    factor_box,
    load_low_rank,
    low_rank_boxes,
    make_ring8,
    store_quantised,
    sum_low_rank,
    sum_scaled,
    value_box,
)
from moe_patch.kernels.hopper.fp8_gather import gather_tile8
from moe_patch.kernels.hopper.gluon_names import cast_as, seen_as, tma_store
from moe_patch.kernels.plan.row_tiles import RowTiling
from moe_patch.types import Glu


def hidden_gradients(
    dout_TD: tuple[Tensor, Tensor],
    rows: RowTiling,
    w_EFD: tuple[Tensor, Tensor],
    weights_TK: Tensor,
    h_NH: Tensor,
    glu: Glu,
    into: tuple[Tensor, Tensor, Tensor],
    quantised_NH: tuple[Tensor, Tensor],
    low_rank: tuple[Tensor, Tensor] | None,
    group: int,
) -> None:
    """Write the tensors of ``into`` and dh in e4m3 with its scales.

    Args:
        dout_TD: values and scales.
        rows: the plan and its tile table for :data:`BM`.
        w_EFD: the down projection with its axes exchanged in memory: values and scales.
        weights_TK, h_NH, glu: as in :func:`moe_patch.kernels.experts.dh.hidden_gradients`.
        into: (dh_NH, wa_NF, partial_NC), as in moe_patch/kernels/hopper/dh.py.
        quantised_NH: values and scales of dh.
        low_rank: (q_NR, A_ERF) in 16 bits: adds A_eᵀ q_n to da'.
        group: row tiles that share a pass over the columns.
    """
    dh_NH, wa_NF, partial_NC = into
    (values_TD, scales_TD), (w, scales_w), (values_NH, scales_NH) = dout_TD, w_EFD, quantised_NH
    F, D = w.shape[1:]
    columns, R, depth_last = cdiv(F, BN), 0, True
    weight, factor = whole_box(w, (1, BN, BK8), RANK3_8), None
    if low_rank is not None:
        l_EFR = low_rank[1].transpose(1, 2)
        R, depth_last = low_rank[0].shape[1], l_EFR.stride(2) == 1
        factor = factor_box(l_EFR, depth_last)
    q, factor = low_rank_boxes(low_rank, weight, factor)
    wa, block = wa_NF if wa_NF.numel() > 0 else dh_NH, (BM // 2, CHUNK)
    _launch(
        (programs(rows.bound * columns, h_NH),),
        (values_TD, q, weight, factor,
         ragged_box(h_NH, block, F), ragged_box(h_NH, block, F, F),
         ragged_box(dh_NH, block, F), ragged_box(dh_NH, block, F, F), ragged_box(wa, block, F),
         value_box(values_NH, F), value_box(values_NH, F, F),
         scales_TD, scales_w, scales_NH, weights_TK, partial_NC, rows.plan.row_of_N,
         rows.plan.offsets_S, rows.table),
        (rows.bound,),
        (columns, F // GROUP, D // GROUP, R, rows.top_k),
        constants(group, glu, approximate(h_NH), LOW_RANK=rank_depth(low_rank),
                  DEPTH_LAST=depth_last, WA=wa is wa_NF),
    )  # fmt: skip


@gluon.jit
def _h_boxes(ring, stage, half, dtype: gl.constexpr):
    """Return one consumer's buffers of gate and up in a stage that holds h."""
    boxes = cast_as(ring.right.index(stage), dtype, [4, HALF_C, CHUNK_C], RANK2_C)
    return boxes.index(half), boxes.index(2 + half)


@gluon.jit
def _chunks(column_tile, blocks):
    """Return the number of chunks of a tile; the last tile of an odd number of blocks has two."""
    return gl.minimum(blocks - column_tile * 2, 2) * 2


@gluon.jit
def _produce(
    dout_ptr, q, weight, factor, h_gate, h_up, row_ptr, offsets_ptr, table_ptr, ring, M, columns,
    blocks, steps, low_steps, K,
    LOW_RANK: gl.constexpr, DEPTH_LAST: gl.constexpr, GROUP: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    row_tiles = gl.load(table_ptr)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * columns, gl.num_programs(0)):
        e, start, end, column_tile = rows_of_tile(
            tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP
        )
        column = column_tile * BN_C
        step = gather_tile8(
            dout_ptr, row_ptr, K, start, end, steps * BK8_C, weight, e, column, ring, steps, step,
            [1, BN_C, BK8_C], RANK3_8C,
        )  # fmt: skip
        if LOW_RANK > 0:
            step = load_low_rank(
                q, factor, e, start, column, low_steps, ring, step, dtype, DEPTH_LAST, True
            )  # fmt: skip
        for chunk in range(0, _chunks(column_tile, blocks)):
            stage = claim(ring, step, BM_C * CHUNK_C * 4)
            bar = ring.ready.index(stage)
            for half in gl.static_range(2):
                gate, up = _h_boxes(ring, stage, half, dtype)
                clip = RAGGED_ROWS_C - (end - start) + half * HALF_C
                at = [RAGGED_ROWS_C, end, clip, column + chunk * CHUNK_C]
                load_box(h_gate, at, bar, gate, [1, 1, HALF_C, CHUNK_C], RANK4_C)
                load_box(h_up, at, bar, up, [1, 1, HALF_C, CHUNK_C], RANK4_C)
            # Arrive for the 128 threads, which gather only in the other stages.
            mbarrier.arrive(bar, count=128)
            step += 1


@gluon.jit
def _chunk_gradients(
    da, weight, half, ring, step, at, dh_gate, dh_up, wa, wa_buf, glu, dtype: gl.constexpr,
    FAST: gl.constexpr, WA: gl.constexpr,
):  # fmt: skip
    """Consumer: compute and store 64 columns; return (sums of da' a, largest dgate and dup)."""
    SHAPE: gl.constexpr = [1, 1, HALF_C, CHUNK_C]
    stage = step % STAGES_C
    mbarrier.wait(ring.ready.index(stage), (step // STAGES_C) & 1)
    gate_buf, up_buf = _h_boxes(ring, stage, half, dtype)
    gate = gate_buf.load(PART).to(gl.float32)
    up = up_buf.load(PART).to(gl.float32)
    a = rounded(glu_forward(gate, up, *glu, FAST), dtype, FAST)
    sums = gl.sum(da * a, axis=1)
    dgate, dup = glu_backward(gate, up, da * weight, *glu, FAST)
    # The same chunk of the previous half is stored: since then, one chunk and both values.
    tma.store_wait(4 + WA)
    gate_buf.store(dgate.to(dtype))
    up_buf.store(dup.to(dtype))
    if WA:
        wa_buf.store((weight * a).to(dtype))
    fence_async_shared()
    tma_store(dh_gate, at, seen_as(gate_buf, SHAPE, RANK4_C))
    tma_store(dh_up, at, seen_as(up_buf, SHAPE, RANK4_C))
    if WA:
        tma_store(wa, at, seen_as(wa_buf, SHAPE, RANK4_C))
    return sums, gl.max(gl.abs(dgate), axis=1), gl.max(gl.abs(dup), axis=1)


@gluon.jit
def _release(ring, step, PENDING: gl.constexpr):
    """Consumer: release two stages after all but PENDING stores have read them."""
    tma.store_wait(PENDING)
    mbarrier.arrive(ring.empty.index(step % STAGES_C), count=1)
    mbarrier.arrive(ring.empty.index((step + 1) % STAGES_C), count=1)


@gluon.jit
def _consume(
    half, dh_gate, dh_up, wa, q_gate, q_up, xs_ptr, ws_ptr, hs_ptr, weights_ptr, partial_ptr,
    row_ptr, offsets_ptr, table_ptr, ring, wa_bufs, M, columns, blocks, steps, low_steps, K, glu,
    FAST: gl.constexpr, WA: gl.constexpr, LOW_RANK: gl.constexpr, DEPTH_LAST: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = wa_bufs.dtype
    row_tiles = gl.load(table_ptr)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * columns, gl.num_programs(0)):
        e, start, end, column_tile = rows_of_tile(
            tile, row_tiles, columns, M, offsets_ptr, table_ptr, GROUP
        )
        n = start + half * HALF_C + gl.arange(0, HALF_C, layout=gl.SliceLayout(1, HALF_ACC))
        token = gl.load(row_ptr + gl.minimum(n, end - 1)) // K
        other = gl.minimum(column_tile * 2 + 1, blocks - 1)
        block = ws_ptr + e.to(gl.int64) * blocks * steps
        first = gl.zeros((HALF_C, BK8_C), dtype=gl.float32, layout=HALF_ACC)
        second = gl.zeros((HALF_C, BK8_C), dtype=gl.float32, layout=HALF_ACC)
        first, second, step = sum_scaled(
            first, second, steps, step, half, ring, xs_ptr + token.to(gl.int64) * steps,
            block + column_tile * 2 * steps, block + other * steps, True,
        )  # fmt: skip
        if LOW_RANK > 0:
            first, second, step = sum_low_rank(
                first, second, low_steps, step, half, ring, dtype, LOW_RANK, DEPTH_LAST
            )  # fmt: skip
        n = start + half * HALF_C + gl.arange(0, HALF_C, layout=gl.SliceLayout(1, PART))
        inside, scales_at = n < end, hs_ptr + n.to(gl.int64) * 2 * blocks + column_tile * 2
        row = gl.load(row_ptr + gl.minimum(n, end - 1))
        weight = gl.load(weights_ptr + row).to(gl.float32)[:, None]
        partial = gl.zeros((HALF_C,), dtype=gl.float32, layout=gl.SliceLayout(1, PART))
        clip = RAGGED_ROWS_C - (end - start) + half * HALF_C
        gate_max, up_max = partial, partial
        for c in range(0, _chunks(column_tile, blocks)):
            da = gl.where(
                c < 2, gl.where(c == 0, chunk_of(first, 0), chunk_of(first, 1)),
                gl.where(c == 2, chunk_of(second, 0), chunk_of(second, 1)),
            )  # fmt: skip
            column = column_tile * BN_C + c * CHUNK_C
            sums, gate_c, up_c = _chunk_gradients(
                da, weight, half, ring, step, [RAGGED_ROWS_C, end, clip, column],
                dh_gate, dh_up, wa, wa_bufs.index(2 * half + c % 2), glu, dtype, FAST, WA,
            )  # fmt: skip
            partial += sums
            gate_max, up_max = gl.maximum(gate_max, gate_c), gl.maximum(up_max, up_c)
            if c == 2:
                _release(ring, step - 2, 2 + WA)
            if c % 2 == 1:
                # The left sides of stages that hold h are free.
                at = [RAGGED_ROWS_C, end, clip, column - CHUNK_C]
                gate_low, up_low = _h_boxes(ring, (step - 1) % STAGES_C, half, dtype)
                gate_high, up_high = _h_boxes(ring, step % STAGES_C, half, dtype)
                store_quantised(
                    gate_low, gate_high, gate_max, scales_at + c // 2, inside,
                    ring.left.index(2 * ((step - 1) % STAGES_C) + half), q_gate, at, dtype,
                )  # fmt: skip
                store_quantised(
                    up_low, up_high, up_max, scales_at + blocks + c // 2, inside,
                    ring.left.index(2 * (step % STAGES_C) + half), q_up, at, dtype,
                )  # fmt: skip
                gate_max, up_max = gl.zeros_like(partial), gl.zeros_like(partial)
            step += 1
        _release(ring, step - 2, 0)
        gl.store(partial_ptr + n.to(gl.int64) * columns + column_tile, partial, mask=inside)


@gluon.jit(do_not_specialize=["M", "columns", "blocks", "steps", "K"])
def _hopper_fp8_dh_kernel(
    dout_ptr, q, weight, factor, h_gate, h_up, dh_gate, dh_up, wa, q_gate, q_up, xs_ptr, ws_ptr,
    hs_ptr, weights_ptr, partial_ptr, row_ptr, offsets_ptr, table_ptr,
    M, columns, blocks, steps, R, K,
    KIND: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr, CLAMPED: gl.constexpr, FAST: gl.constexpr,
    LOW_RANK: gl.constexpr, DEPTH_LAST: gl.constexpr, WA: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Grid: the multiprocessors. Each program loops over tiles of BM rows x BN columns of a."""
    dtype: gl.constexpr = h_gate.dtype
    ring = make_ring8(dout_ptr.dtype.element_ty, 129)
    wa_bufs = gl.allocate_shared_memory(dtype, [4, HALF_C, CHUNK_C], RANK2_C)
    low_steps = (R + BK_C - 1) // BK_C
    specialise(
        _consume,
        (dh_gate, dh_up, wa, q_gate, q_up, xs_ptr, ws_ptr, hs_ptr, weights_ptr, partial_ptr,
         row_ptr, offsets_ptr, table_ptr, ring, wa_bufs, M, columns, blocks, steps, low_steps, K,
         (KIND, GATED, ALPHA, LIMIT, CLAMPED), FAST, WA, LOW_RANK, DEPTH_LAST, GROUP),
        _produce,
        (dout_ptr, q, weight, factor, h_gate, h_up, row_ptr, offsets_ptr, table_ptr, ring, M,
         columns, blocks, steps, low_steps, K, LOW_RANK, DEPTH_LAST, GROUP, dtype),
        4, [224, 56],
    )  # fmt: skip


_launch = Launcher(_hopper_fp8_dh_kernel)
