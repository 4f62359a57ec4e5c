"""The experts operator on the torch backend: fp64 against autograd through the plain reference."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from moe_patch import reference
from moe_patch.composed import experts_composed
from moe_patch.ops import Signals, experts_mlp
from moe_patch.types import ExpertWeights, Glu, Lora
from tests.numerics import FP64, assert_bits, assert_close, bf16_rule, probe

E, K, D, F, R = 5, 3, 12, 7, 3


@dataclass(frozen=True)
class Case:
    """One combination of everything that decides the operator's path."""

    kind: str = "silu"
    gated: bool = True
    interleaved: bool = False
    transposed: bool = False
    bias: bool = False
    lora13: bool = False
    lora2: bool = False
    recompute: bool = False
    limit: float = float("inf")
    T: int = 37
    ids: str = "distinct"

    @property
    def glu(self) -> Glu:
        alpha = 1.702 if self.kind == "swiglu_oai" else 1.0
        return Glu(self.kind, self.gated, self.interleaved, alpha, self.limit)

    def __str__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        names = [
            f.name if f.type == "bool" else f"{f.name}={getattr(self, f.name)}" for f in changed
        ]
        return "-".join(names) or "plain"


def drawn(seed: int) -> Case:
    """A random case; swiglu_oai has a gate by definition, and only a gate interleaves."""
    pick = random.Random(seed).choice
    kind = pick(Glu.KINDS)
    gated = kind == "swiglu_oai" or pick((True, True, False))
    return Case(
        kind, gated, gated and pick((True, False)), *(pick((True, False)) for _ in range(5)),
        limit=pick((float("inf"), 0.7)), T=pick((1, 7, 37)),
        ids=pick(("distinct", "distinct", "empty slots", "one takes all")),
    )  # fmt: skip


FULL = Case(bias=True, lora13=True, lora2=True)
OAI = Case("swiglu_oai", interleaved=True)
CASES = [
    Case(),
    *(Case(kind=kind) for kind in Glu.KINDS[1:]),
    *(Case(kind=kind, gated=False) for kind in Glu.KINDS[:-1]),
    *(Case(kind=kind, limit=0.7, interleaved=True) for kind in Glu.KINDS),
    Case("swiglu_oai", interleaved=True, transposed=True, bias=True, limit=0.7),
    *(Case(bias=True, lora13=a, lora2=b) for a, b in product((False, True), repeat=2)),
    *(Case(T=T, ids="empty slots") for T in (1, 7, 37)),
    *(drawn(seed) for seed in range(60)),
]


def make_ids(case: Case, generator: torch.Generator) -> Tensor:
    """Distinct ids that leave expert 1 empty; or empty slots of both kinds; or all the same."""
    order = torch.rand(case.T, E, generator=generator)
    order[:, 1] = 2.0
    ids = order.argsort(-1)[:, :K]
    if case.ids == "one takes all":
        return torch.full_like(ids, 3)
    if case.ids == "empty slots":
        hole = torch.rand(ids.shape, generator=generator)
        return torch.where(hole < 0.2, -1, torch.where(hole > 0.8, E + 2, ids))
    return ids


def make_inputs(case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    """Leaf tensors by name, in storage layout, requiring grad; ids without."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * std).to(dtype).requires_grad_()

    H = 2 * F if case.gated else F
    out = {"x": normal(case.T, D)}
    out["weights"] = (torch.rand(case.T, K, generator=generator) + 0.1).to(dtype).requires_grad_()
    out["w13"] = normal(E, *((D, H) if case.transposed else (H, D)), std=0.4)
    out["w2"] = normal(E, *((F, D) if case.transposed else (D, F)), std=0.4)
    if case.bias:
        out |= {"b13": normal(E, H), "b2": normal(E, D)}
    if case.lora13:
        out |= {"a13": normal(E, R, D, std=0.4), "lb13": normal(E, H, R, std=0.4)}
    if case.lora2:
        out |= {"a2": normal(E, R, F, std=0.4), "lb2": normal(E, D, R, std=0.4)}
    return out | {"ids": make_ids(case, generator)}


def arguments(case: Case, t: dict[str, Tensor]) -> tuple:
    """(x, ids, weights, ExpertWeights, Glu, lora13, lora2)."""
    w13, w2 = (t["w13"].mT, t["w2"].mT) if case.transposed else (t["w13"], t["w2"])
    lora13 = Lora(t["a13"], t["lb13"], 0.7) if case.lora13 else None
    lora2 = Lora(t["a2"], t["lb2"], 1.3) if case.lora2 else None
    w = ExpertWeights(w13, w2, t.get("b13"), t.get("b2"))
    return t["x"], t["ids"], t["weights"], w, case.glu, lora13, lora2


def ours(case: Case, t: dict[str, Tensor], **kwargs) -> Tensor:
    *args, lora13, lora2 = arguments(case, t)
    kwargs = {"backend": "torch", "recompute": case.recompute} | kwargs
    return experts_mlp(*args, lora13=lora13, lora2=lora2, **kwargs)


def gradients(out: Tensor, t: dict[str, Tensor]) -> dict[str, Tensor]:
    names = [name for name in t if name != "ids"]
    return dict(zip(names, torch.autograd.grad(probe(out), [t[n] for n in names]), strict=True))


def run(case: Case, t: dict[str, Tensor], **kwargs) -> dict[str, Tensor]:
    out = ours(case, t, **kwargs)
    return {"out": out.detach()} | gradients(out, t)


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
    """fp32 by a limit; bf16 and fp16 at most 1.5 times as far from fp64 as the plain reference."""
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


# --- memory that nobody wrote, memory that nobody may write ---------------------------------------


def fill_allocator_with_nan(t: dict[str, Tensor]) -> None:
    """Allocate and free NaN tensors of the sizes the operator will ask for."""
    sizes = [v.numel() for v in t.values()] + [t["ids"].numel() * n for n in (D, F, 2 * F, 1)]
    for size in sizes * 3:
        torch.full((size,), float("nan"), dtype=t["x"].dtype)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("full", [False, True], ids=["plain", "bias and LoRA"])
def test_experts_without_tokens_get_exact_zeros(poisoned_memory, recompute, full) -> None:
    case = Case(bias=full, lora13=full, lora2=full, recompute=recompute)
    counts = [162, 0, 577, 446, 0]
    t = make_inputs(case)
    ids = torch.repeat_interleave(torch.arange(E), torch.tensor(counts))
    ids = ids[torch.randperm(len(ids))].view(-1, 1)
    T = len(ids)
    t |= {"x": torch.randn(T, D).double().requires_grad_(), "ids": ids}
    t["weights"] = torch.rand(T, 1).double().requires_grad_()
    fill_allocator_with_nan(t)
    first, second = run(case, t), run(case, t)
    for name, value in first.items():
        assert torch.isfinite(value).all(), name
        assert_bits(second[name], value, name)
        if name not in ("out", "x", "weights"):
            assert not value[[1, 4]].any(), name
            assert value[[0, 2, 3]].any(), name


@pytest.mark.parametrize("case", [drawn(seed) for seed in range(12)], ids=str)
def test_poisoned_memory_changes_nothing(case, poisoned_memory) -> None:
    t = make_inputs(case)
    mine, out = run(case, t), reference.experts(*arguments(case, t))
    for name, value in ({"out": out.detach()} | gradients(out, t)).items():
        assert_close(mine[name], value, FP64, name)


@pytest.mark.parametrize("case", [drawn(seed) for seed in range(12)], ids=str)
def test_inputs_are_never_written(case) -> None:
    t = make_inputs(case, torch.float32)
    before = {k: v.detach().clone() for k, v in t.items()}
    wide = torch.randn(case.T, D + 8)
    copy = wide.clone()
    view = wide[:, 3 : 3 + D].requires_grad_()
    run(case, t)
    run(case, t | {"x": view})
    with torch.no_grad():
        ours(case, t)
    assert_bits(wide, copy, "the tensor around x")
    for name, value in before.items():
        assert_bits(t[name], value, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forty_repeats_are_bit_identical(dtype) -> None:
    case = FULL
    t = make_inputs(case, dtype)
    first = run(case, t)
    for _ in range(39):
        again = run(case, t)
        for name, value in first.items():
            assert_bits(again[name], value, name)


# --- ids, rows and strides ------------------------------------------------------------------------


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


# --- what autograd asks for, and what is kept for it ----------------------------------------------


@pytest.mark.parametrize("seed", range(24))
def test_gradients_only_where_asked_for(seed) -> None:
    case = replace(FULL, recompute=bool(seed % 2))
    t = make_inputs(case)
    full = run(case, t)
    pick = random.Random(seed)
    wanted = {name for name in t if name != "ids" and pick.random() < 0.4} or {"lb13"}
    leaves = {n: v.detach().requires_grad_(n in wanted) for n, v in t.items() if n != "ids"}
    probe(ours(case, leaves | {"ids": t["ids"]})).backward()
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name in wanted), name
        if name in wanted:
            assert_bits(leaf.grad, full[name], name)


@pytest.mark.parametrize(
    "only", ["x", "weights", "w13", "w2", "b13", "b2", "a13", "lb13", "a2", "lb2"]
)
def test_each_gradient_alone(only) -> None:
    case = FULL
    t = make_inputs(case)
    full = run(case, t)
    leaves = {n: v.detach().requires_grad_(n == only) for n, v in t.items() if n != "ids"}
    probe(ours(case, leaves | {"ids": t["ids"]})).backward()
    assert_bits(leaves[only].grad, full[only])


def saved_bytes(case: Case, t: dict[str, Tensor]) -> int:
    """Bytes kept from forward to backward beyond the inputs themselves."""
    inputs = {v.untyped_storage().data_ptr() for v in t.values()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in inputs:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ours(case, t)
    kept.pop(0, None)
    return sum(kept.values())


@pytest.mark.parametrize("full", [False, True], ids=["plain", "bias and LoRA"])
def test_only_h_and_the_plan_are_kept(full) -> None:
    case = Case(bias=full, lora13=full, lora2=full, T=200)
    t = make_inputs(case, torch.bfloat16)
    N = 200 * K
    plan = 4 * (N + N + E + 1)
    assert saved_bytes(case, t) == N * 2 * F * 2 + plan
    assert saved_bytes(replace(case, recompute=True), t) == plan


def test_nothing_is_kept_without_gradients() -> None:
    t = make_inputs(Case())
    with torch.no_grad():
        assert saved_bytes(Case(), t) == 0
    frozen = {n: v.detach() for n, v in t.items()}
    assert not ours(Case(), frozen).requires_grad


@pytest.mark.parametrize(("full", "T"), [(False, 0), (False, 7), (True, 7)])
def test_opcheck(full, T) -> None:
    case = Case(bias=full, lora13=full, lora2=full, T=T)
    t = make_inputs(case, torch.float32)
    x, ids, weights, w, glu, lora13, lora2 = arguments(case, t)
    a13, lb13, s13 = lora13 or (None, None, 1.0)
    a2, lb2, s2 = lora2 or (None, None, 1.0)
    rest = (*w, a13, lb13, a2, lb2, s13, s2, *(getattr(glu, f.name) for f in fields(glu)), "torch")
    for keep in (True, False):
        args = (x, ids, weights, *rest, keep, keep, None)
        torch.library.opcheck(torch.ops.moe_patch.experts.default, args)
    with torch.no_grad():
        _, *plan, h, _ = torch.ops.moe_patch.experts(x, ids, weights, *rest, True, False, None)
    args = (torch.randn_like(x), x, weights, *rest, *plan, h, [True] * 10 + [True])
    args = [a.detach() if isinstance(a, Tensor) else a for a in args]
    torch.library.opcheck(torch.ops.moe_patch.experts_bwd.default, tuple(args))


# --- per-row signals ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(T=4), Case(T=4, ids="empty slots"), Case(T=4, bias=True, recompute=True),
        Case(T=4, bias=True, lora13=True, lora2=True), Case(T=4, lora2=True, transposed=True),
    ],
    ids=str,
)  # fmt: skip
def test_signals_equal_explicit_outer_products(case) -> None:
    """Each row alone through the reference: the norms of its whole gradient, in fp64."""
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


# --- the composed path, for activations that no kernel knows --------------------------------------


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
    """A norm between the down projection and the weighted sum, once per (token, expert) row."""
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
