"""Plans of chunks of tokens with full row tiles: rows of later tokens fill a chunk's last tiles.

With a plan for each chunk's tokens alone, each expert has a tile that is half empty on average, in
each chunk. Here one plan sorts all rows, and a chunk computes full tiles of it. These are all that
hold a row of its tokens and were not computed before. Results for later tokens are carried on.

    ends_kernel    row_of_N, offsets_S of all rows -> where each chunk begins and ends, by expert
    cut_kernel     the plan of all rows            -> the plan of one chunk

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
    """

    def __init__(self, whole: Plan, ids_TK: Tensor, cut: Cut, block_m: int) -> None:
        self.whole, self.ids_TK, self.cut, self.block_m = whole, ids_TK.contiguous(), cut, block_m
        self.experts = E = whole.offsets_S.shape[0] - 1
        count, (T, K) = len(cut.chunks), ids_TK.shape
        # Rows of 16 bytes, so that all chunks use one compiled kernel.
        made = torch.empty(3, count, cdiv(E + 1, 4) * 4, dtype=torch.int32, device=ids_TK.device)
        self.ends = Ends(*made[:, :, : E + 1])
        _launch_ends(
            (count,), (whole.row_of_N, whole.offsets_S, made),
            (cut.end, cut.size, cut.late, cut.share * cut.step, cut.step, count, made.stride(1)),
            (K, E),
            BLOCK_M=block_m, BINS=next_power_of_2(E + 1), STEPS=(T * K).bit_length(),
        )  # fmt: skip

    def most_slots(self, number: int) -> int:
        """Return the largest number of slots that the plan of a chunk can need.

        That is its own rows, and as many of later tokens as fill each expert's last tile.
        """
        rows = self.cut.chunks[number].rows
        extra = self.experts * (self.block_m - 1)
        return min(rows.stop - rows.start + extra, self.ids_TK.numel() - rows.start)

    def plan(self, number: int) -> Plan:
        """Return the plan of a chunk.

        Its ``slot_of_TK`` maps a token's row to its slot. A row that an earlier chunk computed has
        the number of slots in place of that, plus e * block_m, plus its place in the tile.
        """
        part, E = self.cut.chunks[number], self.experts
        rows, slots = part.rows.stop - part.rows.start, self.most_slots(number)
        ids, slot_of_TK = self.ids_TK[part.tokens], self.whole.slot_of_TK[part.tokens]
        own = Plan(
            slot_of_TK.new_empty(slots), torch.empty_like(slot_of_TK), self.ends.offsets_CS[number]
        )
        _launch_cut(
            (E + 1 + cdiv(rows, _BLOCK),),
            (ids, slot_of_TK, self.whole.row_of_N, self.whole.offsets_S, own.offsets_S,
             self.ends.begun_CS[number], own.row_of_N, own.slot_of_TK),
            (rows, slots), (E,), BLOCK_M=self.block_m, BLOCK=_BLOCK,
        )  # fmt: skip
        return own


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


@triton.jit(do_not_specialize=["end", "size", "late", "parts", "step", "chunks", "stride"])
def _ends_kernel(
    row_ptr, offsets_ptr, ends_ptr, end, size, late, parts, step, chunks, stride, K, E,
    BLOCK_M: tl.constexpr, BINS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Grid (chunks,): :class:`Ends` of one chunk per program, whose tokens are those of a Cut."""
    first_token = 0
    end_token = 0
    for _ in range(tl.program_id(0) + 1):
        first_token = end_token
        end_token += tl.minimum(size, tl.maximum(late, (end - first_token) // parts * step))
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
    tl.store(at + chunks * stride, begun, mask=e <= E)
    tl.store(at + 2 * chunks * stride, ended, mask=e <= E)


@triton.jit(do_not_specialize=["rows", "slots"])
def _cut_kernel(
    ids_ptr, whole_slot_ptr, whole_row_ptr, whole_offsets_ptr, offsets_ptr, begun_ptr, row_ptr,
    slot_ptr, rows, slots, E, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (E + 1 + cdiv(rows, BLOCK),): an expert's slots, unused ones, or BLOCK rows each."""
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    if pid == E:
        for n0 in range(tl.load(offsets_ptr + E), slots, BLOCK):
            tl.store(row_ptr + n0 + i, -1, mask=n0 + i < slots)
    elif pid < E:
        first, end = tl.load(offsets_ptr + pid), tl.load(offsets_ptr + pid + 1)
        source = whole_row_ptr + tl.load(whole_offsets_ptr + pid) + tl.load(begun_ptr + pid)
        for n0 in range(0, end - first, BLOCK):
            inside = n0 + i < end - first
            row = tl.load(source + n0 + i, mask=inside, other=0)
            tl.store(row_ptr + first + n0 + i, row, mask=inside)
    else:
        n = (pid - E - 1) * BLOCK + i
        slot = tl.load(whole_slot_ptr + n, mask=n < rows, other=-1)
        valid = slot >= 0
        e = tl.load(ids_ptr + n, mask=valid, other=0).to(tl.int32)
        place = slot - tl.load(whole_offsets_ptr + e, mask=valid, other=0)
        begun = tl.load(begun_ptr + e, mask=valid, other=0)
        here = tl.load(offsets_ptr + e, mask=valid, other=0) + place - begun
        carried = slots + e * BLOCK_M + place % BLOCK_M
        found = tl.where(place >= begun, here, carried)
        tl.store(slot_ptr + n, tl.where(valid, found, -1), mask=n < rows)


_launch_ends = Launcher(_ends_kernel)
_launch_cut = Launcher(_cut_kernel)
