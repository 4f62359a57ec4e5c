"""Grouped products one at a time, by the kernels: against the torch backend's in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from moe_patch.kernels.experts import groups
from moe_patch.ops.experts import grouped
from moe_patch.ops.experts.definition import build_plan
from moe_patch.types import Lora
from tests.support import interpreted
from tests.support.numerics import FP32, assert_bits, assert_close, bf16_rule

# Experts, outputs, inputs, rank: on both sides of the width at which tiles of factors are used.
SIZES = {"wide": (4, 80, 72, 3), "thin_out": (3, 24, 96, 2), "thin_in": (3, 96, 40, 17)}
LARGE = SIZES | {"many": (64, 512, 256, 16), "rank_128": (8, 256, 384, 128)}


def products(kind: type, plan, t: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return every product of one backend; products of rows only for rows of an expert."""
    made = kind(plan, t["x"])
    lora, valid = Lora(t["a"], t["lb"], 0.5), int(plan.offsets_S[-1])
    u_NR = made.linear(t["x"], t["a"])
    dx_NI, _ = made.linear_transposed(t["dy"], t["w"])
    dx_lora_NI, p_NR = made.linear_transposed(t["dy"], t["w"], lora)
    assert p_NR is not None
    rows = {
        "u": u_NR,
        "y": made.linear(t["x"], t["w"], t["b"]),
        "y_lora": made.linear(t["x"], t["w"], None, (u_NR, lora)),
        "dx": dx_NI, "dx_lora": dx_lora_NI, "p": p_NR,
    }  # fmt: skip
    return {name: row[:valid] for name, row in rows.items()} | {
        "dw": made.outer_sum(t["dy"], t["x"], t["w"]),
        "da": made.outer_sum(p_NR, t["x"], t["a"]),
        "dlb": made.outer_sum(t["dy"], u_NR, t["lb"]),
        "db": made.row_sum(t["dy"], t["b"]),
    }


def check(size: str, dtype: torch.dtype, turned: bool, device: str, T: int = 19, K: int = 2):
    E, O, I, R = LARGE[size]

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    ids_TK = torch.randint(0, E, (T, K), device=device)
    ids_TK[ids_TK == 1] = 0  # one without rows
    ids_TK[0, 0], ids_TK[0, 1:] = -1, E
    plan = build_plan(ids_TK, E)
    t = {
        "x": random(T * K, I), "dy": random(T * K, O), "b": random(E, O),
        "w": (random(E, I, O).mT if turned else random(E, O, I)) * I**-0.5,
        "a": random(E, R, I) * I**-0.5, "lb": random(E, O, R),
    }  # fmt: skip
    found, again = products(groups.Groups, plan, t), products(groups.Groups, plan, t)
    exact = products(grouped.Groups, plan, {name: each.double() for name, each in t.items()})
    eager = products(grouped.Groups, plan, t)
    for name, expected in exact.items():
        ours = found[name]
        assert torch.isfinite(ours).all(), name
        assert_bits(again[name], ours, name)
        if dtype == torch.float32:
            assert_close(ours, expected, FP32, name)
        else:
            bf16_rule(ours, eager[name], expected, name)
        if name in ("dw", "da", "dlb"):
            like = t[{"dw": "w", "da": "a", "dlb": "lb"}[name]]
            assert ours.stride() == like.stride(), name
            assert not ours[1].any(), f"{name}: an expert without rows"


CASES: dict[str, Callable[[str], None]] = {
    f"{size}-{'turned' if turned else 'plain'}": partial(check, size, torch.float32, turned)
    for size, turned in itertools.product(SIZES, (False, True))
}


@pytest.mark.parametrize("case", CASES)
def test_interpreted(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == ""


@pytest.mark.gpu
@pytest.mark.parametrize("turned", [False, True], ids=["plain", "turned"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", LARGE)
def test_gpu(size: str, dtype: torch.dtype, turned: bool, poisoned_memory: None) -> None:
    check(size, dtype, turned, "cuda", T=700, K=4)


if __name__ == "__main__":
    interpreted.report(CASES)
