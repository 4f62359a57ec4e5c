"""The experts operator on packed weights, torch backend: the same bits as on dequantised ones."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_patch import UnsupportedOptionError
from moe_patch.formats.packed import PackedWeight, pack
from moe_patch.ops.experts.op import Signals, experts_mlp
from moe_patch.types import ExpertWeights, Glu, Lora
from tests.support.numerics import assert_bits, bf16_rule

CPU = torch.device("cpu")
E, D, F, T, K, R = 5, 128, 64, 33, 2, 4
GLUS = {"silu": Glu("silu"), "oai": Glu("swiglu_oai", interleaved=True, alpha=1.702, limit=7.0)}


def make_weights(storage: str, transposed: bool, dtype: torch.dtype) -> tuple[Any, ExpertWeights]:
    """Return packed weights in logical orientation, and the plain weights that they represent."""
    packed, plain = [], []
    for shape in ((E, 2 * F, D), (E, D, F)):
        weight = torch.randn(shape) * shape[2] ** -0.5
        stored = weight.mT.contiguous() if transposed else weight
        one = pack(stored.to(dtype), storage, CPU, "w")
        plain.append(one.stored_experts(0, E))
        packed.append(one)
    if transposed:
        packed = [one.transpose(1, 2) for one in packed]
        plain = [one.mT for one in plain]
    return ExpertWeights(*packed), ExpertWeights(*plain)


def make_leaves(dtype: torch.dtype) -> list[Tensor]:
    shapes = [(T, D), (T, K), (E, R, D), (E, 2 * F, R), (E, R, F), (E, D, R)]
    return [torch.randn(shape).mul_(0.5).to(dtype) for shape in shapes]


def run(w: ExpertWeights, leaves: list[Tensor], ids_TK: Tensor, glu: Glu, **options: Any) -> list:
    """Return output and gradients of x, the routing weights and the factors."""
    x, weights, a13, b13, a2, b2 = (leaf.clone().requires_grad_() for leaf in leaves)
    out = experts_mlp(
        x, ids_TK, weights, w, glu, lora13=Lora(a13, b13, 0.5), lora2=Lora(a2, b2, 2.0), **options
    )
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, weights, a13, b13, a2, b2))]


def random_ids() -> Tensor:
    """Return ids with empty slots of both kinds, and an expert without rows."""
    ids_TK = torch.randint(-1, E + 2, (T, K))
    return ids_TK.where(ids_TK != 2, 0)


@pytest.mark.parametrize(
    ("storage", "transposed", "glu", "dtype"),
    list(itertools.product(("nf4", "fp8"), (False, True), GLUS, (torch.float32, torch.bfloat16))),
    ids=str,
)
def test_packed_experts_compute_what_dequantised_ones_do(
    storage: str, transposed: bool, glu: str, dtype: torch.dtype
) -> None:
    packed, plain = make_weights(storage, transposed, dtype)
    leaves, ids_TK = make_leaves(dtype), random_ids()
    for recompute in (False, True):
        found = run(packed, leaves, ids_TK, GLUS[glu], recompute=recompute)
        expected = run(plain, leaves, ids_TK, GLUS[glu], recompute=recompute)
        for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert theirs.any()
            assert_bits(mine, theirs, f"{i}")


def test_bf16_compute_of_fp32_storage() -> None:
    """Round once, from the fp32 product of level and scale."""
    packed, _ = make_weights("nf4", False, torch.float32)
    wide = [one.to(torch.float64).stored_experts(0, E) for one in packed[:2]]
    packed = packed._replace(w13_EHD=packed.w13_EHD.to(torch.bfloat16), w2_EDF=packed.w2_EDF)
    leaves, ids_TK = make_leaves(torch.bfloat16), random_ids()
    found = run(packed, leaves, ids_TK, GLUS["silu"])
    plain = ExpertWeights(*(one.bfloat16() for one in wide))
    eager = run(plain, leaves, ids_TK, GLUS["silu"])
    exact = run(ExpertWeights(*wide), [leaf.double() for leaf in leaves], ids_TK, GLUS["silu"])
    for mine, theirs, reference in zip(found, eager, exact, strict=True):
        bf16_rule(mine, theirs, reference)


@pytest.mark.parametrize("storage", ["nf4", "fp8"])
def test_nothing_dequantised_is_kept_for_backward(storage: str) -> None:
    packed, _ = make_weights(storage, False, torch.bfloat16)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        x = torch.randn(T, D, dtype=torch.bfloat16, requires_grad=True)
        weights = torch.rand(T, K, dtype=torch.bfloat16)
        out = experts_mlp(x, random_ids(), weights, packed, GLUS["silu"])
    out.sum().backward()
    inputs = {t.data_ptr() for w in packed[:2] for t in (w.packed, *w.scales)}
    for tensor in kept:
        own = tensor.data_ptr() in inputs
        assert own or tensor.numel() < E * D * F, f"{tensor.dtype} {tuple(tensor.shape)} is kept"
    assert any(tensor.data_ptr() in inputs for tensor in kept)


def test_one_expert_at_a_time_and_only_those_with_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = make_weights("fp8", False, torch.float32)
    asked: list[int] = []
    whole = PackedWeight.stored_experts

    def stored_experts(weight: PackedWeight, start: int, end: int) -> Tensor:
        asked.append(start)
        assert end == start + 1
        return whole(weight, start, end)

    monkeypatch.setattr(PackedWeight, "stored_experts", stored_experts)
    run(packed, make_leaves(torch.float32), random_ids(), GLUS["silu"])
    assert set(asked) == {0, 1, 3, 4}


def test_no_rows_at_all() -> None:
    packed, _ = make_weights("nf4", False, torch.float32)
    for ids_TK in (torch.full((T, K), -1), torch.full((T, K), E)):
        assert not any(
            t.any() for t in run(packed, make_leaves(torch.float32), ids_TK, GLUS["silu"])
        )


def test_signals_are_those_of_the_dequantised_layer() -> None:
    packed, plain = make_weights("nf4", False, torch.float32)
    leaves, ids_TK = make_leaves(torch.float32), random_ids()
    recorded = []
    for w in (packed, plain):
        signals = Signals(torch.empty(3, T, K))
        run(w, leaves, ids_TK, GLUS["silu"], signals=signals)
        recorded.append((signals.act_norm_TK, signals.grads_3TK))
    for mine, theirs in zip(*recorded, strict=True):
        assert_bits(mine, theirs)


def test_two_storages_in_one_call_are_refused() -> None:
    nf4, plain = make_weights("nf4", False, torch.float32)
    fp8, _ = make_weights("fp8", False, torch.float32)
    turned, _ = make_weights("nf4", True, torch.float32)
    for w13, w2 in ((nf4[0], fp8[1]), (nf4[0], plain[1]), (nf4[0], turned[1])):
        with pytest.raises(UnsupportedOptionError, match="the same storage for both"):
            run(ExpertWeights(w13, w2), make_leaves(torch.float32), random_ids(), GLUS["silu"])
