"""The experts operator on the torch backend: fp64 against autograd through the plain reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_patch.ops.experts import definition as reference
from moe_patch.ops.experts.grouped import _aligned
from tests.support.experts_cases import (
    CASES,
    FULL,
    OAI,
    Case,
    D,
    E,
    F,
    arguments,
    drawn,
    gradients,
    make_inputs,
    ours,
    run,
)
from tests.support.numerics import FP64, assert_bits, assert_close, bf16_rule, probe


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_all_gradients_in_fp64(case) -> None:
    t = make_inputs(case)
    mine, out = run(case, t), reference.experts(*arguments(case, t))
    ref = {"out": out.detach()} | gradients(out, t)
    for name, value in ref.items():
        assert_close(mine[name], value, FP64, name)
        assert name == "out" or mine[name].stride() == t[name].stride(), name


@pytest.mark.parametrize("case", [Case(), replace(FULL, gated=False)], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_without_tokens(case, recompute) -> None:
    t = make_inputs(replace(case, T=0))
    mine = run(case, t, recompute=recompute)
    assert mine["out"].shape == (0, D)
    for name, grad in mine.items():
        if name != "out":
            assert grad.shape == t[name].shape
            assert not grad.any(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [Case(), FULL, replace(OAI, limit=0.7)], ids=str)
def test_low_precision(case, dtype) -> None:
    """Stay within a limit in fp32, and within 1.5 times the reference's error in bf16 and fp16."""
    case = replace(case, T=150)
    t = make_inputs(case, dtype)
    wide = {k: v if k == "ids" else v.detach().double().requires_grad_() for k, v in t.items()}
    runs = []
    for tensors in (t, wide):
        out = reference.experts(*arguments(case, tensors))
        runs.append({"out": out.detach()} | gradients(out, tensors))
    mine = run(case, t)
    for name, ref in runs[1].items():
        assert mine[name].dtype == dtype
        if dtype == torch.float32:
            assert_close(mine[name], ref, 1e-6, name)
        else:
            bf16_rule(mine[name], runs[0][name], ref, name)


@pytest.mark.parametrize("case", [drawn(seed) for seed in range(12)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recompute_agrees_bit_for_bit(case, dtype) -> None:
    t = make_inputs(case, dtype)
    kept, recomputed = run(case, t, recompute=False), run(case, t, recompute=True)
    for name in kept:
        assert_bits(recomputed[name], kept[name], name)


# --- ids, rows, strides ---------------------------------------------------------------------------


@pytest.mark.parametrize("sentinel", [-1, E, E + 7, -(2**31)])
@pytest.mark.parametrize("weight", [0.0, 0.5, float("nan")])
def test_empty_slots_have_no_weight_and_no_gradient(sentinel, weight) -> None:
    case = FULL
    t = make_inputs(case)
    hole = torch.rand(t["ids"].shape) < 0.3
    t["ids"] = torch.where(hole, sentinel, t["ids"])
    t["weights"] = torch.where(hole, weight, t["weights"].detach()).requires_grad_()
    clean = t | {"weights": torch.where(hole, 0.0, t["weights"].detach()).requires_grad_()}
    mine, out = run(case, t), reference.experts(*arguments(case, clean))
    for name, value in ({"out": out.detach()} | gradients(out, clean)).items():
        assert_close(mine[name], value, FP64, name)
    assert not mine["weights"][hole].any()


def test_a_bad_row_stays_visible_and_alone() -> None:
    case = Case(bias=True)
    t = make_inputs(case)
    good = ours(case, t)
    bad = t["x"].detach().clone()
    bad[3], bad[5, 0], bad[9, 1] = float("nan"), float("nan"), float("inf")
    out = ours(case, t | {"x": bad})
    rows = torch.ones(case.T, dtype=torch.bool)
    rows[[3, 5, 9]] = False
    assert_bits(out[rows], good[rows])
    assert out[[3, 5]].isnan().all()
    assert not torch.isfinite(out[9]).any()


@pytest.mark.parametrize(
    "what", ["x transposed", "x strided", "x expanded", "weights", "packed", "out.sum"]
)
def test_strides(what) -> None:
    case = Case(lora13=True, lora2=True)
    t = make_inputs(case)
    views = dict(t)
    if what == "x transposed":
        views["x"] = t["x"].detach().T.contiguous().T
    elif what == "x strided":
        views["x"] = torch.randn(case.T, D + 9).double()[:, 5 : 5 + D]
    elif what == "x expanded":
        views["x"] = t["x"].detach()[:1].expand(case.T, -1)
    elif what == "weights":
        views |= {n: t[n].detach().mT.contiguous().mT for n in ("w13", "w2", "a13", "lb13", "lb2")}
    elif what == "packed":
        packed = torch.randn(E, 2 * F + 4, D + 3).double()
        views["w13"] = packed[:, 2 : 2 + 2 * F, 1 : 1 + D]
    views = {n: v if n == "ids" else v.detach().requires_grad_() for n, v in views.items()}
    plain = {n: v.detach().contiguous() for n, v in views.items()}
    plain = {n: v if n == "ids" else v.requires_grad_() for n, v in plain.items()}
    names = [n for n in t if n != "ids"]
    runs = []
    for tensors in (views, plain):
        out = ours(case, tensors)
        loss = out.sum() if what == "out.sum" else probe(out)
        grads = torch.autograd.grad(loss, [tensors[n] for n in names])
        runs.append(dict(zip(["out", *names], [out.detach(), *grads], strict=True)))
    for name in runs[1]:
        assert_close(runs[0][name], runs[1][name], FP64, name)


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_routing_weights_keep_their_own_dtype(weights_dtype) -> None:
    case = Case()
    t = make_inputs(case, torch.bfloat16)
    t["weights"] = t["weights"].detach().to(weights_dtype).requires_grad_()
    mine = run(case, t)
    assert mine["out"].dtype == torch.bfloat16
    assert mine["weights"].dtype == weights_dtype


VIEWS = {
    "contiguous": lambda: torch.ones(8, 16, 32),
    "transposed": lambda: torch.ones(8, 32, 16).mT,
    "every other row": lambda: torch.ones(8, 32, 32)[:, ::2],
    "one expert expanded": lambda: torch.ones(1, 16, 32).expand(8, 16, 32),
    "rows of an odd pitch": lambda: torch.ones(8, 16, 33)[..., :32],
    "an odd column": lambda: torch.ones(8, 16, 40)[..., 1:33],
    "experts of an odd pitch": lambda: torch.ones(8, 516)[:, :512].unflatten(1, (16, 32)),
    "no unit stride": lambda: torch.ones(8, 16, 64)[..., ::2],
}


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="torch 2.10 has it")
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_native_product_is_chosen_only_for_layouts_that_torch_takes(view) -> None:
    """Agree with torch's own check, also for weights that are slices of a packed tensor."""
    rows = torch.ones(16, 32, dtype=torch.bfloat16)
    stored = view()
    # A view of the same layout in bf16: .to() would make it contiguous.
    flat = torch.ones(stored.untyped_storage().size() // 4, dtype=torch.bfloat16)
    weights = flat.as_strided(stored.shape, stored.stride(), stored.storage_offset())
    offsets = torch.arange(2, 18, 2, dtype=torch.int32)
    try:
        torch.nn.functional.grouped_mm(rows, weights.mT, offs=offsets)
    except RuntimeError:
        assert not _aligned(rows, weights)
    else:
        # A CPU accepts any start of an expert; a GPU loads 16 bytes at a time.
        begins = {expert.data_ptr() % 16 for expert in weights}
        assert _aligned(rows, weights) == (begins == {0})
