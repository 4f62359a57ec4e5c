"""Implementations of ``route`` against the definition: ties, bad rows, strides, dtypes, repeats."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from moe_patch.ops.routing import route, stable_topk
from moe_patch.types import RouteSpec, Routing
from tests.support import tiny_models
from tests.support.numerics import assert_bits, assert_close

WEIGHT_LIMIT = 1e-6
SPECS = {
    "softmax": RouteSpec(top_k=3),
    "softmax-renormalised": RouteSpec(top_k=3, renormalize=True),
    "softmax-clamped-eps": RouteSpec(top_k=3, renormalize=True, eps=1e-12, clamp_eps=True),
    "softmax-one": RouteSpec(top_k=1, renormalize=True),
    "softmax-all": RouteSpec(top_k=12),
    "topk-softmax": RouteSpec(top_k=3, order="topk_score"),
    "topk-sigmoid": RouteSpec(top_k=3, order="topk_score", score="sigmoid"),
    "sigmoid": RouteSpec(top_k=3, score="sigmoid", renormalize=True, eps=1e-20, scale=2.5),
    "sigmoid-plain": RouteSpec(top_k=3, score="sigmoid"),
    "sigmoid-logit-bias": RouteSpec(top_k=3, score="sigmoid", bias_on="logits"),
    "sqrtsoftplus": RouteSpec(top_k=3, score="sqrtsoftplus", renormalize=True, scale=1.5),
    "groups-top2": RouteSpec(top_k=3, score="sigmoid", groups=4, top_groups=2, renormalize=True),
    "groups-max-zero": RouteSpec(
        top_k=3, groups=4, top_groups=2, group_score="max", group_fill=0.0, scale=16.0
    ),
    "logits": RouteSpec(top_k=3, score="none"),
}
EXPERTS = 12


IMPLEMENTATIONS = [  # of ``route``: module, device
    pytest.param(("moe_patch.ops.routing", "cpu"), id="torch"),
    pytest.param(("moe_patch.ops.routing", "cuda"), id="torch-cuda", marks=pytest.mark.gpu),
    pytest.param(("moe_patch.ops.routing_op", "cuda"), id="triton", marks=pytest.mark.gpu),
]


@pytest.fixture(params=IMPLEMENTATIONS)
def impl(request):
    """Return an implementation that takes and returns CPU tensors."""
    module, device = request.param
    function = importlib.import_module(module).route

    def run(logits: Tensor, spec: RouteSpec, bias: Tensor | None = None) -> Routing:
        routing = function(logits.to(device), spec, None if bias is None else bias.to(device))
        return Routing(*(getattr(routing, f).cpu() for f in ("ids_TK", "weights_TK", "logits_TE")))

    return run


def random_logits(T: int = 64, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(T, EXPERTS, generator=torch.Generator().manual_seed(7)) * 2).to(dtype)


def some_bias() -> Tensor:
    return tiny_models.mixed_bias(EXPERTS, torch.Generator().manual_seed(8))


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("T", [0, 1, 7, 64])
@pytest.mark.parametrize("name", SPECS)
def test_implementations_agree_with_the_definition_in_fp64(impl, name, T, with_bias) -> None:
    spec, bias = SPECS[name], some_bias() if with_bias else None
    logits = random_logits(T).requires_grad_()
    wide = logits.detach().double().requires_grad_()
    mine, ref = impl(logits, spec, bias), route(wide, spec, None if bias is None else bias.double())
    assert torch.equal(mine.ids_TK, ref.ids_TK)
    assert mine.weights_TK.dtype == torch.float32
    assert_close(mine.weights_TK, ref.weights_TK, WEIGHT_LIMIT)
    upstream = torch.randn(T, spec.top_k, generator=torch.Generator().manual_seed(9))
    (mine_grad,) = torch.autograd.grad((mine.weights_TK * upstream).sum(), logits)
    (ref_grad,) = torch.autograd.grad((ref.weights_TK * upstream).sum(), wide)
    if spec.top_k == 1 and spec.renormalize:  # the one weight is the constant 1
        assert mine_grad.shape == logits.shape
        assert not (mine_grad.abs() > 1e-6).any()
    else:
        assert_close(mine_grad, ref_grad, 1e-5)


@pytest.mark.parametrize("name", SPECS)
def test_ties_go_to_the_lower_id_and_the_lower_group(impl, name) -> None:
    spec = SPECS[name]
    logits = torch.randint(-2, 3, (64, EXPERTS), generator=torch.Generator().manual_seed(4)).float()
    ids = impl(logits, spec).ids_TK
    scores = logits.tolist()
    for t in range(64):
        allowed = lower_groups(logits[t], spec)
        order = sorted(allowed, key=lambda e: (-scores[t][e], e))
        assert ids[t].tolist() == order[: spec.top_k]
    zeros = impl(torch.zeros(3, EXPERTS), spec).ids_TK
    assert zeros.tolist() == [list(range(spec.top_k))] * 3


def lower_groups(logits_E: Tensor, spec: RouteSpec) -> list[int]:
    """Return the experts of the best groups (lower numbers win ties), or all without groups."""
    if not spec.groups:
        return list(range(EXPERTS))
    size = EXPERTS // spec.groups
    scores = torch.softmax(logits_E, -1) if spec.score == "softmax" else torch.sigmoid(logits_E)
    best = scores.view(spec.groups, size).sort(-1, descending=True).values
    value = best[:, 0] if spec.group_score == "max" else best[:, 0] + best[:, 1]
    order = sorted(range(spec.groups), key=lambda g: (-value[g].item(), g))[: spec.top_groups]
    return [e for e in range(EXPERTS) if e // size in order]


@pytest.mark.parametrize("name", SPECS)
def test_bad_rows_stay_visible_and_alone(impl, name) -> None:
    spec, clean = SPECS[name], random_logits()
    bad = clean.clone()
    bad[3], bad[5, 2], bad[9, 4] = float("nan"), float("nan"), float("inf")
    bad[11, 0] = float("-inf")
    mine, ref = impl(bad, spec, some_bias()), impl(clean, spec, some_bias())
    assert ((mine.ids_TK >= 0) & (mine.ids_TK < EXPERTS)).all()
    assert all(len(set(row)) == spec.top_k for row in mine.ids_TK.tolist())
    rows = torch.ones(64, dtype=torch.bool)
    rows[[3, 5, 9, 11]] = False
    assert torch.equal(mine.ids_TK[rows], ref.ids_TK[rows])
    assert_bits(mine.weights_TK[rows], ref.weights_TK[rows])
    assert mine.weights_TK[3].isnan().all()
    assert mine.weights_TK[5].isnan().any()


@pytest.mark.parametrize("E", [12, 40, 200])
def test_signs_of_nan_and_of_zero_order_nothing(impl, E: int) -> None:
    logits = torch.randint(-2, 3, (8, E), generator=torch.Generator().manual_seed(4)).float()
    logits[1, 5], logits[2, [3, 7]], logits[3] = float("nan"), float("nan"), float("nan")
    negated = torch.where((logits == 0) | logits.isnan(), -logits, logits)
    for spec in (RouteSpec(top_k=10), RouteSpec(top_k=10, order="topk_score")):
        mine, ref = impl(negated, spec), impl(logits, spec)
        assert torch.equal(mine.ids_TK, ref.ids_TK)
        assert torch.equal(mine.weights_TK.isnan(), ref.weights_TK.isnan())
        if spec.order == "topk_score":
            assert mine.ids_TK[2, :2].tolist() == [3, 7]


@pytest.mark.parametrize("name", SPECS)
def test_repeats_are_bit_identical_and_the_input_is_not_written(impl, name) -> None:
    logits, bias = random_logits(), some_bias()
    before = logits.clone(), bias.clone()
    runs = [impl(logits, SPECS[name], bias) for _ in range(5)]
    for run in runs[1:]:
        assert torch.equal(run.ids_TK, runs[0].ids_TK)
        assert_bits(run.weights_TK, runs[0].weights_TK)
    assert_bits(logits, before[0])
    assert_bits(bias, before[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SPECS)
def test_low_precision_logits_are_scored_in_fp32(impl, name, dtype) -> None:
    logits = random_logits(dtype=dtype)
    mine, ref = impl(logits, SPECS[name]), impl(logits.float(), SPECS[name])
    assert torch.equal(mine.ids_TK, ref.ids_TK)
    assert_close(mine.weights_TK, ref.weights_TK, WEIGHT_LIMIT)


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_strided_logits(impl, layout) -> None:
    base = random_logits()
    views = {
        "transposed": base.T.contiguous().T,
        "strided": torch.cat([base, base], 1)[:, :EXPERTS],
        "expanded": base[:1].expand(64, -1),
    }
    view = views[layout]
    mine, ref = impl(view, SPECS["sigmoid"]), impl(view.contiguous(), SPECS["sigmoid"])
    assert torch.equal(mine.ids_TK, ref.ids_TK)
    assert_close(mine.weights_TK, ref.weights_TK, WEIGHT_LIMIT)


def test_flat_rows_are_in_order_t_times_k() -> None:
    routing = route(random_logits(5), RouteSpec(top_k=3))
    token_N, expert_N, weight_N = routing.flat()
    for n in range(15):
        t, k = divmod(n, 3)
        assert token_N[n] == t
        assert expert_N[n] == routing.ids_TK[t, k]
        assert weight_N[n] == routing.weights_TK[t, k]


def test_flat_without_tokens() -> None:
    assert [t.shape for t in route(random_logits(0), RouteSpec(top_k=3)).flat()] == [(0,)] * 3


def test_stable_topk_orders_equal_values_by_index() -> None:
    values, ids = stable_topk(torch.tensor([[1.0, 3.0, 1.0, 3.0, 2.0]]), 4)
    assert ids.tolist() == [[1, 3, 4, 0]]
    assert values.tolist() == [[3.0, 3.0, 2.0, 1.0]]
