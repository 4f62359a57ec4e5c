"""Tensors that the experts write, never write, keep for backward and compute on demand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_patch.ops.experts import definition as reference
from moe_patch.ops.experts.op import Signals
from moe_patch.ops.experts.schema import (
    alone_options,
    encode_options,
    read_glu,
    read_options,
)
from moe_patch.types import Glu
from tests.support.experts_cases import (
    FULL,
    Case,
    D,
    E,
    F,
    K,
    R,
    arguments,
    drawn,
    gradients,
    make_inputs,
    ours,
    run,
)
from tests.support.numerics import FP64, assert_bits, assert_close, probe


def fill_allocator_with_nan(t: dict[str, Tensor]) -> None:
    """Allocate and free NaN tensors of the sizes that the operator will allocate."""
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


# --- backward on demand ---------------------------------------------------------------------------


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
    """Return the bytes kept from forward to backward, inputs excluded."""
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
def test_only_h_the_plan_and_rank_sized_rows_are_kept(full) -> None:
    case = Case(bias=full, lora13=full, lora2=full, T=200)
    t = make_inputs(case, torch.bfloat16)
    N = 200 * K
    plan = 4 * (N + N + E + 1)
    h, u = N * 2 * F * 2, N * R * 2
    assert saved_bytes(case, t) == h + (2 * u if full else 0) + plan
    assert saved_bytes(replace(case, recompute=True), t) == plan


@pytest.mark.parametrize("frozen", [["lb13"], ["lb2"], ["lb13", "lb2"], ["a13", "a2"]], ids=str)
def test_the_input_of_a_frozen_factor_is_not_kept(frozen) -> None:
    case = Case(lora13=True, lora2=True, T=200)
    t = make_inputs(case, torch.bfloat16)
    for name in frozen:
        t[name].requires_grad_(False)
    N, kept = 200 * K, 2 - len({"lb13", "lb2"} & set(frozen))
    assert saved_bytes(case, t) == N * 2 * F * 2 + kept * N * R * 2 + 4 * (N + N + E + 1)


def test_nothing_is_kept_without_gradients() -> None:
    t = make_inputs(Case())
    with torch.no_grad():
        assert saved_bytes(Case(), t) == 0
    frozen = {n: v.detach() for n, v in t.items()}
    assert not ours(Case(), frozen).requires_grad


CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
if Version(torch.__version__) < Version("2.10"):
    CHECKS = CHECKS[1:]  # its check of schemas loses an empty list of tensors


@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize(("full", "T"), [(False, 0), (False, 7), (True, 7)])
def test_opcheck(full, T, columns_first) -> None:
    case = Case(bias=full, lora13=full, lora2=full, T=T)
    t = make_inputs(case, torch.float32)
    x, ids, weights, w, glu, lora13, lora2 = arguments(case, t)
    if columns_first:  # their gradients are contiguous all the same
        x, weights = (one.detach().T.contiguous().T.requires_grad_() for one in (x, weights))
    a13, lb13, s13 = lora13 or (None, None, 1.0)
    a2, lb2, s2 = lora2 or (None, None, 1.0)
    rest = (
        *w,
        a13,
        lb13,
        a2,
        lb2,
        s13,
        s2,
        glu.alpha,
        glu.limit,
        encode_options(glu, "torch", False, ""),
    )
    for keep in (True, False):
        args = (x, ids, weights, *rest, [keep, keep and full, keep and full, keep], None, [])
        torch.library.opcheck(torch.ops.moe_patch.experts.default, args, test_utils=CHECKS)
    save = [True, full, full, False]
    with torch.no_grad():
        _, *kept, _ = torch.ops.moe_patch.experts.default(x, ids, weights, *rest, save, None, [])
    args = (torch.randn_like(x), x, weights, *rest, *kept, [True] * 10 + [True], [])
    args = [a.detach() if isinstance(a, Tensor) else a for a in args]
    torch.library.opcheck(torch.ops.moe_patch.experts_bwd.default, tuple(args))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.moe_patch.experts_bwd.inplace_h, tuple(args), test_utils=checks)


class BackwardOperators(TorchDispatchMode):
    """Record the overloads of experts_bwd that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.moe_patch.experts_bwd:
            self.called.append(func._overloadname)
        return func(*args, **(kwargs or {}))


def test_h_is_overwritten_only_where_backward_cannot_come_again() -> None:
    case = Case(bias=True, lora13=True, lora2=True)
    t = make_inputs(case)
    leaves = [value for name, value in t.items() if name != "ids"]
    loss = probe(ours(case, t))
    with BackwardOperators() as operators:
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        second = torch.autograd.grad(loss, leaves)
        again = torch.autograd.grad(
            probe(ours(case, t)), leaves, create_graph=True, retain_graph=False
        )
        with pytest.raises(RuntimeError, match="second derivative"):
            again[0].sum().backward()
    assert operators.called[:2] == ["default", "inplace_h"]
    assert "inplace_h" not in operators.called[2:]
    for one, two in zip(first, second, strict=True):
        assert_bits(two, one)


@pytest.mark.parametrize("T", [0, 7])
def test_the_operator_without_gradients(T) -> None:
    """Return the bits of the operator with gradients, and pass torch's opcheck."""
    case = Case(bias=True, lora13=True, lora2=True, T=T)
    t = make_inputs(case, torch.float32)
    with torch.no_grad():
        assert_bits(ours(case, t), ours(case, t, signals=Signals(torch.zeros(3, T, K))))
    x, ids, weights, w, glu, (a13, lb13, s13), (a2, lb2, s2) = arguments(case, t)
    factors = (a13, lb13, a2, lb2, s13, s2, glu.alpha, glu.limit)
    args = (x, ids, weights, *w, *factors, encode_options(glu, "torch", False, ""), [])
    args = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
    torch.library.opcheck(torch.ops.moe_patch.experts.inference, args)


def test_options_come_back_from_their_words() -> None:
    for glu in (Glu("silu"), Glu("relu", gated=False), Glu("swiglu_oai", True, True, 1.702, 7.0)):
        for storage in ("", "nf4 transposed"):
            encoded = encode_options(glu, "triton", True, storage, 4096, alone=True)
            assert read_options(encoded)[3:] == ("triton", True, 4096, True, storage)
            other = encode_options(glu, "triton", True, storage, 4096)
            assert alone_options(other, 32) == alone_options(encoded, 32)
            assert read_options(alone_options(other, 32))[3:] == ("triton", True, 32, True, storage)
            assert read_glu(encoded, glu.alpha, glu.limit) == glu
