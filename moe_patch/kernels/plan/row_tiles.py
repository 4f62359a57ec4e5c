"""Row tiles: the rows in plan order with their tile tables, and grid sizes of grouped launches."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from moe_patch.kernels.common.device import Device, next_power_of_2
from moe_patch.kernels.common.tiles import Tile
from moe_patch.kernels.plan.plan import tile_bound, tile_table
from moe_patch.types import Plan


class RowTiling(NamedTuple):
    """The rows of a call in plan order, cut into tiles of one height.

    Attributes:
        plan: the plan of the rows.
        block_m: number of rows in a tile.
        table: tile table for ``block_m`` (:func:`moe_patch.kernels.plan.plan.tile_table`).
        bound: M, the capacity of the table.
        count: N.
        top_k: K.
    """

    plan: Plan
    block_m: int
    table: Tensor
    bound: int
    count: int
    top_k: int


class RowTiles:
    """The plan of a call and its tile tables, one for each tile height, each built once.

    Args:
        plan: the plan of the rows.
        tables: existing tile tables by height.
    """

    def __init__(self, plan: Plan, tables: dict[int, Tensor] | None = None) -> None:
        self.plan = plan
        self.count = plan.row_of_N.shape[0]
        self.top_k = plan.slot_of_TK.shape[1]
        self.num_experts = plan.offsets_S.shape[0] - 1
        self._rows = {m: self._cut(m, table) for m, table in (tables or {}).items()}

    def rows(self, block_m: int) -> RowTiling:
        """Return the rows cut into tiles of ``block_m`` rows."""
        if block_m not in self._rows:
            self._rows[block_m] = self._cut(block_m, tile_table(self.plan, block_m))
        return self._rows[block_m]

    def _cut(self, block_m: int, table: Tensor) -> RowTiling:
        bound = tile_bound(self.count, self.num_experts, block_m)
        return RowTiling(self.plan, block_m, table, bound, self.count, self.top_k)


def programs(tiles: int, tile: Tile, device: Device) -> int:
    """Return the grid size: all tiles, or at most the multiprocessors for a persistent kernel."""
    return min(tiles, device.multiprocessors) if tile.persistent else tiles


@functools.cache
def depth_block(depth: int) -> int:
    """Return the step along a short summed axis (a rank): a power of two from 16 to 64.

    Tensor cores need at least 16.
    """
    return max(16, min(64, next_power_of_2(max(depth, 1))))
