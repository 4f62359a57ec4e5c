"""Routing against transformers' own router classes, and our implementations against each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_patch.families import families, lookup
from moe_patch.ops.routing import route
from moe_patch.types import RouteSpec, Routing
from tests.support import tiny_models
from tests.support.numerics import (
    assert_bits,
    assert_close,
    assert_same_choice,
    bf16_rule,
    dense_weights,
)
from tests.support.parity import assert_router_parity, ours, run_router, theirs

pytestmark = pytest.mark.routers
WEIGHT_LIMIT = 1e-6
SIZES = [(2, 1), (8, 2), (16, 4), (32, 8)]


def make_router(model_type: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> nn.Module:
    """A router of the family's class, random weights, stored in ``dtype`` as the family would."""
    model = tiny_models.build(model_type, dtype, num_hidden_layers=1, **overrides)
    routers = [m for m in model.modules() if (found := lookup(m)) and found[1] == "router"]
    assert len(routers) == 1
    return routers[0]


def states(T: int = 64, dtype: torch.dtype = torch.float32, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(T, tiny_models.SIZES["hidden_size"], generator=generator).to(dtype)


def scores_that_decide(model_type: str, logits: Tensor, *args: Tensor) -> Tensor:
    """Return the scores to compare if a bf16 row ties: monotone in the family's choice score."""
    if model_type == "minimax_m2":
        return torch.sigmoid(logits.float()) + args[0]
    return logits.float()


SOFTMAX = [
    (model_type, E, K, {"norm_topk_prob": norm})
    for model_type in ("qwen2_moe", "qwen3_moe", "olmoe")
    for E, K in SIZES
    for norm in (True, False)
]
ALWAYS_NORMALISED = [(m, E, K, {}) for m in ("mixtral", "gpt_oss") for E, K in SIZES]
SIGMOID = [
    (model_type, E, K, over)
    for model_type in ("deepseek_v3", "glm4_moe")
    for E, K, over in [
        (8, 2, {"n_group": 2, "topk_group": 1}),
        (16, 4, {"n_group": 4, "topk_group": 2}),
        (32, 8, {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 1.0}),
        (32, 8, {"n_group": 8, "topk_group": 8}),
        (8, 2, {"n_group": 1, "topk_group": 1}),
        (16, 4, {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
        (16, 4, {"n_group": 4, "topk_group": 2, "norm_topk_prob": False}),
    ]
] + [("minimax_m2", E, K, {}) for E, K in SIZES]
PARITY = SOFTMAX + ALWAYS_NORMALISED + SIGMOID


def case_id(case: Any) -> str:
    return "-".join(f"{k}={v}" for k, v in case.items()) if isinstance(case, dict) else str(case)


def bias_args(model_type: str, E: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Return the correction bias that MiniMax-M2's block passes to its router."""
    if model_type != "minimax_m2":
        return ()
    return (tiny_models.mixed_bias(E, torch.Generator().manual_seed(3)).to(dtype),)


@pytest.mark.parametrize(("model_type", "E", "K", "over"), PARITY, ids=case_id)
def test_router_matches_transformers(model_type, E, K, over) -> None:
    router = make_router(model_type, **tiny_models.with_experts(model_type, E, K), **over)
    args = bias_args(model_type, E)
    assert_router_parity(ours, router, states(), *args, limit=WEIGHT_LIMIT)
    routing = lookup(router)[0].route(router, states(), args)
    assert routing.ids_TK.dtype == torch.int64
    assert routing.ids_TK.shape == (64, K)


@pytest.mark.parametrize(("model_type", "E", "K", "over"), PARITY, ids=case_id)
def test_router_matches_transformers_in_bf16(model_type, E, K, over) -> None:
    router = make_router(
        model_type, torch.bfloat16, **tiny_models.with_experts(model_type, E, K), **over
    )
    args = bias_args(model_type, E, torch.bfloat16)
    fp32_logits = router.weight.dtype == torch.float32
    assert_router_parity(
        ours, router, states(dtype=torch.bfloat16), *args, limit=WEIGHT_LIMIT,
        choice=None if fp32_logits else lambda *a: scores_that_decide(model_type, *a),
    )  # fmt: skip


@pytest.mark.parametrize(
    "model_type", ["qwen3_moe", "gpt_oss", "deepseek_v3", "minimax_m2", "mixtral"]
)
def test_bf16_weights_are_as_close_to_fp64_as_eager(model_type) -> None:
    router = make_router(model_type, torch.bfloat16, **tiny_models.with_experts(model_type, 16, 4))
    args, x = bias_args(model_type, 16), states(256, torch.bfloat16)
    mine, eager = run_router(ours, router, x, *args), run_router(theirs, router, x, *args)
    wide = make_router(model_type, torch.float64, **tiny_models.with_experts(model_type, 16, 4))
    wide.load_state_dict({k: v.double() for k, v in router.state_dict().items()})
    ref = run_router(theirs, wide, x.double(), *(a.double() for a in args))
    sets = [run["ids"].sort(-1).values for run in (mine, eager, ref)]
    rows = (sets[0] == sets[2]).all(-1) & (sets[1] == sets[2]).all(-1)
    assert rows.double().mean() > 0.5
    dense = [dense_weights(run["ids"], run["weights"], 16)[rows] for run in (mine, eager, ref)]
    bf16_rule(*dense)


@pytest.mark.parametrize(
    "model_type", ["qwen2_moe", "mixtral", "gpt_oss", "deepseek_v3", "minimax_m2"]
)
@pytest.mark.parametrize("gate", ["zeros", "integers", "random"])
def test_ties_torch_gives_the_bits_of_transformers(model_type, gate) -> None:
    router, x = make_router(model_type), states()
    with torch.no_grad():
        if gate == "zeros":
            router.weight.zero_()
        elif gate == "integers":
            router.weight.copy_(torch.randint(-1, 2, router.weight.shape))
            x = torch.randint(-1, 2, x.shape).float()
    args = bias_args(model_type, 8)
    logits, weights, ids = ours(router, x, *args, ties="torch")
    ref_logits, ref_weights, ref_ids = theirs(router, x, *args)
    assert_bits(logits, ref_logits)
    assert torch.equal(ids.sort(-1).values, ref_ids.sort(-1).values)
    assert_bits(dense_weights(ids, weights, 8), dense_weights(ref_ids, ref_weights, 8))


# --- one requirement each -------------------------------------------------------------------------


def test_renormalised_weights_sum_to_one_and_plain_ones_are_probabilities() -> None:
    for norm in (True, False):
        router = make_router("qwen3_moe", norm_topk_prob=norm)
        logits, weights, ids = ours(router, states())
        if norm:
            assert_close(weights.sum(-1), torch.ones(64), 1e-6)
        else:
            assert torch.equal(weights, torch.softmax(logits, -1).gather(1, ids))
            assert (weights.sum(-1) < 1).all()


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe", "minimax_m2"])
def test_correction_bias_chooses_and_never_weighs(model_type) -> None:
    def routed(offset: float) -> Routing:
        bias = torch.linspace(-0.3, 0.3, 8) + offset
        args = (bias,) if model_type == "minimax_m2" else ()
        if not args:
            router.e_score_correction_bias.copy_(bias)
        return lookup(router)[0].route(router, x, args)

    router, x = make_router(model_type), states()
    base, shifted = routed(0.0), routed(1.0)
    unbiased = torch.sigmoid(base.logits_TE).gather(1, base.ids_TK)
    unbiased = unbiased / unbiased.sum(-1, keepdim=True)
    scale = 1.0 if model_type == "minimax_m2" else 2.5
    assert_close(base.weights_TK, unbiased * scale, WEIGHT_LIMIT)
    assert_same_choice(shifted.ids_TK, base.ids_TK)
    dense = [dense_weights(r.ids_TK, r.weights_TK, 8) for r in (shifted, base)]
    assert_close(*dense, WEIGHT_LIMIT)


def test_correction_bias_gets_no_gradient() -> None:
    bias = torch.zeros(8, requires_grad=True)
    logits = states(dtype=torch.float32)[:, :8].clone().requires_grad_()
    routing = route(logits, RouteSpec(top_k=2, score="sigmoid", renormalize=True), bias)
    routing.weights_TK[:, 0].sum().backward()
    assert bias.grad is None
    assert logits.grad.any()


@pytest.mark.families("deepseek_v3")
@pytest.mark.parametrize("bias", ["all -2", "all +2", "mixed"])
def test_excluded_groups_never_win(bias) -> None:
    router = make_router(
        "deepseek_v3", n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2
    )
    values = {"all -2": torch.full((16,), -2.0), "all +2": torch.full((16,), 2.0)}
    router.e_score_correction_bias.copy_(values.get(bias, torch.linspace(-0.3, 0.3, 16)))
    assert_router_parity(ours, router, states(), limit=WEIGHT_LIMIT)
    ids = ours(router, states())[2]
    assert all(len(set(row)) <= 2 for row in (ids // 4).tolist())


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "gpt_oss"])
def test_very_negative_logits_change_nothing(model_type) -> None:
    router = make_router(model_type)
    spec = lookup(router)[0]
    plain = spec.route(router, states(), ())
    shifted = spec.choose(router, plain.logits_TE - 50, states(), ())
    top = plain.logits_TE.sort(-1, descending=True).values
    rows = top[:, 1] - top[:, 2] > 1e-5
    assert torch.equal(plain.ids_TK[rows], shifted.ids_TK[rows])
    assert_close(shifted.weights_TK[rows], plain.weights_TK[rows], 1e-5)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "olmoe", "mixtral", "gpt_oss"])
def test_huge_logits_match_transformers(model_type) -> None:
    router = make_router(model_type)
    with torch.no_grad():
        router.weight.mul_(1e4)
    # Softmax underflows to exact zeros here: which zero is chosen is a tie.
    softmax_first = model_type != "gpt_oss"
    choice = (lambda logits: torch.softmax(logits, -1)) if softmax_first else None
    assert_router_parity(ours, router, states(), limit=WEIGHT_LIMIT, choice=choice)
    assert torch.isfinite(ours(router, states())[1]).all()


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_scaling_factor_enters_once(model_type) -> None:
    for factor in (2.5, 5.0):
        router = make_router(model_type, routed_scaling_factor=factor)
        weights = ours(router, states())[1]
        assert_close(weights.sum(-1), torch.full((64,), factor), 1e-6)


@pytest.mark.families("deepseek_v3")
def test_narrow_bias_band_keeps_its_precision() -> None:
    """Keep 256 biases within 0.25 apart; bf16 would collapse them to nine values."""
    router = make_router(
        "deepseek_v3", torch.bfloat16,
        n_routed_experts=256, num_experts_per_tok=8, n_group=1, topk_group=1,
    )  # fmt: skip
    with torch.no_grad():
        router.weight.mul_(0.02 / 0.5)
        router.e_score_correction_bias.uniform_(6.817, 7.063)
    x = states(dtype=torch.bfloat16)
    ids = ours(router, x)[2]
    assert_same_choice(ids, theirs(router, x)[2])
    router.e_score_correction_bias.copy_(router.e_score_correction_bias.bfloat16())
    changed = (ours(router, x)[2].sort(-1).values != ids.sort(-1).values).any(-1)
    assert changed.sum() > 32, "the check has no power"


def test_gpt_oss_router_bias_acts() -> None:
    router = make_router("gpt_oss")
    with torch.no_grad():
        router.bias[3] = 20.0
    _, weights, ids = ours(router, states())
    assert (ids == 3).any(-1).all()
    assert_close(weights.sum(-1), torch.ones(64), 1e-6)
    assert_router_parity(ours, router, states(), limit=WEIGHT_LIMIT)


def test_each_model_type_gets_its_routing_function() -> None:
    chosen = {t: s.routing.__name__ for s in families() if s.routing for t in s.model_types}
    expected = {
        "qwen2_moe": "softmax_topk", "qwen3_moe": "softmax_topk", "olmoe": "softmax_topk",
        "mixtral": "softmax_topk", "gpt_oss": "topk_softmax", "deepseek_v3": "sigmoid_topk",
        "glm4_moe": "sigmoid_topk", "minimax_m2": "sigmoid_topk",
    }  # fmt: skip
    assert {k: chosen[k] for k in expected} == expected
