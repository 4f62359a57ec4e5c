"""Kernels of the plan; plan.py describes how they fit together."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _expert_of_rows(ids_ptr, n, N, E):
    """Return the expert of each row; E for an empty slot or a row past the last."""
    expert = tl.load(ids_ptr + n, mask=n < N, other=0)
    return tl.where((n < N) & (expert >= 0) & (expert < E), expert, E).to(tl.int32)


@triton.jit(do_not_specialize=["N", "tiles"])
def count_kernel(ids_ptr, below_ptr, N, tiles, E, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """Grid (tiles,): count the experts of one tile of BLOCK rows per program."""
    tile = tl.program_id(0)
    expert = _expert_of_rows(ids_ptr, tile * BLOCK + tl.arange(0, BLOCK), N, E)
    e = tl.arange(0, BINS)
    count = tl.histogram(expert, BINS)
    tl.store(below_ptr + e * tiles + tile, tl.cumsum(count, axis=0) - count, mask=e <= E)


@triton.jit(do_not_specialize=["tiles"])
def prefix_kernel(
    below_ptr, shift_ptr, offsets_ptr, tiles, E, EXPERTS: tl.constexpr, CHUNK: tl.constexpr
):
    """Grid (cdiv(E, EXPERTS),): offset of each expert, and prefix sums of its counts over tiles."""
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


@triton.jit
def _store_tiles(table_ptr, count, below, e, N, E, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """Write the tile table for experts ``e`` with ``count`` rows each, N <= BLOCK rows in all."""
    tiles = tl.where(e < E, (count + BLOCK_M - 1) // BLOCK_M, 0)
    first = tl.cumsum(tiles, axis=0) - tiles
    used = tl.sum(tiles, axis=0)
    M = tl.minimum(N, N // BLOCK_M + E)
    tl.store(table_ptr, used)
    for i in range(0, tl.max(tiles, axis=0)):
        at = table_ptr + 1 + first + i
        tl.store(at, e, mask=i < tiles)
        tl.store(at + M, below + i * BLOCK_M, mask=i < tiles)
    m = tl.arange(0, BLOCK)
    unused = (m >= used) & (m < M)
    tl.store(table_ptr + 1 + m, -1, mask=unused)
    tl.store(table_ptr + 1 + M + m, -1, mask=unused)


@triton.jit(do_not_specialize=["N", "tiles"])
def place_kernel(
    ids_ptr, shift_ptr, row_ptr, slot_ptr, table_ptr, offsets_ptr, N, tiles, E,
    SINGLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles,): sort the tile's rows by (expert, row); slot = rank + the expert's shift.

    With SINGLE there is one tile, and the rank is the slot. The program then also writes the
    offsets and, if BLOCK_M is not 0, the tile table.
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
        count = tl.histogram(expert, BINS)
        below = tl.cumsum(count, axis=0) - count
        tl.store(offsets_ptr + e, below, mask=e <= E)
        total = tl.sum(tl.where(e == E, below, 0), axis=0)
        if BLOCK_M > 0:
            _store_tiles(table_ptr, count, below, e, N, E, BLOCK_M, BLOCK)
    else:
        slot += tl.load(shift_ptr + expert_of_rank * tiles + tile, mask=valid, other=0)
        total = tl.load(offsets_ptr + E)
    tl.store(slot_ptr + row, tl.where(valid, slot, -1), mask=row < N)
    tl.store(row_ptr + slot, row, mask=valid)
    tl.store(row_ptr + n, -1, mask=(n < N) & (n >= total))


@triton.jit(do_not_specialize=["M"])
def tiles_kernel(
    offsets_ptr,
    table_ptr,
    M,
    E,
    BLOCK_M: tl.constexpr,
    EXPERTS_P2: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (E + 1,): program e writes expert e's tiles; the last, the count and unused tiles."""
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
def grouped_kernel(row_ptr, weights_ptr, token_ptr, weight_ptr, N, K, BLOCK: tl.constexpr):
    """Grid (cdiv(N, BLOCK),): token and weight of each slot."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_ptr + n, mask=n < N, other=-1)
    weight = tl.load(weights_ptr + row, mask=row >= 0, other=0.0).to(tl.float32)
    tl.store(token_ptr + n, tl.where(row >= 0, row // K, -1), mask=n < N)
    tl.store(weight_ptr + n, weight, mask=n < N)
