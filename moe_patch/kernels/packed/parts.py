"""Parts of the experts: a grouped GEMM runs over all experts, or over some that are dequantised.

Packed experts are dequantised some at a time into one buffer, which the next part reuses. The same
kernels run over the rows of each part. A part is half of the experts if that buffer is small, and
a quarter otherwise. Decoding is limited by memory bandwidth. If experts have few rows, Hopper cards
decode inside the GEMM instead (kernels/packed/linear.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moe_patch.formats.packed import PackedWeight, decoded_at_once
from moe_patch.kernels.packed.dequant import dequantize_into
from moe_patch.kernels.plan.row_tiles import RowTiles, RowTiling

# Products with expert weights; the thin products use low-rank factors instead.
PACKED_OPS = ("up", "down", "dh", "dx")


class Part(NamedTuple):
    """A range of experts of a plan.

    Attributes:
        w_EOI: weight of these experts, [count, out, in].
        tiles: rows of these experts.
        first: the first expert.
    """

    w_EOI: Tensor
    tiles: RowTiles
    first: int = 0

    def rows(self, block_m: int) -> RowTiling:
        """Return the rows of this part in tiles; expert ids in the table count from ``first``."""
        return self.tiles.rows(block_m)

    def own(self, per_expert: Tensor | None) -> Tensor | None:
        """Slice a per-expert tensor to the experts of this part."""
        return None if per_expert is None else self._slice(per_expert)

    def low_rank(self, pair: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
        """Return the low-rank rows unchanged, and the factor sliced to the experts of this part."""
        return None if pair is None else (pair[0], self._slice(pair[1]))

    def _slice(self, per_expert: Tensor) -> Tensor:
        count = self.w_EOI.shape[0]
        if count == per_expert.shape[0]:
            return per_expert
        return per_expert[self.first : self.first + count]


class PackedParts:
    """Parts of one call with their tile tables, which all its products share."""

    def __init__(self, tiles: RowTiles, dtype: torch.dtype) -> None:
        self.plan, self.dtype, self.experts = tiles.plan, dtype, tiles.num_experts
        self._tiles: dict[int, dict[int, RowTiles]] = {}

    def size_for(self, rows: int, columns: int) -> int:
        """Return how many experts of rows x columns the buffer holds at a time."""
        return decoded_at_once(self.experts, rows, columns, self.dtype.itemsize)

    def tiles(self, size: int) -> dict[int, RowTiles]:
        """Return the rows of each part of ``size`` experts, by its first expert; built once."""
        if size not in self._tiles:
            offsets_S = self.plan.offsets_S
            self._tiles[size] = {
                first: RowTiles(self.plan._replace(offsets_S=offsets_S[first : first + size + 1]))
                for first in range(0, self.experts, size)
            }
        return self._tiles[size]

    def parts(self, w: PackedWeight) -> Iterator[Part]:
        """Yield the parts; the weight of a part is valid until the next one is requested."""
        _, rows, columns = w.stored_shape
        size = self.size_for(rows, columns)
        buffer = torch.empty(size, rows, columns, dtype=self.dtype, device=w.device)
        for first, tiles in self.tiles(size).items():
            some = buffer[: tiles.num_experts]
            dequantize_into(some, w, self.plan.offsets_S, first)
            yield Part(some.transpose(1, 2) if w.transposed else some, tiles, first)
