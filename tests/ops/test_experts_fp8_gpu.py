"""FP8 products on a Hopper card: the kernels against their definition, and what is around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from moe_patch.formats.packed import pack
from moe_patch.kernels.experts.experts import experts_backward, experts_forward
from moe_patch.kernels.packed.rows import quantise_rows
from moe_patch.kernels.plan.plan import build_plan
from moe_patch.ops.experts import fp8_definition
from moe_patch.ops.experts.op import experts_mlp
from moe_patch.runtime.fp8 import Copies, in_fp8
from moe_patch.types import ExpertsNeeds, ExpertWeights, Glu, Lora, Plan
from tests.support.guards import Guards
from tests.support.numerics import assert_bits, rel_err

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
GLU = Glu("silu")
# Three blocks of 128 in F and an expert without rows: tails of every kernel.
T, K, E, D, F, R = 1500, 2, 8, 512, 384, 16
NAMES = "out", *fp8_definition.Fp8Gradients._fields


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FP8 products need compute capability 9.0")


class Case:
    """Tensors of one call; all but the packed weights in bf16."""

    def __init__(self, tokens: int = T, rank: int = R, dtype: torch.dtype = BF16) -> None:
        random = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, device="cuda", generator=random) * scale).to(dtype)

        def packed(*shape: int) -> Any:
            return pack(normal(*shape, scale=shape[2] ** -0.5), "fp8", torch.device("cuda"), "w")

        self.w = ExpertWeights(packed(E, 2 * F, D), packed(E, D, F))
        self.x_TD, self.dout_TD = normal(tokens, D), normal(tokens, D)
        ids_TK = torch.rand(tokens, E, device="cuda", generator=random).argsort(-1)[:, :K]
        self.ids_TK = ids_TK.where(ids_TK != 2, -1)
        self.weights_TK = torch.rand(tokens, K, device="cuda", generator=random)
        shapes = (R, D), (2 * F, R), (R, F), (D, R)
        self.factors = [normal(E, *s, scale=0.3 * s[1] ** -0.5) for s in shapes] if rank else []

    def loras(self, factors: list[Tensor]) -> tuple[Any, Any]:
        if not factors:
            return None, None
        return Lora(factors[0], factors[1], 0.5), Lora(factors[2], factors[3], 2.0)

    def run(self, compute: str, **options: Any) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (self.x_TD, self.weights_TK, *self.factors)]
        lora13, lora2 = self.loras(leaves[2:])
        out = experts_mlp(
            leaves[0], self.ids_TK, leaves[1],
            in_fp8(self.w, compute, Copies(), self.x_TD, GLU), GLU,
            lora13=lora13, lora2=lora2, **options,
        )  # fmt: skip
        return [out.detach(), *torch.autograd.grad(out, leaves, self.dout_TD)]

    def called(self, put: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Call the kernels without autograd, on operands that ``put`` places."""
        packed = in_fp8(self.w, "fp8_copy", Copies(), self.x_TD, GLU)[:2]
        w = ExpertWeights(
            *(replace(p, packed=put(p.packed), scales=tuple(map(put, p.scales))) for p in packed)  # type: ignore[arg-type, type-var, union-attr]
        )
        x_TD, ids_TK, weights_TK, dout_TD = map(
            put, (self.x_TD, self.ids_TK, self.weights_TK, self.dout_TD)
        )
        loras = self.loras([put(factor) for factor in self.factors])
        forward = experts_forward(
            x_TD, ids_TK, weights_TK, w, GLU, *loras, save_h=True, save_u13=True, save_u2=True
        )
        names = fp8_definition.Fp8Gradients._fields
        backward = experts_backward(
            dout_TD, x_TD, weights_TK, w, GLU, *loras, forward.plan, forward.kept,
            ExpertsNeeds(**dict.fromkeys(names, True)), overwrite_h=False,
        )  # fmt: skip
        return [forward.out_TD, *(getattr(backward, name) for name in names)]

    def defined(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the definition's output and gradients with transposed copies, in a dtype."""
        plan = Plan(*build_plan(self.ids_TK, E))
        x_TD, dout_TD, *factors = (t.to(dtype) for t in (self.x_TD, self.dout_TD, *self.factors))
        weights_TK = self.weights_TK.to(torch.promote_types(dtype, torch.float32))
        lora13, lora2 = self.loras(factors)
        experts = fp8_definition.Fp8Experts(plan, self.w.w13_EHD, self.w.w2_EDF, GLU, lora13, lora2)  # type: ignore[arg-type]
        rows = experts.forward(x_TD, weights_TK)
        found = experts.backward(dout_TD, x_TD, weights_TK, rows)
        return [rows.out_TD, *(each for each in found if each is not None)]


@functools.cache
def exact_and_rounded() -> tuple[Case, list[Tensor], list[Tensor]]:
    case = Case()
    return case, case.defined(torch.float64), case.defined(BF16)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("width", [128, 512, 1408])
def test_rows_are_quantised_as_defined(width: int, dtype: torch.dtype) -> None:
    rows = torch.randn(333, width, device="cuda").to(dtype)
    rows[3], rows[5, 7], rows[6, 8] = 0, torch.nan, torch.inf
    found, wanted = quantise_rows(rows), fp8_definition.quantise_rows(rows)
    for name, mine, theirs in zip(("values", "scales"), found, wanted, strict=True):
        assert_bits(mine, theirs, name)


def test_kernels_are_as_close_to_the_definition_as_its_own_rounding() -> None:
    case, exact, rounded = exact_and_rounded()
    for name, mine, wanted, own in zip(NAMES, case.run("fp8_copy"), exact, rounded, strict=True):
        distance, limit = rel_err(mine, wanted), 1.05 * rel_err(own, wanted)
        print(f"{name}: {distance:.3e}, definition {limit / 1.05:.3e}")
        assert distance <= limit, f"{name}: {distance:.3e}, limit {limit:.3e}"


@pytest.mark.parametrize("compute", ["fp8", "fp8_copy"])
def test_results_are_within_five_percent_of_decoded_weights(compute: str) -> None:
    case = Case()
    for name, mine, decoded in zip(NAMES, case.run(compute), case.run("decoded"), strict=True):
        print(f"{compute} {name}: {rel_err(mine, decoded):.4f}")
        assert 0.005 < rel_err(mine, decoded) < 0.05, name


@pytest.mark.parametrize("compute", ["fp8", "fp8_copy"])
def test_without_adapters_and_with_recomputation(compute: str) -> None:
    case = Case(rank=0)
    kept = case.run(compute)
    for name, mine, decoded in zip(NAMES, kept, case.run("decoded"), strict=False):
        assert 0.005 < rel_err(mine, decoded) < 0.05, name
    for first, second in zip(kept, case.run(compute, recompute=True), strict=True):
        assert_bits(first, second)
    with torch.no_grad():
        w = in_fp8(case.w, compute, None, case.x_TD, GLU)
        out = experts_mlp(case.x_TD, case.ids_TK, case.weights_TK, w, GLU)
    assert_bits(out, kept[0])


def test_repeats_are_equal_and_rows_do_not_depend_on_other_tokens() -> None:
    case = Case()
    first = case.run("fp8_copy", batch_invariant=True)
    for again in (case.run("fp8_copy", batch_invariant=True) for _ in range(3)):
        for one, other in zip(first, again, strict=True):
            assert_bits(one, other)
    few = 9
    case.x_TD, case.dout_TD = case.x_TD[:few], case.dout_TD[:few]
    case.ids_TK, case.weights_TK = case.ids_TK[:few], case.weights_TK[:few]
    assert_bits(case.run("fp8_copy", batch_invariant=True)[0], first[0][:few])


def test_one_token_is_multiplied_in_fp8_too() -> None:
    case = Case(tokens=1)
    assert 0.005 < rel_err(case.run("fp8")[0], case.run("decoded")[0]) < 0.05


def test_operands_and_allocations_lie_between_guard_bands() -> None:
    """Stray reads give NaN, stray writes change a band, and what is not written stays NaN."""
    case = Case(tokens=333)
    wanted = case.called(lambda tensor: tensor)
    with Guards() as guards:
        found = case.called(guards.put)
    assert guards.check() > 16
    for name, mine, other in zip(NAMES, found, wanted, strict=True):
        assert other.isfinite().all(), name
        assert_bits(mine, other, name)


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_few_tokens_with_batch_invariance_and_without_rows(tokens: int) -> None:
    """Products of every size are in FP8 then: no token, one, and only empty slots."""
    case = Case(tokens=max(tokens, 1))
    case.x_TD, case.dout_TD = case.x_TD[:tokens], case.dout_TD[:tokens]
    case.ids_TK, case.weights_TK = case.ids_TK[:tokens], case.weights_TK[:tokens]
    found = case.run("fp8_copy", batch_invariant=True)
    for name, mine, wanted in zip(NAMES, found, case.defined(torch.float64), strict=True):
        assert mine.shape == wanted.shape
        if wanted.any():
            assert rel_err(mine, wanted) < 0.05, name
        else:
            assert not mine.any(), name
    case.ids_TK = torch.full_like(case.ids_TK, -1)
    assert not any(each.any() for each in case.run("fp8_copy", batch_invariant=True))


def test_other_dtypes_and_a_nan_row() -> None:
    case = Case(dtype=torch.float16)
    for mine, decoded in zip(case.run("fp8_copy"), case.run("decoded"), strict=True):
        assert 0.005 < rel_err(mine, decoded) < 0.05
    case.x_TD[7] = torch.nan
    out = case.run("fp8")[0]
    chosen = (case.ids_TK[7] >= 0).any()
    assert bool(out[7].isnan().all()) == bool(chosen)
    rest = torch.arange(T, device="cuda") != 7
    assert out[rest].isfinite().all()
