"""Plans of chunks of tokens with full row tiles: rows of later tokens fill a chunk's last tiles.

With a plan for each chunk's tokens alone, each expert has a tile that is half empty on average, in
each chunk. Here one plan sorts all rows, and a chunk computes full tiles of it. These are all that
hold a row of its tokens and were not computed before. Results for later tokens are carried on.

    ends_kernel    row_of_N, offsets_S of all rows -> where each chunk begins and ends, by expert
    cut_kernel     the plan of all rows            -> the plans of all chunks

A result that is carried has a fixed place: its place in the tile, among the block_m of its expert.
An expert's tile is only computed after all rows of the one before belong to a chunk that began.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_patch.kernels.common.chunks import Cut
from moe_patch.kernels.common.device import cdiv, next_power_of_2
from moe_patch.kernels.common.launcher import Launcher
from moe_patch.types import Plan

_BLOCK = 1024


class Ends(NamedTuple):
    """First and last rows of the chunks, int32, by chunk and expert; last axis contiguous.

    Attributes:
        offsets_CS: slots of an expert in the chunk's plan, as ``Plan.offsets_S``.
        begun_CS: rows of an expert that earlier chunks compute.
        ended_CS: rows of an expert whose tokens come before the chunk's end.
    """

    offsets_CS: Tensor
    begun_CS: Tensor
    ended_CS: Tensor


class FullTiles:
    """The plans of all chunks.

    Args:
        whole: the plan of all rows, a stable sort.
        ids_TK: expert ids.
        cut: the chunks.
        block_m: rows of a tile.

    Attributes:
        ends: first and last rows of the chunks.
        row: ``row_of_N`` of all chunks, with unused slots between them.
        slot_TK: ``slot_of_TK`` of all chunks.
    """

    def __init__(self, whole: Plan, ids_TK: Tensor, cut: Cut, block_m: int) -> None:
        self.cut, self.block_m = cut, block_m
        self.experts = E = whole.offsets_S.shape[0] - 1
        (T, K), count = ids_TK.shape, len(cut.chunks)
        self.rows, self.extra = T * K, E * (block_m - 1)
        # All chunks' tensors begin at 16 bytes, so that they use one compiled kernel.
        made = whole.offsets_S.new_empty(3, count, cdiv(E + 1, 4) * 4)
        self.ends = Ends(*made[:, :, : E + 1])
        _launch_ends(
            (count,), (whole.row_of_N, whole.offsets_S, made),
            (cut.end, cut.size, cut.late, cut.share * cut.step, cut.step, T, count, made.stride(1)),
            (K, E), BLOCK_M=block_m, BINS=next_power_of_2(E + 1), STEPS=(T * K).bit_length(),
        )  # fmt: skip
        self._apart = cdiv(self.extra, 4) * 4
        self.row = whole.row_of_N.new_empty(self.rows + count * self._apart)
        self.slot_TK = torch.empty_like(whole.slot_of_TK)
        most = max(part.rows.stop - part.rows.start for part in cut.chunks)
        _launch_cut(
            (count, E + 1 + cdiv(most, _BLOCK)),
            (ids_TK.contiguous(), whole.slot_of_TK, whole.row_of_N, whole.offsets_S, made,
             self.row, self.slot_TK),
            (self.rows, count, made.stride(1), self.extra, self._apart), (E,),
            BLOCK_M=block_m, BLOCK=_BLOCK,
        )  # fmt: skip

    def most_slots(self, number: int) -> int:
        """Return the largest number of slots that the plan of a chunk can need.

        That is its own rows, and as many of later tokens as fill each expert's last tile.
        """
        first, end = self.cut.chunks[number].rows.start, self.cut.chunks[number].rows.stop
        return min(end - first + self.extra, self.rows - first)

    def plan(self, number: int) -> Plan:
        """Return the plan of a chunk.

        Its ``slot_of_TK`` maps a token's row to its slot. A row that an earlier chunk computed has
        the number of slots in place of that, plus e * block_m, plus its place in the tile.
        """
        part = self.cut.chunks[number]
        first = part.rows.start + number * self._apart
        return Plan(
            self.row[first : first + self.most_slots(number)],
            self.slot_TK[part.tokens],
            self.ends.offsets_CS[number],
        )


@triton.jit
def _rows_below(row_ptr, first, count, bound, STEPS: tl.constexpr):
    """Return how many of ``count`` ascending rows from ``first`` on are below ``bound``."""
    low = tl.zeros_like(count)
    high = count
    for _ in range(STEPS):
        middle = (low + high) // 2
        row = tl.load(row_ptr + first + middle, mask=low < high, other=0)
        below = (row < bound) & (low < high)
        high = tl.where(below | (low >= high), high, middle)
        low = tl.where(below, middle + 1, low)
    return low


@triton.jit(do_not_specialize=["end", "size", "late", "parts", "step", "T", "chunks", "stride"])
def _ends_kernel(
    row_ptr, offsets_ptr, ends_ptr, end, size, late, parts, step, T, chunks, stride, K, E,
    BLOCK_M: tl.constexpr, BINS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Grid (chunks,): :class:`Ends` of one chunk per program, whose tokens are those of a Cut.

    In place of an expert E, ``begun_CS`` and ``ended_CS`` hold the chunk's first row and its end.
    """
    first_token = 0
    end_token = 0
    for _ in range(tl.program_id(0) + 1):
        first_token = end_token
        end_token += tl.minimum(size, tl.maximum(late, (end - first_token) // parts * step))
    end_token = tl.minimum(end_token, T)
    chunk = tl.program_id(0)
    e = tl.arange(0, BINS)
    first = tl.load(offsets_ptr + e, mask=e < E, other=0)
    count = tl.load(offsets_ptr + e + 1, mask=e < E, other=0) - first
    count = tl.where(e < E, count, 0)
    before = _rows_below(row_ptr, first, count, first_token * K, STEPS)
    ended = _rows_below(row_ptr, first, count, end_token * K, STEPS)
    begun = tl.minimum((before + BLOCK_M - 1) // BLOCK_M * BLOCK_M, count)
    computed = tl.minimum((ended + BLOCK_M - 1) // BLOCK_M * BLOCK_M, count)
    own = computed - begun
    at = ends_ptr + chunk * stride + e
    tl.store(at, tl.cumsum(own, axis=0) - own, mask=e <= E)
    tl.store(at + chunks * stride, tl.where(e < E, begun, first_token * K), mask=e <= E)
    tl.store(at + 2 * chunks * stride, tl.where(e < E, ended, end_token * K), mask=e <= E)


@triton.jit(do_not_specialize=["N", "chunks", "stride", "extra", "apart"])
def _cut_kernel(
    ids_ptr, whole_slot_ptr, whole_row_ptr, whole_offsets_ptr, ends_ptr, row_ptr, slot_ptr,
    N, chunks, stride, extra, apart, E,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, E + 1 + blocks): an expert's slots, unused ones, or BLOCK rows of tokens."""
    chunk, part = tl.program_id(0), tl.program_id(1)
    offsets_ptr = ends_ptr + chunk * stride
    begun_ptr = offsets_ptr + chunks * stride
    first_row = tl.load(begun_ptr + E)
    end_row = tl.load(begun_ptr + chunks * stride + E)
    slots = tl.minimum(end_row - first_row + extra, N - first_row)
    row_ptr += first_row + chunk * apart
    i = tl.arange(0, BLOCK)
    if part == E:
        for n0 in range(tl.load(offsets_ptr + E), slots, BLOCK):
            tl.store(row_ptr + n0 + i, -1, mask=n0 + i < slots)
    elif part < E:
        first, end = tl.load(offsets_ptr + part), tl.load(offsets_ptr + part + 1)
        source = whole_row_ptr + tl.load(whole_offsets_ptr + part) + tl.load(begun_ptr + part)
        for n0 in range(0, end - first, BLOCK):
            inside = n0 + i < end - first
            row = tl.load(source + n0 + i, mask=inside, other=0)
            tl.store(row_ptr + first + n0 + i, row, mask=inside)
    else:
        n = first_row + (part - E - 1) * BLOCK + i
        slot = tl.load(whole_slot_ptr + n, mask=n < end_row, other=-1)
        valid = slot >= 0
        e = tl.load(ids_ptr + n, mask=valid, other=0).to(tl.int32)
        place = slot - tl.load(whole_offsets_ptr + e, mask=valid, other=0)
        begun = tl.load(begun_ptr + e, mask=valid, other=0)
        here = tl.load(offsets_ptr + e, mask=valid, other=0) + place - begun
        carried = slots + e * BLOCK_M + place % BLOCK_M
        found = tl.where(place >= begun, here, carried)
        tl.store(slot_ptr + n, tl.where(valid, found, -1), mask=n < end_row)


_launch_ends = Launcher(_ends_kernel)
_launch_cut = Launcher(_cut_kernel)
