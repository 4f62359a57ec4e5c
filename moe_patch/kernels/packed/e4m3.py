"""Decode FP8 e4m3 from bytes inside a kernel.

The kernels use bytes rather than Triton's e4m3 type, whose conversion happens in another layout. If
the value is an operand of Hopper's matrix instruction, Triton then moves a whole step at once into
the operand's registers. Products in flight may still read some of these (triton 3.6; found by
tools/wgmma_operands.py). The results of inline assembly are in the right registers from the start.
"""

from __future__ import annotations

import triton
import triton.language as tl

# $4 holds two pairs of bytes. Their low bytes go to $0 and $1, their high bytes to $2 and $3.
_ASSEMBLY: tl.constexpr = tl.constexpr(
    """{
.reg .b16 first, second, a, b, c, d;
.reg .b32 pair;
mov.b32 {first, second}, $4;
cvt.rn.f16x2.e4m3x2 pair, first;
mov.b32 {a, b}, pair;
cvt.rn.f16x2.e4m3x2 pair, second;
mov.b32 {c, d}, pair;
cvt.f32.f16 $0, a;
cvt.f32.f16 $1, c;
cvt.f32.f16 $2, b;
cvt.f32.f16 $3, d;
}"""
)


@triton.jit
def e4m3_value(byte):
    """Convert e4m3 bytes to fp32: shift the bits to fp16 and correct the exponent bias."""
    bits = byte.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def e4m3_pair(pair, FAST: tl.constexpr):
    """Decode the low and the high byte of int16 to fp32; FAST needs compute capability 8.9."""
    if FAST:
        return tl.inline_asm_elementwise(
            _ASSEMBLY, "=f,=f,=f,=f,r", [pair], dtype=(tl.float32, tl.float32), is_pure=True, pack=2
        )
    return e4m3_value(pair & 0xFF), e4m3_value((pair >> 8) & 0xFF)
