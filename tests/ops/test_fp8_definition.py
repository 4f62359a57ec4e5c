"""The definition of FP8 experts (ops/experts/fp8_definition.py), against exact arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_patch.formats import fp8
from moe_patch.formats.packed import PackedWeight, pack
from moe_patch.ops.experts import definition
from moe_patch.ops.experts.fp8_definition import (
    Fp8Experts,
    Fp8Gradients,
    dequantise_rows,
    quantise_rows,
)
from moe_patch.types import ExpertWeights, Glu, Lora
from tests.support.numerics import FP64, assert_close, rel_err

T, K, E, D, F, R = 96, 2, 5, 256, 128, 8
GLU = Glu("silu")
# The relative error that quantising rows may cause in an output or a gradient (issue 28).
QUANTISED = 0.05


class Case:
    """Tensors of a call in fp64, and the exact weights that the packed ones represent."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.w13, self.w2 = (packed(E, out, width) for out, width in ((2 * F, D), (D, F)))
        self.exact = ExpertWeights(exact(self.w13), exact(self.w2))
        self.x_TD, self.dout_TD = (torch.randn(T, D).bfloat16().double() for _ in range(2))
        # Expert 2 has no rows, and some slots are empty.
        ids_TK = torch.rand(T, E).argsort(-1)[:, :K]
        self.ids_TK = ids_TK.where(ids_TK != 2, -1)
        self.weights_TK = torch.rand(T, K, dtype=torch.float64)
        self.factors = [
            torch.randn(E, *shape, dtype=torch.float64) * scale
            for shape, scale in (
                ((R, D), D**-0.5), ((2 * F, R), 0.1), ((R, F), F**-0.5), ((D, R), 0.1),
            )
        ]  # fmt: skip

    def loras(self, factors: list[Tensor]) -> tuple[Lora, Lora]:
        return Lora(factors[0], factors[1], 0.5), Lora(factors[2], factors[3], 2.0)


def packed(*shape: int) -> PackedWeight:
    return pack(torch.randn(shape) * shape[2] ** -0.5, "fp8", torch.device("cpu"), "w")


def exact(w: PackedWeight) -> Tensor:
    return w.packed.double() * fp8.spread(w.scales[0].double(), *w.packed.shape[1:])


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


def test_rows_are_quantised_once_per_group_of_128_columns() -> None:
    rows = torch.randn(7, 384) * torch.logspace(-30, 30, 7)[:, None]
    rows[3, 128:256] = 0
    values, scales = quantise_rows(rows)
    found = dequantise_rows(values, scales, torch.float64)
    groups, quantised = rows.double().view(7, 3, 128), found.view(7, 3, 128)
    largest = groups.abs().amax(-1, keepdim=True)
    # Half a unit in the last of three bits; below 2^-6 the unit is that of the smallest exponent.
    allowed = (groups.abs() / 16).maximum(largest / 448 * 2.0**-10) * (1 + 1e-6)
    assert ((quantised - groups).abs() <= allowed).all()
    assert (quantised.abs().amax(-1, keepdim=True) / largest.clamp(min=1e-300) - 1).abs()[
        largest > 0
    ].max() < 1e-6
    assert not values[3, 128:256].float().any()


def test_nan_stays_alone_and_infinity_spoils_only_its_group() -> None:
    rows = torch.randn(3, 256)
    rows[0, 5], rows[1, 200] = torch.nan, -torch.inf
    found = dequantise_rows(*quantise_rows(rows), torch.float32)
    assert found[0].isnan().nonzero().tolist() == [[5]]
    assert found[1, 128:].isnan().all()
    clean = torch.ones_like(rows, dtype=torch.bool)
    clean[0, 5], clean[1, 128:] = False, False
    assert rel_err(found[clean], rows[clean]) < QUANTISED


def test_representable_rows_lose_nothing(case: Case) -> None:
    """Rows of e4m3 values with 448 in every group give the exact product: layout of all scales."""
    x_TD = (torch.randn(T, D) * 50).to(fp8.DTYPE).double()
    x_TD[:, ::128] = 448
    x_TD /= 64
    plan = definition.build_plan(case.ids_TK, E)
    h_NH = Fp8Experts(plan, case.w13, case.w2, GLU).forward(x_TD, case.weights_TK).h_NH
    for e, (start, end) in enumerate(zip(plan.offsets_S, plan.offsets_S[1:], strict=False)):
        token_n = plan.row_of_N[start:end] // K
        # Scales are rounded to fp32.
        assert_close(h_NH[start:end], x_TD[token_n] @ case.exact.w13_EHD[e].T, 1e-7, f"expert {e}")


def test_output_and_gradients_are_within_five_percent_of_exact_arithmetic(case: Case) -> None:
    plan = definition.build_plan(case.ids_TK, E)
    experts = Fp8Experts(plan, case.w13, case.w2, GLU, *case.loras(case.factors))
    rows = experts.forward(case.x_TD, case.weights_TK)
    found = experts.backward(case.dout_TD, case.x_TD, case.weights_TK, rows)
    leaves = [t.clone().requires_grad_() for t in (case.x_TD, case.weights_TK, *case.factors)]
    out = definition.experts(
        leaves[0], case.ids_TK, leaves[1], case.exact, GLU, *case.loras(leaves[2:])
    )
    wanted = out.detach(), *torch.autograd.grad(out, leaves, case.dout_TD)
    names = "out", *Fp8Gradients._fields
    for name, mine, exactly in zip(names, (rows.out_TD, *found), wanted, strict=True):
        error = rel_err(mine, exactly)
        assert 0.005 < error < QUANTISED, f"{name}: {error}"


def test_formulas_are_exact_where_nothing_is_quantised(case: Case, monkeypatch: Any) -> None:
    """With quantisation turned off, the definition is that of ops/experts/definition.py."""
    module = "moe_patch.ops.experts.fp8_definition"
    monkeypatch.setattr(f"{module}.quantise_rows", lambda rows: (rows, rows))
    monkeypatch.setattr(f"{module}.dequantise_rows", lambda values, scales, dtype: values)
    plan = definition.build_plan(case.ids_TK, E)
    experts = Fp8Experts(plan, case.w13, case.w2, GLU, *case.loras(case.factors))
    rows = experts.forward(case.x_TD, case.weights_TK)
    found = experts.backward(case.dout_TD, case.x_TD, case.weights_TK, rows)
    leaves = [t.clone().requires_grad_() for t in (case.x_TD, case.weights_TK, *case.factors)]
    out = definition.experts(
        leaves[0], case.ids_TK, leaves[1], case.exact, GLU, *case.loras(leaves[2:])
    )
    wanted = torch.autograd.grad(out, leaves, case.dout_TD)
    assert_close(rows.out_TD, out.detach(), FP64, "out")
    for name, mine, exactly in zip(Fp8Gradients._fields, found, wanted, strict=True):
        assert_close(mine, exactly, FP64, name)
