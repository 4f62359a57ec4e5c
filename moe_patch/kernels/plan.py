"""The deterministic alignment of rows to experts: a counting sort by (expert, row), in Triton.

    _count_kernel    ids_N -> below_ST     rows of tile t whose expert is below e, e = 0 .. E
    _prefix_kernel   below_ST -> shift_ET  what to add to a row's rank inside its tile; offsets_S
    _place_kernel    ids_N, shift_ET -> slot_of_TK, row_of_N
    _tiles_kernel    offsets_S -> the tile table of the grouped GEMMs (see :func:`tile_table`)

Summed over the tiles, below_ST[e] is where expert e starts: no pass over the experts is needed.
Inside a tile the rank comes from sorting keys that carry the row in their low bits, which is
stable. Integer arithmetic only, and no host sync; every size on the host is an upper bound. The
result does not depend on the block sizes: it is the stable sort, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_patch.kernels.device import on_device_of
from moe_patch.kernels.launcher import Launcher
from moe_patch.kernels.sizes import cdiv, next_power_of_2
from moe_patch.types import Plan

# Rows per program: a sorting network's depth grows with the block, the table of counts shrinks.
ROW_BLOCK = 512
EXPERT_BLOCK = 1


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
        Plan, int32, equal bit for bit to ``moe_patch.definition.build_plan``.
    """
    return build_plan_blocked(ids_TK, num_experts, row_block=ROW_BLOCK, expert_block=EXPERT_BLOCK)


def build_plan_blocked(
    ids_TK: Tensor, num_experts: int, *, row_block: int, expert_block: int
) -> Plan:
    """:func:`build_plan` with its block sizes given; they change the grid, never the result.

    Args:
        ids_TK, num_experts: as there.
        row_block: rows per program, a power of two.
        expert_block: experts per program of the prefix; a last block that is not full is masked.
    """
    T, K = ids_TK.shape
    N, E = T * K, num_experts
    ids_N = ids_TK.reshape(-1).contiguous()
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
            (tiles,), (ids_N, shift_ET, row_of_N, slot_of_TK, offsets_S), (N, tiles), (E,),
            SINGLE=single, BLOCK=row_block, BINS=bins,
        )  # fmt: skip
    return Plan(row_of_N, slot_of_TK, offsets_S)


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
            BLOCK_M=block_m,
            EXPERTS_P2=next_power_of_2(E),
            CHUNK=256,
        )
    return table


@triton.jit
def _expert_of_rows(ids_ptr, n, N, E):
    """The expert of each row, E for an empty slot or a row past the last."""
    expert = tl.load(ids_ptr + n, mask=n < N, other=0)
    return tl.where((n < N) & (expert >= 0) & (expert < E), expert, E).to(tl.int32)


@triton.jit
def _below(expert, BINS: tl.constexpr):
    """How many of the experts are below 0, 1, .., BINS - 1."""
    count = tl.histogram(expert, BINS)
    return tl.cumsum(count, axis=0) - count


@triton.jit(do_not_specialize=["N", "tiles"])
def _count_kernel(ids_ptr, below_ptr, N, tiles, E, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """Grid (tiles,): counts the tile's BLOCK rows."""
    tile = tl.program_id(0)
    expert = _expert_of_rows(ids_ptr, tile * BLOCK + tl.arange(0, BLOCK), N, E)
    e = tl.arange(0, BINS)
    tl.store(below_ptr + e * tiles + tile, _below(expert, BINS), mask=e <= E)


@triton.jit(do_not_specialize=["tiles"])
def _prefix_kernel(
    below_ptr, shift_ptr, offsets_ptr, tiles, E, EXPERTS: tl.constexpr, CHUNK: tl.constexpr
):
    """Grid (cdiv(E, EXPERTS),): each expert's offset, and its counts' prefix over the tiles."""
    lane = tl.arange(0, CHUNK)
    for i in range(0, EXPERTS):
        e = tl.program_id(0) * EXPERTS + i
        if e < E:
            offset = tl.zeros((), dtype=tl.int32)
            end = tl.zeros((), dtype=tl.int32)
            for t0 in range(0, tiles, CHUNK):
                here = below_ptr + e * tiles + t0 + lane
                inside = t0 + lane < tiles
                offset += tl.sum(tl.load(here, mask=inside, other=0), axis=0)
                end += tl.sum(tl.load(here + tiles, mask=inside, other=0), axis=0)
            tl.store(offsets_ptr + e, offset)
            if e == E - 1:
                tl.store(offsets_ptr + E, end)
            for t0 in range(0, tiles, CHUNK):
                here = below_ptr + e * tiles + t0 + lane
                inside = t0 + lane < tiles
                below = tl.load(here, mask=inside, other=0)
                count = tl.load(here + tiles, mask=inside, other=0) - below
                shift = offset + tl.cumsum(count, axis=0) - count - below
                tl.store(shift_ptr + e * tiles + t0 + lane, shift, mask=inside)
                offset += tl.sum(count, axis=0)


@triton.jit(do_not_specialize=["N", "tiles"])
def _place_kernel(
    ids_ptr, shift_ptr, row_ptr, slot_ptr, offsets_ptr, N, tiles, E,
    SINGLE: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles,): sort the tile's rows by (expert, row); slot = rank + the expert's shift.

    With SINGLE there is one tile: the rank is the slot, and the tile gives the offsets.
    """
    tile = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    n = tile * BLOCK + i
    expert = _expert_of_rows(ids_ptr, n, N, E)
    ranked = tl.sort(expert * BLOCK + i)
    expert_of_rank = ranked // BLOCK
    row = tile * BLOCK + ranked % BLOCK
    valid = expert_of_rank < E
    slot = i
    if SINGLE:
        e = tl.arange(0, BINS)
        below = _below(expert, BINS)
        tl.store(offsets_ptr + e, below, mask=e <= E)
        total = tl.sum(tl.where(e == E, below, 0), axis=0)
    else:
        slot += tl.load(shift_ptr + expert_of_rank * tiles + tile, mask=valid, other=0)
        total = tl.load(offsets_ptr + E)
    tl.store(slot_ptr + row, tl.where(valid, slot, -1), mask=row < N)
    tl.store(row_ptr + slot, row, mask=valid)
    tl.store(row_ptr + n, -1, mask=(n < N) & (n >= total))


@triton.jit(do_not_specialize=["M"])
def _tiles_kernel(
    offsets_ptr,
    table_ptr,
    M,
    E,
    BLOCK_M: tl.constexpr,
    EXPERTS_P2: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (E + 1,): program e writes expert e's tiles; the last one the count and the unused."""
    e = tl.program_id(0)
    lane = tl.arange(0, EXPERTS_P2)
    start = tl.load(offsets_ptr + lane, mask=lane < E, other=0)
    end = tl.load(offsets_ptr + lane + 1, mask=lane < E, other=0)
    tiles = (end - start + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(lane < e, tiles, 0), axis=0)
    i = tl.arange(0, CHUNK)
    if e == E:
        tl.store(table_ptr, first)
        for m0 in range(first, M, CHUNK):
            tl.store(table_ptr + 1 + m0 + i, -1, mask=m0 + i < M)
            tl.store(table_ptr + 1 + M + m0 + i, -1, mask=m0 + i < M)
    else:
        mine = tl.sum(tl.where(lane == e, tiles, 0), axis=0)
        slot = tl.load(offsets_ptr + e)
        for m0 in range(0, mine, CHUNK):
            m = m0 + i
            tl.store(table_ptr + 1 + first + m, e + tl.zeros_like(m), mask=m < mine)
            tl.store(table_ptr + 1 + M + first + m, slot + m * BLOCK_M, mask=m < mine)


@triton.jit(do_not_specialize=["N"])
def _grouped_kernel(row_ptr, weights_ptr, token_ptr, weight_ptr, N, K, BLOCK: tl.constexpr):
    """Grid (cdiv(N, BLOCK),): token and weight of each sorted slot."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_ptr + n, mask=n < N, other=-1)
    weight = tl.load(weights_ptr + row, mask=row >= 0, other=0.0).to(tl.float32)
    tl.store(token_ptr + n, tl.where(row >= 0, row // K, -1), mask=n < N)
    tl.store(weight_ptr + n, weight, mask=n < N)


_launch_count = Launcher(_count_kernel)
_launch_prefix = Launcher(_prefix_kernel)
_launch_place = Launcher(_place_kernel)
_launch_tiles = Launcher(_tiles_kernel)
_launch_grouped = Launcher(_grouped_kernel)
