"""Deterministic sort of rows by expert: a counting sort by (expert, row), in Triton.

    count_kernel    ids_N -> below_ST      rows of tile t whose expert is below e, e = 0 .. E
    prefix_kernel   below_ST -> shift_ET   slot minus rank inside the tile; offsets_S
    place_kernel    ids_N, shift_ET -> slot_of_TK, row_of_N
    tiles_kernel    offsets_S -> the tile table of the grouped GEMMs (see :func:`tile_table`)

If all rows fit into one tile, only place_kernel runs; it then also writes the offsets and the
table. The sum of below_ST[e] over the tiles is the offset of expert e, so no pass over the experts
is needed. Inside a tile, the rank comes from sorting keys with the row in their low bits, which
makes the sort stable.

All arithmetic is on integers, and nothing synchronises with the host: sizes on the host are upper
bounds. The result does not depend on the block sizes; it is the stable sort, bit for bit.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from moe_patch.kernels.common.device import cdiv, next_power_of_2, on_device_of
from moe_patch.kernels.common.launcher import Constants, Launcher
from moe_patch.kernels.plan.kernels import (
    count_kernel,
    grouped_kernel,
    place_kernel,
    prefix_kernel,
    tiles_kernel,
)
from moe_patch.types import Plan

# Rows per program. A larger block makes the sorting network deeper but the table of counts smaller.
ROW_BLOCK = 512
EXPERT_BLOCK = 1

_launch_count = Launcher(count_kernel)
_launch_prefix = Launcher(prefix_kernel)
_launch_place = Launcher(place_kernel)
_launch_tiles = Launcher(tiles_kernel)
_launch_grouped = Launcher(grouped_kernel)


class Grouped(NamedTuple):
    """Rows grouped by expert, in token order within a group.

    Attributes:
        token_N: int32 token of each slot, -1 past the last valid row.
        weight_N: fp32 routing weight of each slot, 0 past the last valid row.
        counts_E: int32 number of rows per expert.
    """

    token_N: Tensor
    weight_N: Tensor
    counts_E: Tensor


def build_plan(ids_TK: Tensor, num_experts: int) -> Plan:
    """Sort rows n = t*K + k by expert: a stable sort by (expert, n).

    Args:
        ids_TK: expert ids of any integer dtype; outside [0, num_experts) means an empty slot.
        num_experts: E.

    Returns:
        Plan, int32, bit for bit equal to that of ``moe_patch.ops.experts.definition.build_plan``.
    """
    return build_plan_blocked(ids_TK, num_experts, row_block=ROW_BLOCK, expert_block=EXPERT_BLOCK)


def plan_and_tiles(ids_TK: Tensor, num_experts: int, block_m: int) -> tuple[Plan, Tensor]:
    """Build the plan and its :func:`tile_table`, in one launch for at most ROW_BLOCK rows."""
    N = ids_TK.numel()
    if not 0 < N <= ROW_BLOCK:
        plan = build_plan(ids_TK, num_experts)
        return plan, tile_table(plan, block_m)
    size = 1 + 2 * tile_bound(N, num_experts, block_m)
    table = torch.empty(size, dtype=torch.int32, device=ids_TK.device)
    return _align(ids_TK, num_experts, ROW_BLOCK, EXPERT_BLOCK, table, block_m), table


def build_plan_blocked(
    ids_TK: Tensor, num_experts: int, *, row_block: int, expert_block: int
) -> Plan:
    """Run :func:`build_plan` with given block sizes, which affect the grid but not the result.

    Args:
        ids_TK, num_experts: as for :func:`build_plan`.
        row_block: rows per program, a power of two.
        expert_block: experts per program of prefix_kernel; the last block may be partial.
    """
    return _align(ids_TK, num_experts, row_block, expert_block)


def _align(
    ids_TK: Tensor,
    num_experts: int,
    row_block: int,
    expert_block: int,
    table: Tensor | None = None,
    block_m: int = 0,
) -> Plan:
    """Build the plan, and if it is a single block, fill ``table`` for tiles of ``block_m`` rows."""
    T, K = ids_TK.shape
    N, E = T * K, num_experts
    ids_N = ids_TK if ids_TK.is_contiguous() else ids_TK.contiguous()
    row_of_N = torch.empty(N, dtype=torch.int32, device=ids_TK.device)
    slot_of_TK = torch.empty(T, K, dtype=torch.int32, device=ids_TK.device)
    if N == 0:
        return Plan(
            row_of_N, slot_of_TK, torch.zeros(E + 1, dtype=torch.int32, device=ids_TK.device)
        )
    offsets_S = torch.empty(E + 1, dtype=torch.int32, device=ids_TK.device)
    tiles, bins = cdiv(N, row_block), next_power_of_2(E + 1)
    single = tiles == 1
    shift_ET = (
        offsets_S if single else torch.empty(E * tiles, dtype=torch.int32, device=ids_TK.device)
    )
    with on_device_of(ids_TK):
        if not single:
            below_ST = torch.empty((E + 1) * tiles, dtype=torch.int32, device=ids_TK.device)
            _launch_count((tiles,), (ids_N, below_ST), (N, tiles), (E,), BLOCK=row_block, BINS=bins)
            _launch_prefix(
                (cdiv(E, expert_block),), (below_ST, shift_ET, offsets_S), (tiles,), (E,),
                EXPERTS=expert_block, CHUNK=512,
            )  # fmt: skip
        _launch_place(
            (tiles,),
            (ids_N, shift_ET, row_of_N, slot_of_TK, offsets_S if table is None else table,
             offsets_S),
            (N, tiles), (E,),
            _place_constants(single, block_m, row_block, bins),
        )  # fmt: skip
    return Plan(row_of_N, slot_of_TK, offsets_S)


@functools.cache
def _place_constants(single: bool, block_m: int, row_block: int, bins: int) -> Constants:
    return Constants(SINGLE=single, BLOCK_M=block_m, BLOCK=row_block, BINS=bins)


def grouped_rows(plan: Plan, weights_TK: Tensor) -> Grouped:
    """Return tokens, weights and row counts of a plan, grouped by expert in token order.

    Args:
        plan: result of :func:`build_plan`.
        weights_TK: routing weights, any floating dtype.
    """
    N, K = plan.row_of_N.shape[0], weights_TK.shape[1]
    token_N = torch.empty_like(plan.row_of_N)
    weight_N = torch.empty(N, dtype=torch.float32, device=token_N.device)
    if N > 0:
        with on_device_of(token_N):
            _launch_grouped(
                (cdiv(N, 1024),),
                (plan.row_of_N, weights_TK.contiguous(), token_N, weight_N),
                (N,),
                (K,),
                BLOCK=1024,
            )
    return Grouped(token_N, weight_N, plan.offsets_S[1:] - plan.offsets_S[:-1])


def tile_bound(rows: int, num_experts: int, block_m: int) -> int:
    """Return the largest number of row tiles that any routing of ``rows`` rows can need."""
    return min(rows, rows // block_m + num_experts)


def tile_table(plan: Plan, block_m: int) -> Tensor:
    """Cut the rows into tiles of at most ``block_m`` rows of one expert, in expert order.

    Returns:
        int32 [1 + 2M], with M = :func:`tile_bound`: the number of used tiles, the expert of each
        tile, and the first slot of each tile. Unused tiles hold -1.
    """
    N, E = plan.row_of_N.shape[0], plan.offsets_S.shape[0] - 1
    M = tile_bound(N, E, block_m)
    table = torch.empty(1 + 2 * M, dtype=torch.int32, device=plan.row_of_N.device)
    with on_device_of(table):
        _launch_tiles(
            (E + 1,),
            (plan.offsets_S, table),
            (M,),
            (E,),
            _table_constants(block_m, E),
        )
    return table


@functools.cache
def _table_constants(block_m: int, experts: int) -> Constants:
    return Constants(BLOCK_M=block_m, EXPERTS_P2=next_power_of_2(experts), CHUNK=256)
