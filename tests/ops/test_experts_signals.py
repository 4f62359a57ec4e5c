"""Per-row signals of the experts operator against explicit outer products in fp64."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from moe_patch.ops.experts import definition as reference
from moe_patch.ops.experts.op import Signals
from tests.support.experts_cases import (
    FULL,
    Case,
    E,
    K,
    arguments,
    make_inputs,
    ours,
    run,
)
from tests.support.numerics import FP64, assert_bits, assert_close


@pytest.mark.parametrize(
    "case",
    [
        Case(T=4), Case(T=4, ids="empty slots"), Case(T=4, bias=True, recompute=True),
        Case(T=4, bias=True, lora13=True, lora2=True), Case(T=4, lora2=True, transposed=True),
    ],
    ids=str,
)  # fmt: skip
def test_signals_equal_explicit_outer_products(case) -> None:
    """Signals equal the gradient norms of each row alone, by the reference in fp64."""
    t = make_inputs(case)
    signals = Signals(torch.full((3, case.T, K), float("nan"), dtype=torch.float64))
    out = ours(case, t, signals=signals)
    plain = ours(case, t)
    assert_bits(out, plain)
    dout = torch.randn(out.shape).double()
    out.backward(dout)
    params = [n for n in ("w13", "w2", "b13", "b2") if n in t]
    factors = [n for n in ("a13", "lb13", "a2", "lb2") if n in t]
    expected = torch.zeros(4, case.T, K, dtype=torch.float64)
    for i, k in product(range(case.T), range(K)):
        e = int(t["ids"][i, k])
        if not 0 <= e < E:
            continue
        row = {"x": t["x"][i : i + 1], "ids": t["ids"][i : i + 1, k : k + 1]}
        row["weights"] = torch.ones(1, 1).double()
        y = reference.experts(*arguments(case, t | row))
        dy = t["weights"][i, k].detach() * dout[i : i + 1]
        grads = torch.autograd.grad(y, [t[n] for n in params + factors], dy)
        squares = [g.square().sum() for g in grads]
        split = len(params)
        expected[:, i, k] = torch.stack(
            [y.detach().norm(), dy.norm(), sum(squares[:split]).sqrt(), torch.zeros(()).double()]
        )
        if factors:
            expected[3, i, k] = sum(squares[split:]).sqrt()
    names = ("activation", "output gradient", "parameter gradient", "factor gradient")
    found = torch.cat([signals.act_norm_TK[None], signals.grads_3TK])
    for name, mine, ref in zip(names, found, expected, strict=True):
        assert_close(mine, ref, FP64, name)


def test_signals_change_no_gradient() -> None:
    case = FULL
    t = make_inputs(case)
    signals = Signals(torch.zeros(3, case.T, K, dtype=torch.float64))
    with_signals, without = run(case, t, signals=signals), run(case, t)
    for name in without:
        assert_bits(with_signals[name], without[name], name)
