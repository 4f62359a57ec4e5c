"""Look up the 16 levels of NF4 in a kernel: in memory, or on CUDA in the lanes of a warp."""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from moe_patch.formats import nf4


def _lane_level() -> list[str]:
    """Return PTX that selects this lane's level by four bits of its index; loop-invariant."""
    lines = [".reg .u32 lane, bit;", ".reg .pred p<4>;", "mov.u32 lane, %laneid;"]
    for bit in range(4):
        lines += [f"and.b32 bit, lane, {1 << bit};", f"setp.ne.u32 p{bit}, bit, 0;"]
    held = [f"0x{int.from_bytes(struct.pack('<f', x), 'little'):08x}" for x in nf4.LEVELS]
    for bit in range(4):
        pairs = list(zip(held[::2], held[1::2], strict=True))
        lines.append(f".reg .b32 l{bit}_<{len(pairs)}>;")
        held = [f"l{bit}_{i}" for i in range(len(pairs))]
        lines += [
            f"selp.b32 {name}, {odd}, {even}, p{bit};"
            for name, (even, odd) in zip(held, pairs, strict=True)
        ]
    return lines


def _assembly() -> str:
    """Return PTX for four bytes in $8: levels of high nibbles to $0..$3, of low nibbles to $4..$7.

    The shuffle uses only the lower four bits of an index, within groups of 16 lanes (0x101f). The
    other bits of the shifted word do not matter.
    """
    lines = [*_lane_level(), ".reg .u32 index;"]
    for byte in range(4):
        for target, bit in ((byte, 8 * byte + 4), (4 + byte, 8 * byte)):
            lines += [
                f"shr.u32 index, $8, {bit};",
                f"shfl.sync.idx.b32 ${target}, l3_0, index, 0x101f, 0xffffffff;",
            ]
    return "{\n" + "\n".join(lines) + "\n}"


_ASSEMBLY: tl.constexpr = tl.constexpr(_assembly())


@triton.jit
def nf4_levels(byte, levels_ptr, FAST: tl.constexpr):
    """Return the fp32 levels of the high and the low nibble of each byte.

    FAST needs CUDA, and all lanes of a warp active.
    """
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
