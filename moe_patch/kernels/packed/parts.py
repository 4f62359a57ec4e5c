"""The experts that one launch of a grouped GEMM covers: all of them, or some that are dequantised.

Packed experts are dequantised some at a time into one buffer, which the next ones reuse, and the
same kernels run over the rows of each part: halves of the experts where that is a small buffer,
else quarters. The decoding runs at the speed of the memory. Where an expert has few rows, Hopper
cards decode inside the GEMM instead: kernels/packed/linear.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moe_patch.formats.packed import PackedWeight
from moe_patch.kernels.common.device import cdiv
from moe_patch.kernels.packed.dequant import dequantize_into
from moe_patch.kernels.plan.row_tiles import Rows, RowTiles

# The products with the experts' weights; the thin ones have factors instead.
PACKED_OPS = ("up", "down", "dh", "dx")
# Fewer parts have fewer launches and partly filled waves: half where that is at most so many bytes.
_FEWEST, _MOST = 2, 4
_SMALL_BUFFER = 512 << 20
# Offsets of a part start at a multiple of 16 bytes: one compiled kernel serves every part.
_ALIGNED = 4


class Part(NamedTuple):
    """Some experts of a plan.

    Attributes:
        w_EOI: their weight, [count, out, in].
        tiles: their rows.
        first: the first of them.
    """

    w_EOI: Tensor
    tiles: RowTiles
    first: int = 0

    def rows(self, block_m: int) -> Rows:
        """Their rows in tiles; expert ids in the table count from ``first``."""
        return self.tiles.rows(block_m)

    def own(self, per_expert: Tensor | None) -> Tensor | None:
        """Their slice of a tensor over all experts."""
        return None if per_expert is None else self._slice(per_expert)

    def low_rank(self, pair: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
        """Rank-sized rows, which are all experts' own, and their slice of the factor."""
        return None if pair is None else (pair[0], self._slice(pair[1]))

    def _slice(self, per_expert: Tensor) -> Tensor:
        count = self.w_EOI.shape[0]
        if count == per_expert.shape[0]:
            return per_expert
        return per_expert[self.first : self.first + count]


class PackedParts:
    """The parts of one call and their tile tables, which its products share."""

    def __init__(self, tiles: RowTiles, dtype: torch.dtype) -> None:
        self.plan, self.dtype, self.experts = tiles.plan, dtype, tiles.num_experts
        self._tiles: dict[int, dict[int, RowTiles]] = {}

    def size_for(self, rows: int, columns: int) -> int:
        """How many experts of rows x columns go into the buffer at a time."""
        halves = self._divided(_FEWEST)
        small = halves * rows * columns * self.dtype.itemsize <= _SMALL_BUFFER
        return halves if small else self._divided(_MOST)

    def _divided(self, parts: int) -> int:
        return min(self.experts, cdiv(self.experts, parts * _ALIGNED) * _ALIGNED)

    def tiles(self, size: int) -> dict[int, RowTiles]:
        """The rows of each part of ``size`` experts, by its first expert; made once."""
        if size not in self._tiles:
            offsets_S = self.plan.offsets_S
            self._tiles[size] = {
                first: RowTiles(self.plan._replace(offsets_S=offsets_S[first : first + size + 1]))
                for first in range(0, self.experts, size)
            }
        return self._tiles[size]

    def parts(self, w: PackedWeight) -> Iterator[Part]:
        """Each part's weight is valid until the next part is asked for."""
        _, rows, columns = w.stored_shape
        size = self.size_for(rows, columns)
        buffer = torch.empty(size, rows, columns, dtype=self.dtype, device=w.device)
        for first, tiles in self.tiles(size).items():
            some = buffer[: tiles.num_experts]
            dequantize_into(some, w, self.plan.offsets_S, first)
            yield Part(some.transpose(1, 2) if w.transposed else some, tiles, first)
