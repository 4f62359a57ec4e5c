"""Sums of weight gradients in fp32, to which each chunk of a long context adds (hopper/dw.py).

Each launch adds once to an element, so the order of the sums is that of the chunks.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_patch.kernels.common.launcher import Box
from moe_patch.kernels.hopper.common import (
    BM,
    BM_C,
    BN_C,
    CHUNK,
    CHUNK_C,
    HALF_C,
    OUTS_C,
    PART,
    quarter,
    store_box,
    whole_box,
)

# A row of a box has 128 bytes, as in 16 bits, and so half as many columns.
_WIDE = CHUNK // 2
_RANK2, _RANK3 = (gl.NVMMASharedLayout(128, 32, rank=rank) for rank in (2, 3))
_WIDE_C, _RANK2_C, _RANK3_C = map(gl.constexpr, (_WIDE, _RANK2, _RANK3))
_HALF_PART = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _WIDE, 16]))


def sums_box(sums_EOI: Tensor) -> Box:
    """Return the Box that :func:`add_sums` writes."""
    return whole_box(sums_EOI, (1, BM // 2, _WIDE), _RANK3)


@gluon.jit
def sums_buffers():
    """Allocate the output buffers of :func:`add_sums`."""
    return gl.allocate_shared_memory(gl.float32, [2 * OUTS_C, HALF_C, _WIDE_C], _RANK2_C)


@gluon.jit
def add_sums(acc, sums, buffers, half, e, row_tile, column_tile, ADD: gl.constexpr):
    """Consumer: write the accumulator by TMA, or add it to what is there.

    TMA adds in memory, so the consumer need not wait for the sums of earlier chunks.
    """
    row = row_tile * BM_C + half * HALF_C
    for q in gl.static_range(BN_C // CHUNK_C):
        value = quarter(acc, q, PART)
        low, high = gl.split(value.reshape((HALF_C, 2, _WIDE_C)).permute((0, 2, 1)))
        for h in gl.static_range(2):
            store_box(
                gl.convert_layout(low if h == 0 else high, _HALF_PART),
                buffers.index(half * OUTS_C + h % OUTS_C), sums,
                [e, row, column_tile * BN_C + q * CHUNK_C + h * _WIDE_C],
                [1, HALF_C, _WIDE_C], _RANK3_C, OUTS_C - 1, ADD=ADD,
            )  # fmt: skip


@gluon.jit
def write_sums(
    acc, sums_e, row, column, rows, columns, stride_row, stride_column, ADD: gl.constexpr
):
    """Write the accumulator in fp32, a quarter of the columns at a time."""
    row += gl.arange(0, HALF_C, layout=gl.SliceLayout(1, PART))
    for q in gl.static_range(BN_C // CHUNK_C):
        i = column + q * CHUNK_C + gl.arange(0, CHUNK_C, layout=gl.SliceLayout(0, PART))
        at = sums_e + row.to(gl.int64)[:, None] * stride_row + i[None, :] * stride_column
        inside = (row < rows)[:, None] & (i < columns)[None, :]
        value = quarter(acc, q, PART)
        if ADD:
            value += gl.load(at, mask=inside, other=0.0)
        gl.store(at, value, mask=inside)
