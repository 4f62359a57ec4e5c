"""The 16 levels of NF4 in a kernel: from memory, or on a GPU by permuting bytes in registers."""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from moe_patch.quant import nf4


def _words(byte: int) -> list[str]:
    """One byte of each level's fp32 pattern, four levels to a 32-bit word."""
    patterns = [struct.pack("<f", level)[byte] for level in nf4.LEVELS]
    return [
        f"0x{int.from_bytes(bytes(patterns[i : i + 4]), 'little'):08x}" for i in range(0, 16, 4)
    ]


def _assembly() -> str:
    """PTX for four bytes in $8: levels of the high halves to $0..$3, of the low ones to $4..$7.

    A byte permutation picks by three bits from eight bytes, so each byte of four levels takes two
    of them and a choice by the fourth bit; a transposition of four words then makes the levels.
    """
    lines = [".reg .u32 h, s, m, lo, hi, p0, p1, p2, p3, t0, t1, t2, t3;"]
    for pair in (0, 1):
        lines += [
            f"shr.u32 h, $8, {16 * pair};",
            "and.b32 s, h, 0x7777;",
            # 0xff in byte i where index i has its fourth bit: 0x80 has a sign to replicate.
            "prmt.b32 m, 0x80808080, 0x80808080, h;",
            "and.b32 m, m, 0x01010101;",
            "mul.lo.u32 m, m, 255;",
        ]
        for byte in range(4):
            a, b, c, d = _words(byte)
            lines += [
                f"prmt.b32 lo, {a}, {b}, s;",
                f"prmt.b32 hi, {c}, {d}, s;",
                f"lop3.b32 p{byte}, lo, hi, m, 0xd8;",
            ]
        lines += [
            "prmt.b32 t0, p0, p1, 0x5140;",
            "prmt.b32 t1, p2, p3, 0x5140;",
            "prmt.b32 t2, p0, p1, 0x7362;",
            "prmt.b32 t3, p2, p3, 0x7362;",
            f"prmt.b32 ${4 + 2 * pair}, t0, t1, 0x5410;",
            f"prmt.b32 ${2 * pair}, t0, t1, 0x7632;",
            f"prmt.b32 ${5 + 2 * pair}, t2, t3, 0x5410;",
            f"prmt.b32 ${1 + 2 * pair}, t2, t3, 0x7632;",
        ]
    return "{\n" + "\n".join(lines) + "\n}"


_ASSEMBLY: tl.constexpr = tl.constexpr(_assembly())


@triton.jit
def nf4_levels(byte, levels_ptr, FAST: tl.constexpr):
    """fp32 levels of the high and of the low half of each byte."""
    if FAST:
        return tl.inline_asm_elementwise(
            _ASSEMBLY,
            "=f,=f,=f,=f,=f,=f,=f,=f,r",
            [byte],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
    return (
        tl.load(levels_ptr + (byte >> 4).to(tl.int32)),
        tl.load(levels_ptr + (byte & 15).to(tl.int32)),
    )
