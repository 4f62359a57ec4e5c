"""The deterministic alignment of rows to experts: a counting sort by (expert, row), in Triton.

    count_kernel    ids_N -> below_ST      rows of tile t whose expert is below e, e = 0 .. E
    prefix_kernel   below_ST -> shift_ET   what to add to a row's rank inside its tile; offsets_S
    place_kernel    ids_N, shift_ET -> slot_of_TK, row_of_N
    tiles_kernel    offsets_S -> the tile table of the grouped GEMMs (see :func:`tile_table`)

Rows that fit one tile need place_kernel only, which then also gives the offsets and the table.
Summed over the tiles, below_ST[e] is where expert e starts: no pass over the experts is needed.
Inside a tile the rank comes from sorting keys that carry the row in their low bits, which is
stable. Integer arithmetic only, and no host sync; every size on the host is an upper bound. The
result does not depend on the block sizes: it is the stable sort, bit for bit.
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

# Rows per program: a sorting network's depth grows with the block, the table of counts shrinks.
ROW_BLOCK = 512
EXPERT_BLOCK = 1

_launch_count = Launcher(count_kernel)
_launch_prefix = Launcher(prefix_kernel)
_launch_place = Launcher(place_kernel)
_launch_tiles = Launcher(tiles_kernel)
_launch_grouped = Launcher(grouped_kernel)


class Grouped(NamedTuple):
    """Rows grouped by expert, in token order inside a group.

    Attributes:
        token_N: int32 token of each sorted slot, -1 past the last valid row.
        weight_N: fp32 routing weight of each slot, 0 past the last valid row.
        counts_E: int32 rows per expert.
    """

    token_N: Tensor
    weight_N: Tensor
    counts_E: Tensor


def build_plan(ids_TK: Tensor, num_experts: int) -> Plan:
    """Align rows to experts: the stable sort of rows n = t*K + k by (expert, n).

    Args:
        ids_TK: expert ids of any integer dtype; outside [0, num_experts) means an empty slot.
        num_experts: E.

    Returns:
        Plan, int32, equal bit for bit to ``moe_patch.ops.experts.definition.build_plan``.
    """
    return build_plan_blocked(ids_TK, num_experts, row_block=ROW_BLOCK, expert_block=EXPERT_BLOCK)


def plan_and_tiles(ids_TK: Tensor, num_experts: int, block_m: int) -> tuple[Plan, Tensor]:
    """:func:`build_plan` and its :func:`tile_table`: one launch for at most ROW_BLOCK rows."""
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
    """:func:`build_plan` with its block sizes given; they change the grid, never the result.

    Args:
        ids_TK, num_experts: as there.
        row_block: rows per program, a power of two.
        expert_block: experts per program of the prefix; a last block that is not full is masked.
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
    """The plan; where it is one block also its tile table, for tiles of ``block_m`` rows."""
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
    """The tokens, weights and row counts of a plan, grouped by expert in token order.

    Args:
        plan: what :func:`build_plan` returned.
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
    """The most row tiles any routing of ``rows`` rows to ``num_experts`` experts can need."""
    return min(rows, rows // block_m + num_experts)


def tile_table(plan: Plan, block_m: int) -> Tensor:
    """Row tiles of at most ``block_m`` rows that never cross an expert, in expert order.

    Returns:
        int32 [1 + 2M], M = :func:`tile_bound`: the number of tiles in use, the tiles' experts, the
        tiles' first slots; -1 in tiles not in use.
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
