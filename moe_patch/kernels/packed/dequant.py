"""Dequantise packed experts into a buffer, a few at a time.

Only experts with rows are read and written. Every product and sum is rounded separately, as in
torch and bitsandbytes, so the weights are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_patch.formats import fp8, mxfp4, nf4
from moe_patch.formats.packed import PackedWeight
from moe_patch.kernels.common.device import device_of
from moe_patch.kernels.common.launcher import Launcher
from moe_patch.kernels.packed.e4m3 import e4m3_value

# Blocks per program: of 64 values for NF4, of 32 values for MXFP4.
_BLOCKS = 128
_MX_BLOCKS = 256
_ROWS = 64
_SCALES = 1024
# Triton has no e4m3 below this capability; its bytes are then decoded as integers.
_E4M3 = (8, 9)


def dequantize_into(buffer: Tensor, w: PackedWeight, offsets_S: Tensor, first: int) -> None:
    """Dequantise the experts from ``first`` on into a buffer; experts without rows are skipped.

    Args:
        buffer: [count, rows, columns], contiguous, in the weight's storage order.
        w: the packed weight; its dtype is ignored.
        offsets_S: offsets of the plan, over all experts.
        first: the expert that is written to the first place of the buffer.
    """
    _LAUNCHES[w.storage](buffer, w, offsets_S, first)


def _launch_nf4(buffer: Tensor, w: PackedWeight, offsets_S: Tensor, first: int) -> None:
    count, rows, columns = buffer.shape
    absmax, nested_absmax, code, offset, levels = w.scales
    blocks = rows * columns // nf4.BLOCK
    _nf4(
        (count, triton.cdiv(blocks, _BLOCKS)),
        (w.packed, absmax, nested_absmax, code, offset, levels, buffer, offsets_S),
        (first,), (blocks,),
        NESTED=nf4.NESTED_BLOCK, BLOCKS=_BLOCKS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _launch_mxfp4(buffer: Tensor, w: PackedWeight, offsets_S: Tensor, first: int) -> None:
    count, rows, columns = buffer.shape
    blocks = rows * columns // mxfp4.BLOCK
    _mxfp4(
        (count, triton.cdiv(blocks, _MX_BLOCKS)),
        (w.packed, w.scales[0], buffer, offsets_S),
        (first,), (blocks,), BLOCKS=_MX_BLOCKS, num_warps=4,
    )  # fmt: skip


def _launch_fp8(buffer: Tensor, w: PackedWeight, offsets_S: Tensor, first: int) -> None:
    count, rows, columns = buffer.shape
    scales = w.scales[0]
    in_bytes = device_of(buffer).capability < _E4M3
    values = w.packed.view(torch.uint8) if in_bytes else w.packed
    _fp8(
        (count, triton.cdiv(rows, _ROWS), triton.cdiv(columns, fp8.BLOCK)),
        (values, scales, buffer, offsets_S),
        (first,), (rows, columns, scales.shape[1], scales.shape[2]),
        BLOCK=fp8.BLOCK, ROWS=_ROWS, IN_BYTES=in_bytes, num_warps=8,
    )  # fmt: skip


_LAUNCHES: dict[str, Callable[[Tensor, PackedWeight, Tensor, int], None]] = {
    "nf4": _launch_nf4,
    "fp8": _launch_fp8,
    "mxfp4": _launch_mxfp4,
}


def decoded_scales(w: PackedWeight, offsets_S: Tensor) -> Tensor:
    """Decode the fp32 scales of NF4, [E, rows, columns / 64] in storage order.

    The scales of experts without rows are left uninitialised.

    Args:
        w: the packed weight.
        offsets_S: offsets of the plan.
    """
    E, rows, columns = w.stored_shape
    absmax, nested_absmax, code, offset, _ = w.scales
    scale = nested_absmax.new_empty(E, rows, columns // nf4.BLOCK)
    blocks = rows * columns // nf4.BLOCK
    _scales(
        (E, triton.cdiv(blocks, _SCALES)),
        (absmax, nested_absmax, code, offset, scale, offsets_S),
        (), (blocks,),
        NESTED=nf4.NESTED_BLOCK, SCALES=_SCALES, enable_fp_fusion=False,
    )  # fmt: skip
    return scale


@triton.jit
def _scales_kernel(
    absmax_ptr, nested_ptr, code_ptr, offset_ptr, out_ptr, offsets_ptr, blocks,
    NESTED: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Grid (E, cdiv(blocks, SCALES)): SCALES scales of one expert per program."""
    e = tl.program_id(0)
    if tl.load(offsets_ptr + e) < tl.load(offsets_ptr + e + 1):
        inside = tl.program_id(1) * SCALES + tl.arange(0, SCALES)
        block = e.to(tl.int64) * blocks + inside
        exists = inside < blocks
        scale = _scale(absmax_ptr, nested_ptr, code_ptr, offset_ptr, block, exists, NESTED)
        tl.store(out_ptr + block, scale, mask=exists)


@triton.jit
def _scale(
    absmax_ptr, nested_ptr, code_ptr, offset_ptr, block, exists, NESTED: tl.constexpr
):  # fmt: skip
    index = tl.load(absmax_ptr + block, mask=exists, other=0).to(tl.int32)
    nested = tl.load(nested_ptr + block // NESTED, mask=exists, other=0.0)
    return tl.load(code_ptr + index) * nested + tl.load(offset_ptr)


@triton.jit(do_not_specialize=["first"])
def _nf4_kernel(
    packed_ptr, absmax_ptr, nested_ptr, code_ptr, offset_ptr, levels_ptr, out_ptr, offsets_ptr,
    first, blocks,
    NESTED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid (count, cdiv(blocks, BLOCKS)): BLOCKS runs of 64 values of one expert per program."""
    e = first + tl.program_id(0)
    if tl.load(offsets_ptr + e) < tl.load(offsets_ptr + e + 1):
        inside = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        exists = inside < blocks
        block = e.to(tl.int64) * blocks + inside
        scale = _scale(absmax_ptr, nested_ptr, code_ptr, offset_ptr, block, exists, NESTED)
        byte = tl.load(
            packed_ptr + block[:, None] * 32 + tl.arange(0, 32)[None, :],
            mask=exists[:, None],
            other=0,
        )
        high = tl.load(levels_ptr + (byte >> 4).to(tl.int32)) * scale[:, None]
        low = tl.load(levels_ptr + (byte & 15).to(tl.int32)) * scale[:, None]
        value = tl.reshape(tl.join(high, low), (BLOCKS, 64))
        into = (tl.program_id(0).to(tl.int64) * blocks + inside)[:, None] * 64
        tl.store(
            out_ptr + into + tl.arange(0, 64)[None, :],
            value.to(out_ptr.dtype.element_ty),
            mask=exists[:, None],
        )


@triton.jit
def _e2m1(index):
    """Convert e2m1 to fp32: shift the bits to fp16 and correct the exponent bias."""
    bits = ((index & 8).to(tl.uint16) << 12) | ((index & 7).to(tl.uint16) << 9)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit(do_not_specialize=["first"])
def _mxfp4_kernel(
    packed_ptr, scale_ptr, out_ptr, offsets_ptr, first, blocks, BLOCKS: tl.constexpr
):  # fmt: skip
    """Grid (count, cdiv(blocks, BLOCKS)): BLOCKS runs of 32 values of one expert per program."""
    e = first + tl.program_id(0)
    if tl.load(offsets_ptr + e) < tl.load(offsets_ptr + e + 1):
        inside = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        exists = inside < blocks
        block = e.to(tl.int64) * blocks + inside
        exponent = tl.load(scale_ptr + block, mask=exists, other=0).to(tl.int32)
        # A scale is the exponent of a power of two; 0 means 2^-127, which is subnormal in fp32.
        scale = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
        byte = tl.load(
            packed_ptr + block[:, None] * 16 + tl.arange(0, 16)[None, :],
            mask=exists[:, None],
            other=0,
        )
        low, high = _e2m1(byte & 15) * scale[:, None], _e2m1(byte >> 4) * scale[:, None]
        value = tl.reshape(tl.join(low, high), (BLOCKS, 32))
        into = (tl.program_id(0).to(tl.int64) * blocks + inside)[:, None] * 32
        tl.store(
            out_ptr + into + tl.arange(0, 32)[None, :],
            value.to(out_ptr.dtype.element_ty),
            mask=exists[:, None],
        )


@triton.jit(do_not_specialize=["first"])
def _fp8_kernel(
    values_ptr, scales_ptr, out_ptr, offsets_ptr, first, rows, columns, block_rows, block_columns,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, IN_BYTES: tl.constexpr,
):  # fmt: skip
    """Grid (count, cdiv(rows, ROWS), cdiv(columns, BLOCK)): ROWS x BLOCK values per program."""
    e = first + tl.program_id(0)
    if tl.load(offsets_ptr + e) < tl.load(offsets_ptr + e + 1):
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        exists = (row < rows)[:, None] & (column < columns)[None, :]
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        block_row = e * block_rows + tl.program_id(1) * ROWS // BLOCK
        scale = tl.load(scales_ptr + block_row * block_columns + tl.program_id(2))
        value = tl.load(values_ptr + e.to(tl.int64) * rows * columns + at, mask=exists, other=0.0)
        if IN_BYTES:
            value = e4m3_value(value)
        out = (value.to(tl.float32) * scale).to(out_ptr.dtype.element_ty)
        into = out_ptr + tl.program_id(0).to(tl.int64) * rows * columns
        tl.store(into + at, out, mask=exists)


_nf4, _mxfp4, _fp8 = Launcher(_nf4_kernel), Launcher(_mxfp4_kernel), Launcher(_fp8_kernel)
_scales = Launcher(_scales_kernel)
