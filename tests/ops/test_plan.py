"""The plan is a stable sort of rows by expert, bit for bit, whatever the ids hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_patch.ops.experts.definition import build_plan


def check_plan(ids_TK: Tensor, E: int) -> None:
    """Compare with Python's own stable sort, and check the inverse and the offsets."""
    plan = build_plan(ids_TK, E)
    T, K = ids_TK.shape
    flat = ids_TK.reshape(-1).tolist()
    valid = [n for n, e in enumerate(flat) if 0 <= e < E]
    order = sorted(valid, key=lambda n: flat[n])
    assert all(t.dtype == torch.int32 for t in plan)
    assert plan.row_of_N.tolist() == order + [-1] * (T * K - len(order))
    slots = [-1] * (T * K)
    for slot, n in enumerate(order):
        slots[n] = slot
    assert plan.slot_of_TK.shape == (T, K)
    assert plan.slot_of_TK.reshape(-1).tolist() == slots
    counts = [sum(flat[n] == e for n in valid) for e in range(E)]
    assert plan.offsets_S.tolist() == [sum(counts[:e]) for e in range(E + 1)]


CASES = {
    "random": lambda g: torch.randint(0, 8, (64, 2), generator=g),
    "odd sizes": lambda g: torch.randint(0, 8, (37, 3), generator=g),
    "empty slots below": lambda g: torch.randint(-1, 8, (37, 3), generator=g),
    "empty slots above": lambda g: torch.randint(0, 12, (37, 3), generator=g),
    "empty slots everywhere": lambda g: torch.randint(-4, 13, (37, 3), generator=g),
    "far outside": lambda g: torch.tensor([[-(2**31), 3], [2**31 - 1, 0], [2**40, 7]]),
    "all empty": lambda g: torch.full((5, 2), -1),
    "one takes all": lambda g: torch.full((33, 4), 5),
    "last takes all": lambda g: torch.full((33, 4), 7),
    "most experts empty": lambda g: torch.randint(0, 2, (33, 2), generator=g) * 7,
    "one row": lambda g: torch.tensor([[6]]),
    "same expert twice": lambda g: torch.tensor([[3, 3], [3, 3], [1, 3]]),
    "descending": lambda g: torch.arange(7, -1, -1).view(8, 1),
}


@pytest.mark.parametrize("E", [8, 5, 1, 130])
@pytest.mark.parametrize("name", CASES)
def test_plan_is_a_stable_sort(name, E) -> None:
    check_plan(CASES[name](torch.Generator().manual_seed(0)), E)


@pytest.mark.parametrize("K", [1, 3])
def test_plan_without_tokens(K) -> None:
    check_plan(torch.empty(0, K, dtype=torch.long), 5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_id_dtypes(dtype) -> None:
    check_plan(torch.randint(-1, 9, (40, 4), dtype=dtype), 8)


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_strided_ids(layout) -> None:
    base = torch.randint(0, 8, (12, 6))
    views = {"transposed": base.T, "strided": base[::2, 1:4], "expanded": base[:1].expand(9, -1)}
    check_plan(views[layout], 8)


def test_plan_from_poisoned_memory(poisoned_memory) -> None:
    check_plan(torch.randint(-1, 9, (40, 4), generator=torch.Generator().manual_seed(1)), 8)


def test_ids_are_not_written() -> None:
    ids = torch.randint(-3, 12, (40, 4))
    before = ids.clone()
    build_plan(ids, 8)
    assert torch.equal(ids, before)
