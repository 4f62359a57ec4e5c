"""The plan in Triton is the stable sort, bit for bit, whatever the sizes of its blocks.

Runs natively on a GPU (``-m gpu``) and, on a CPU, in one process under Triton's interpreter. The
interpreter has to be chosen before the kernels are imported. Each case reports on its own.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from moe_patch.kernels.plan.plan import (
    build_plan,
    build_plan_blocked,
    grouped_rows,
    plan_and_tiles,
    tile_bound,
    tile_table,
)
from moe_patch.ops.experts.definition import build_plan as reference_plan
from tests.support import interpreted

# T, K, E, rows per program, experts per program, integer dtype; a line's comment says why.
BLOCKS = [
    *((13, 3, 5, 16, block, torch.int64) for block in (1, 2, 3, 4, 8)),  # last block not full
    (7, 2, 5, 16, 1, torch.int32),  # one tile, itself not full
    (40, 3, 5, 16, 3, torch.int16),  # several tiles
    (1, 1, 1, 16, 1, torch.int64),  # one of everything
    (33, 8, 64, 32, 64, torch.int64),  # most experts get few rows
    (9, 1, 300, 16, 7, torch.int64),  # more experts than rows
    (3, 32, 512, 32, 8, torch.int32),  # the most of both
    (11, 4, 5, 16, 3, torch.uint8),  # no -1
    (11, 4, 5, 16, 4, torch.int8),
]
GPU_BLOCKS = [
    (32768, 8, 128, 512, 1, torch.int64),
    (4097, 8, 512, 256, 5, torch.int32),
    (131071, 2, 8, 1024, 3, torch.int64),
    (5, 1, 5, 128, 8, torch.uint8),
]

# Rows of a block under the interpreter; 512 on a GPU.
ROW_BLOCK = 64
# T, K, E, rows of a tile: at most one block of rows, and slightly more than one.
TOGETHER = [
    *((T, 8, E, 16) for E in (5, 128) for T in (0, 1, 7)),
    *((T, 8, 128, 16) for T in (8, 64)),  # a whole block
    (1, 8, 1, 16),
    (7, 8, 64, 64),
    (7, 2, 512, 1),
    *((T, 8, 5, 16) for T in (8, 64)),  # many tiles of one expert
    *((T, 8, 5, 16) for T in (9, 65)),  # more than a block
]


def random_ids(T: int, K: int, E: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Ids with duplicates, and empty slots of both kinds (-1 and >= E)."""
    low = 0 if dtype == torch.uint8 else -1
    return torch.randint(low, E + 2, (T, K), device=device).to(dtype)


def check_blocks(
    T: int, K: int, E: int, rows: int, experts: int, dtype: torch.dtype, device: str
) -> None:
    ids_TK = random_ids(T, K, E, dtype, device)
    expected = reference_plan(ids_TK, E)
    for plan in (
        build_plan(ids_TK, E),
        build_plan_blocked(ids_TK, E, row_block=rows, expert_block=experts),
        build_plan(ids_TK.repeat_interleave(2, 1)[:, ::2], E),
    ):
        for name, ours, ref in zip(plan._fields, plan, expected, strict=True):
            assert ours.dtype == torch.int32, name
            assert torch.equal(ours, ref), (name, T, K, E, rows, experts)


def check_special(device: str) -> None:
    for T, E, fill in [(0, 4, 0), (40, 4, 2), (40, 4, -1), (40, 4, 7)]:
        ids_TK = torch.full((T, 3), fill, device=device)
        for ours, ref in zip(build_plan(ids_TK, E), reference_plan(ids_TK, E), strict=True):
            assert torch.equal(ours, ref), (T, E, fill)
    # Ids whose lower 32 bits would be an expert's are no experts; nor are the ends of int32.
    far = torch.tensor([[2**40 + 1, 3], [-(2**31), 0], [2**31 - 1, 2], [2**32, 2**63 - 1], [1, 7]])
    for ours, ref in zip(
        build_plan(far.to(device), 4), reference_plan(far.to(device), 4), strict=True
    ):
        assert torch.equal(ours, ref)
    assert reference_plan(far, 4).offsets_S.tolist() == [0, 1, 2, 3, 4]


def check_grouped(device: str) -> None:
    T, K, E = 21, 3, 5
    ids_TK = random_ids(T, K, E, torch.int64, device)
    weights_TK = torch.rand(T, K, device=device)
    grouped = grouped_rows(build_plan(ids_TK, E), weights_TK)
    total = 0
    for e in range(E):
        token, slot = torch.where(ids_TK == e)
        mine = slice(total, total + len(token))
        assert grouped.counts_E[e] == len(token)
        assert torch.equal(grouped.token_N[mine], token.int())
        assert torch.equal(grouped.weight_N[mine], weights_TK[token, slot])
        total += len(token)
    assert (grouped.token_N[total:] == -1).all()
    assert (grouped.weight_N[total:] == 0).all()


def check_tiles(device: str) -> None:
    for T, K, E, block in [(40, 3, 5, 16), (3, 1, 5, 16), (40, 3, 1, 16), (50, 2, 7, 1)]:
        ids_TK = random_ids(T, K, E, torch.int64, device)
        ids_TK[ids_TK == 3] = 2
        plan = build_plan(ids_TK, E)
        assert_tiles(tile_table(plan, block), plan.offsets_S, T * K, block)


def assert_tiles(table: torch.Tensor, offsets_S: torch.Tensor, rows: int, block: int) -> None:
    """Expect tiles of ``block`` rows from each expert's first row, in order of experts, then -1."""
    offsets, E = offsets_S.tolist(), len(offsets_S) - 1
    found, M = table.tolist(), tile_bound(rows, E, block)
    expected = [(e, start) for e in range(E) for start in range(offsets[e], offsets[e + 1], block)]
    assert len(found) == 1 + 2 * M
    assert found[0] == len(expected) <= M
    padded = expected + [(-1, -1)] * (M - len(expected))
    assert list(zip(found[1 : 1 + M], found[1 + M :], strict=True)) == padded


def check_together(T: int, K: int, E: int, block: int, device: str) -> None:
    for ids_TK in (
        random_ids(T, K, E, torch.int64, device),
        torch.full((T, K), E - 1, device=device),  # all rows of one expert
        torch.full((T, K), -1, device=device),
    ):
        expected = reference_plan(ids_TK, E)
        plan, table = plan_and_tiles(ids_TK, E, block)
        for name, ours, ref in zip(plan._fields, plan, expected, strict=True):
            assert torch.equal(ours, ref), (name, T, K, E)
        assert_tiles(table, expected.offsets_S, T * K, block)


CASES = {
    **{
        f"blocks-{i}": lambda device, case=case: check_blocks(*case, device)
        for i, case in enumerate(BLOCKS)
    },
    **{
        f"together-{i}": lambda device, case=case: check_together(*case, device)
        for i, case in enumerate(TOGETHER)
    },
    "special": check_special,
    "grouped": check_grouped,
    "tiles": check_tiles,
}


@pytest.mark.parametrize("case", CASES)
def test_interpreted(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == ""


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_gpu(case: str, poisoned_memory: None) -> None:
    CASES[case]("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_BLOCKS)
def test_gpu_sizes(case: tuple, poisoned_memory: None) -> None:
    check_blocks(*case, "cuda")


if __name__ == "__main__":
    interpreted.report(CASES, ROW_BLOCK, checked=True)
