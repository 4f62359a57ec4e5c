"""The experts in separate steps, for activations without a fused kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_patch.ops.experts import definition as reference
from moe_patch.ops.experts.composed import experts_composed
from moe_patch.ops.experts.grouped import Groups
from tests.support.experts_cases import (
    FULL,
    Case,
    D,
    E,
    K,
    arguments,
    drawn,
    gradients,
    make_inputs,
)
from tests.support.numerics import FP64, assert_close


@pytest.mark.parametrize(
    "case", [replace(drawn(seed), recompute=False) for seed in range(20)], ids=str
)
def test_composed_steps_equal_the_reference(case) -> None:
    t = make_inputs(case)
    x, ids, weights, w, glu, lora13, lora2 = arguments(case, t)
    out = experts_composed(
        x, ids, weights, w, lambda h: reference.gated_activation(h, glu), lora13=lora13, lora2=lora2
    )
    ref = reference.experts(x, ids, weights, w, glu, lora13, lora2)
    assert_close(out, ref, FP64, "out")
    mine, theirs = gradients(out, t), gradients(ref, t)
    for name in theirs:
        assert_close(mine[name], theirs[name], FP64, name)


def test_composed_post_norm() -> None:
    """Normalise once per (token, expert) row, between down projection and weighted sum."""
    case = Case(T=7)
    t = make_inputs(case)
    x, ids, weights, w, glu, _, _ = arguments(case, t)
    norm = torch.nn.RMSNorm(D, dtype=torch.float64)
    out = experts_composed(x, ids, weights, w, lambda h: reference.gated_activation(h, glu), norm)
    expected = torch.zeros(7, D, dtype=torch.float64)
    for k in range(K):
        one = torch.ones(7, 1, dtype=torch.float64)
        y = reference.experts(x, ids[:, k : k + 1], one, w, glu)
        expected = expected + weights[:, k : k + 1] * norm(y)
    assert_close(out, expected, FP64, "out")
    mine, theirs = gradients(out, t), gradients(expected, t)
    for name in theirs:
        assert_close(mine[name], theirs[name], FP64, name)


@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize("full", [False, True], ids=["plain", "bias and LoRA"])
def test_opcheck_of_every_step(full, columns_first) -> None:
    case = replace(FULL if full else Case(), T=7)
    x, ids, weights, w, _, lora13, _ = arguments(case, make_inputs(case, torch.float32))
    if columns_first:  # their gradients are contiguous all the same
        x, weights = (one.detach().T.contiguous().T.requires_grad_() for one in (x, weights))
    plan = reference.build_plan(ids, E)
    steps = torch.ops.moe_patch_steps
    rows = steps.rows(x, *plan).detach().requires_grad_()
    torch.library.opcheck(steps.rows.default, (x, *plan))
    torch.library.opcheck(steps.combine.default, (rows, weights, *plan))
    args = (rows, w.w13_EHD, w.b13_EH, *(lora13 or (None, None, 1.0)), "torch", *plan)
    torch.library.opcheck(steps.linear.default, args)


def test_rows_without_an_expert_reach_no_parameter_of_the_gate(monkeypatch) -> None:
    """Ignore rows of empty slots: NaN here, because grouped_mm leaves them unwritten on CUDA."""
    product = Groups._product

    def unwritten(groups: Groups, x_NI: torch.Tensor, w_EOI: torch.Tensor) -> torch.Tensor:
        y_NO = product(groups, x_NI, w_EOI)
        y_NO[groups.offsets_S[-1] :] = float("nan")
        return y_NO

    case = Case(ids="empty slots")
    x, ids, weights, w, glu, _, _ = arguments(case, make_inputs(case))
    grads = []
    for _ in range(2):
        slope = torch.ones(1, dtype=x.dtype, requires_grad=True)
        out = experts_composed(
            x, ids, weights, w, lambda h, s=slope: reference.gated_activation(h * s, glu)
        )
        grads += torch.autograd.grad(out.square().sum(), slope)
        monkeypatch.setattr(Groups, "_product", unwritten)
    assert torch.equal(*grads)


def test_steps_from_poisoned_memory(poisoned_memory) -> None:
    case = Case(ids="empty slots")
    t = make_inputs(case)
    x, ids, weights, w, glu, _, _ = arguments(case, t)
    out = experts_composed(x, ids, weights, w, lambda h: reference.gated_activation(h, glu))
    ref = reference.experts(x, ids, weights, w, glu)
    assert_close(out, ref, FP64)
    mine, theirs = gradients(out, t), gradients(ref, t)
    for name in theirs:
        assert_close(mine[name], theirs[name], FP64, name)
