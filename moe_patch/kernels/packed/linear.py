"""Grouped product of rows with packed weights, which the kernel decodes in front of each product.

The product is transposed, outᵀ = W inᵀ. The weight is decoded in registers, from which the matrix
instruction reads it, and is used for a tile of 256 rows at once. This moves fewer bytes than
decoding into a buffer (:mod:`moe_patch.kernels.packed.parts`), but decodes again for each row tile.
So it is faster if experts have few rows.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_patch.formats import fp8
from moe_patch.formats.packed import PackedWeight
from moe_patch.kernels.common.device import INTERPRETER, Device, device_of
from moe_patch.kernels.common.gemm_device import locate_tile
from moe_patch.kernels.common.launcher import Box, Constants, Launcher
from moe_patch.kernels.common.tiles import Tile
from moe_patch.kernels.common.versions import gates
from moe_patch.kernels.packed.dequant import decoded_scales
from moe_patch.kernels.packed.e4m3 import e4m3_pair
from moe_patch.kernels.packed.nf4_levels import nf4_levels
from moe_patch.kernels.plan.row_tiles import RowTiling, depth_block

# Mean rows per expert up to which this kernel beats the buffer, by storage. Measured on an H100
# with two models: NF4 was faster on both at 256 and on one at 384, FP8 on both at 512
# (docs/quantisation-measurements.md).
_MOST_ROWS = {"nf4": 320, "fp8": 512}
_FEW_ROWS = 32
_TILE = Tile(256, 128, 64, 8, 4)
_FEW_TILE = Tile(64, 128, 64, 8, 4)


def decoding_tile(w: PackedWeight, dtype: torch.dtype, device: Device, rows: int) -> Tile | None:
    """Return the tile of :func:`packed_linear`, or None if decoding into a buffer is better.

    Args:
        w: the packed weight; mxfp4 is always decoded into a buffer.
        dtype: dtype of the rows.
        device: the device. Only Hopper's matrix instructions take an operand from registers. Triton
            must also be tested not to overwrite registers that are still read
            (tools/wgmma_operands.py).
        rows: number of rows of all experts.
    """
    mean = rows / w.shape[0]
    aligned = all(size % 64 == 0 for size in w.shape[1:]) and w.packed.data_ptr() % 16 == 0
    if device.capability != (9, 0) or dtype.itemsize != 2 or not aligned or not gates().in_front:
        return None
    if w.storage not in _MOST_ROWS or mean > _MOST_ROWS[w.storage]:
        return None
    return _FEW_TILE if mean <= _FEW_ROWS else _TILE


def packed_linear(
    inputs: Tensor,
    rows: RowTiling,
    w: PackedWeight,
    b_EO: Tensor | None,
    tile: Tile,
    *,
    low_rank: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute out_n = W_e in_n (+ b_e) (+ L_e u_n), [N, out] in plan order.

    Args:
        inputs: [N, in] in plan order, contiguous; a row is a multiple of 16 bytes.
        rows: the plan and its tile table for ``tile.m``.
        w, b_EO: weight, packed along either axis, and optional bias.
        tile: m rows, n columns of out and depth k; n and k are multiples of 64.
        low_rank: (u_NR, L_EOR): adds L_e u_n.
        dtype: dtype of the result; by default that of ``inputs``.
    """
    E, O, I = w.shape
    out_NO = inputs.new_empty(rows.count, O, dtype=dtype)
    u_NR, l_EOR = low_rank if low_rank is not None else (inputs, inputs[None])
    R = u_NR.shape[1] if low_rank is not None else 0
    bias = b_EO if b_EO is not None else inputs
    columns = triton.cdiv(O, tile.n)
    nf4_stored = w.storage == "nf4"
    scales = decoded_scales(w, rows.plan.offsets_S) if nf4_stored else w.scales[0]
    device = device_of(inputs)
    boxes = (
        Box(inputs, inputs.shape, inputs.stride(), (height, tile.k))
        for height in (tile.m, tile.m // 2)
    )
    _launch(
        (min(rows.bound * columns, device.multiprocessors),),
        (*boxes, _weight_box(w, tile), scales, w.scales[-1], bias, u_NR, l_EOR, out_NO,
         rows.plan.offsets_S, rows.table),
        (rows.bound,),
        (columns, O, I, R, *scales.stride()[:2], bias.stride(0), bias.stride(1), *l_EOR.stride()),
        _constants(tile, nf4_stored, w.transposed, device != INTERPRETER, b_EO is not None, R),
    )  # fmt: skip
    return out_NO


@functools.cache
def _constants(
    tile: Tile, nf4_stored: bool, transposed: bool, fast: bool, biased: bool, rank: int
) -> Constants:
    return Constants(
        NF4=nf4_stored, ALONG_DEPTH=not transposed, FAST=fast, BIASED=biased, LOW_RANK=rank > 0,
        BLOCK=fp8.BLOCK, BM=tile.m, BN=tile.n, BK=tile.k, BR=depth_block(rank), GROUP=tile.group,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip


def _weight_box(w: PackedWeight, tile: Tile) -> Box:
    """Return a Box of pairs of values: one byte for NF4, two bytes for FP8."""
    pairs = w.packed if w.storage == "nf4" else w.packed.view(torch.int16)
    block = (1, tile.k, tile.n // 2) if w.transposed else (1, tile.n, tile.k // 2)
    return Box(pairs, pairs.shape, pairs.stride(), block)


@triton.jit(do_not_specialize=["M"])
def _packed_rows_kernel(
    in_whole, in_half, w, scale_ptr, levels_ptr, b_ptr, u_ptr, l_ptr, out_ptr, offsets_ptr,
    table_ptr, M, columns, O, I, R, stride_se, stride_sr, stride_be, stride_bo, stride_le,
    stride_lo, stride_li,
    NF4: tl.constexpr, ALONG_DEPTH: tl.constexpr, FAST: tl.constexpr, BIASED: tl.constexpr,
    LOW_RANK: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BR: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid: persistent. One tile: BM rows by BN columns of out; BM / 2 rows if that is enough."""
    row_tiles = tl.load(table_ptr)
    for tile in range(tl.program_id(0), row_tiles * columns, tl.num_programs(0)):
        row_tile, column_tile = locate_tile(tile, row_tiles, columns, GROUP)
        e = tl.load(table_ptr + 1 + row_tile)
        start = tl.load(table_ptr + 1 + M + row_tile)
        end = tl.load(offsets_ptr + e + 1)
        if end - start <= BM // 2:
            _tile(
                in_half, w, scale_ptr, levels_ptr, b_ptr, u_ptr, l_ptr, out_ptr, e, column_tile,
                start, end, O, I, R, stride_se, stride_sr, stride_be, stride_bo, stride_le,
                stride_lo, stride_li, NF4, ALONG_DEPTH, FAST, BIASED, LOW_RANK, BLOCK, BM // 2, BN,
                BK, BR,
            )  # fmt: skip
        else:
            _tile(
                in_whole, w, scale_ptr, levels_ptr, b_ptr, u_ptr, l_ptr, out_ptr, e, column_tile,
                start, end, O, I, R, stride_se, stride_sr, stride_be, stride_bo, stride_le,
                stride_lo, stride_li, NF4, ALONG_DEPTH, FAST, BIASED, LOW_RANK, BLOCK, BM, BN, BK,
                BR,
            )  # fmt: skip


@triton.jit
def _tile(
    inputs, w, scale_ptr, levels_ptr, b_ptr, u_ptr, l_ptr, out_ptr, e, column_tile, start, end,
    O, I, R, stride_se, stride_sr, stride_be, stride_bo, stride_le, stride_lo, stride_li,
    NF4: tl.constexpr, ALONG_DEPTH: tl.constexpr, FAST: tl.constexpr, BIASED: tl.constexpr,
    LOW_RANK: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    n = start + tl.arange(0, BM)
    column = column_tile * BN + tl.arange(0, BN)
    exists = column < O
    scales = scale_ptr + e.to(tl.int64) * stride_se
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    for k0 in range(0, I, BK):
        x = inputs.load([start, k0])
        weight = _weight(
            w, scales, levels_ptr, e, column_tile, k0, O, I, stride_sr, NF4, ALONG_DEPTH, FAST,
            BLOCK, BN, BK,
        )  # fmt: skip
        acc = tl.dot(weight.to(x.dtype), x.T, acc, input_precision="ieee")
    n64 = n.to(tl.int64)
    if LOW_RANK:
        low = l_ptr + e.to(tl.int64) * stride_le
        for r0 in range(0, R, BR):
            r = r0 + tl.arange(0, BR)
            factor = tl.load(
                low + column[:, None] * stride_lo + r[None, :] * stride_li,
                mask=exists[:, None] & (r < R)[None, :],
                other=0.0,
            )
            u = tl.load(
                u_ptr + n64[:, None] * R + r[None, :],
                mask=(n < end)[:, None] & (r < R)[None, :],
                other=0.0,
            )
            acc = tl.dot(factor, u.T, acc, input_precision="ieee")
    if BIASED:
        here = b_ptr + e.to(tl.int64) * stride_be + column * stride_bo
        acc += tl.load(here, mask=exists, other=0.0).to(tl.float32)[:, None]
    out = acc.to(out_ptr.dtype.element_ty).T
    tl.store(
        out_ptr + n64[:, None] * O + column[None, :], out, mask=(n < end)[:, None] & exists[None, :]
    )


@triton.jit
def _weight(
    w, scales, levels_ptr, e, column_tile, k0, O, I, stride_sr, NF4: tl.constexpr,
    ALONG_DEPTH: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Decode a tile [BN, BK] of one expert's weight to fp32, from pairs along the stored columns.

    NF4 has one scale per 64 columns, FP8 one per BLOCK x BLOCK.
    """
    ROWS: tl.constexpr = BN if ALONG_DEPTH else BK
    COLUMNS: tl.constexpr = BK if ALONG_DEPTH else BN
    row_end, column_end = (O, I) if ALONG_DEPTH else (I, O)
    first_row = column_tile * BN if ALONG_DEPTH else k0
    first_column = k0 if ALONG_DEPTH else column_tile * BN
    pair = tl.reshape(w.load([e, first_row, first_column // 2]), (ROWS, COLUMNS // 2))
    row = first_row + tl.arange(0, ROWS)
    run = first_column // 64 + tl.arange(0, COLUMNS // 64)
    exists = (row < row_end)[:, None] & (run < column_end // 64)[None, :]
    if NF4:
        at = row[:, None] * stride_sr + run[None, :]
        left, right = nf4_levels(pair, levels_ptr, FAST)
    else:
        at = (row // BLOCK)[:, None] * stride_sr + (run * 64 // BLOCK)[None, :]
        left, right = e4m3_pair(pair, FAST)
    scale = tl.load(scales + at, mask=exists, other=0.0)
    scale = tl.broadcast_to(scale[:, :, None], (ROWS, COLUMNS // 64, 32))
    scale = tl.reshape(scale, (ROWS, COLUMNS // 2))
    weight = tl.reshape(tl.join(left * scale, right * scale), (ROWS, COLUMNS))
    return weight if ALONG_DEPTH else weight.T


_launch = Launcher(_packed_rows_kernel)
