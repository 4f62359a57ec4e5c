"""FLOPs that torch's FlopCounterMode counts of the operators, against counts by hand.

Mutants that fail here:

- LoRA is left out, or the gradient of a factor;
- backward is counted as forward;
- gradients of frozen weights are counted;
- the products of a recompute are left out;
- packed weights are counted by the shapes of their bytes;
- an overload has no formula.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from moe_patch import patch_model
from moe_patch.ops.experts.composed import grouped_linear
from moe_patch.ops.experts.definition import build_plan
from moe_patch.ops.experts.flops import experts_bwd_flops, register_flop_formulas
from moe_patch.ops.experts.op import experts_mlp
from moe_patch.ops.experts.schema import encode_options
from moe_patch.types import ExpertsNeeds, ExpertWeights, Glu
from tests.support import tiny_models
from tests.support.adapters import EXPERTS, adapted_pair
from tests.support.experts_cases import FULL, Case, D, E, F, K, R, arguments, make_inputs, ours
from tests.support.numerics import probe
from tests.support.quant_cases import packed_like

N = Case().T * K
UP, DOWN = D * 2 * F, F * D  # multiplications per row
A13, B13, A2, B2 = R * D, 2 * F * R, R * F, D * R
FACTORS = A13 + B13 + A2 + B2
BOTH = replace(FULL, bias=False)
PACKETS = torch.ops.moe_patch.experts, torch.ops.moe_patch.experts_bwd


@pytest.fixture(autouse=True)
def formulas() -> None:
    register_flop_formulas()


def count(call: Any) -> dict[str, int]:
    """Return the FLOPs by operator."""
    with FlopCounterMode(display=False) as counter:
        call()
    return {str(op): n for op, n in counter.get_flop_counts().get("Global", {}).items()}


def both_ways(case: Case, *names: str, **kwargs: Any) -> tuple[int, int]:
    """Return the FLOPs of (forward, backward) with gradients for the named inputs."""
    t = {name: value.detach() for name, value in make_inputs(case).items()}
    for name in names:
        t[name].requires_grad_()
    found = count(lambda: probe(ours(case, t, **kwargs)).backward())
    assert set(found) == {str(p) for p in PACKETS}
    forward, backward = (found[str(p)] for p in PACKETS)
    return forward, backward


# --- the operator ---------------------------------------------------------------------------------


def test_a_gated_mlp_takes_6_and_12_ndf() -> None:
    every = "x", "weights", "w13", "w2"
    assert both_ways(Case(), *every) == (6 * N * D * F, 12 * N * D * F)
    assert both_ways(replace(Case(), transposed=True), *every) == (6 * N * D * F, 12 * N * D * F)
    assert both_ways(replace(Case(), gated=False), *every) == (4 * N * D * F, 8 * N * D * F)


def test_empty_slots_count_by_the_shapes() -> None:
    case = replace(Case(), ids="empty slots")
    assert both_ways(case, "x", "weights", "w13", "w2")[0] == 6 * N * D * F
    assert both_ways(replace(case, T=0), "x", "weights", "w13", "w2") == (0, 0)


@pytest.mark.parametrize(
    ("names", "multiplications"),
    [
        # Frozen experts under adapters: no outer sums of the weights.
        (("x", "weights", "a13", "lb13", "a2", "lb2"), DOWN + UP + 2 * FACTORS),
        # The first layer of a frozen trunk: no gradient of x either.
        (("weights", "a13", "lb13", "a2", "lb2"), DOWN + A13 + 2 * B13 + 2 * (A2 + B2)),
        # Full fine-tuning with frozen factors.
        (("x", "weights", "w13", "w2"), 2 * (DOWN + UP) + FACTORS),
        (("x",), DOWN + UP + FACTORS),
        (("weights",), DOWN + A2 + B2),
        (("w13",), DOWN + A2 + B2 + UP),
        (("w2",), DOWN),
        (("a2",), B2 + A2),
        (("lb2",), B2),
        (("lb13",), DOWN + A2 + B2 + B13),
    ],
    ids=lambda v: "+".join(v) if isinstance(v, tuple) else "",
)
def test_backward_follows_which_gradients_are_needed(names, multiplications) -> None:
    forward, backward = both_ways(BOTH, *names)
    assert forward == 2 * N * (UP + DOWN + FACTORS)
    assert backward == 2 * N * multiplications


@pytest.mark.parametrize(
    ("factors", "more"), [("lora13", A13 + B13), ("lora2", A2 + B2)], ids=["up", "down"]
)
def test_one_pair_of_factors(factors, more) -> None:
    every = [name for name in make_inputs(replace(Case(), **{factors: True})) if name != "ids"]
    forward, backward = both_ways(replace(Case(), **{factors: True}), *every)
    assert forward == 6 * N * D * F + 2 * N * more
    assert backward == 12 * N * D * F + 4 * N * more


def test_what_recompute_runs_again_counts_again() -> None:
    names = "x", "weights", "a13", "lb13", "a2", "lb2"
    kept, again = both_ways(BOTH, *names), both_ways(BOTH, *names, recompute=True)
    assert again[0] == kept[0]
    assert again[1] - kept[1] == 2 * N * (UP + A13 + B13 + A2)
    assert both_ways(BOTH, "w2", recompute=True)[1] == 2 * N * (DOWN + UP + A13 + B13)


def test_checkpointing_counts_forward_twice() -> None:
    t = make_inputs(Case())
    found = count(
        lambda: probe(checkpoint(lambda: ours(Case(), t), use_reentrant=False)).backward()
    )
    assert found == {str(PACKETS[0]): 12 * N * D * F, str(PACKETS[1]): 12 * N * D * F}


def test_without_gradients() -> None:
    t = make_inputs(BOTH)
    with torch.no_grad():
        found = count(lambda: ours(BOTH, t))
    assert found == {str(PACKETS[0]): 2 * N * (UP + DOWN + FACTORS)}


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("storage", ["nf4", "fp8", "mxfp4"])
def test_packed_weights_count_by_their_logical_shapes(storage, transposed) -> None:
    """Count packed weights by logical shapes; by those of the bytes, nf4 and mxfp4 give half."""
    wide, width, rows = 128, 64, 6
    x, ids = torch.randn(3, wide, requires_grad=True), torch.tensor([[0, 1], [1, 2], [2, 0]])
    stored = [torch.randn(E, 2 * width, wide), torch.randn(E, wide, width)]
    w13, w2 = (packed_like(w.mT.contiguous() if transposed else w, storage) for w in stored)
    if transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    weights = torch.rand(3, 2)
    w = ExpertWeights(w13, w2)

    def call() -> torch.Tensor:
        return experts_mlp(x, ids, weights, w, Glu("silu"), backend="torch")

    products = rows * wide * width
    found = count(lambda: call().sum().backward())
    assert found == {str(PACKETS[0]): 6 * products, str(PACKETS[1]): 6 * products}
    with torch.no_grad():
        assert count(call) == {str(PACKETS[0]): 6 * products}


def test_norms_of_adapters_take_the_factors_products() -> None:
    """Count p, q and both inputs of the factors B for a recorded row norm on the Triton backend."""
    t = make_inputs(BOTH)
    x, ids, weights, w, glu, lora13, lora2 = arguments(BOTH, t)
    encoded = encode_options(glu, "triton", False, "")
    factors = *lora13[:2], *lora2[:2]
    operands = *w, *factors, 1.0, 1.0, 1.0, 1.0, encoded
    empty, h = x.new_empty(0), x.new_empty(N, 2 * F)
    plan = build_plan(ids, E)
    needs = list(ExpertsNeeds(norms=True))
    found = experts_bwd_flops(x, x, weights, *operands, *plan, h, empty, empty, needs, [])
    assert found == 2 * N * (DOWN + A2 + B2 + B13 + A13 + A2)


def test_the_counts_are_what_the_torch_backend_multiplies(monkeypatch) -> None:
    """Count composed steps by their products, which the counter sees without the operator."""
    monkeypatch.setattr("moe_patch.ops.experts.autograd.is_plain_eager", lambda tensors: True)
    t = make_inputs(BOTH)
    seen = count(lambda: probe(ours(BOTH, t)).backward())
    assert seen == {"aten.mm": 2 * N * (3 * (UP + DOWN) + 3 * FACTORS)}


# --- composed steps -------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
def test_grouped_products_of_composed_blocks(lora) -> None:
    t = make_inputs(BOTH)
    _, ids, _, w, _, factors, _ = arguments(BOTH, t)
    factors, plan = factors if lora else None, build_plan(ids, E)
    rows = torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    found = count(lambda: grouped_linear(rows, w.w13_EHD, plan, None, factors).sum().backward())
    low = A13 + B13 if lora else 0
    assert found == {
        "moe_patch_steps.linear": 2 * N * (UP + low),
        # The gradient of B recomputes its input A x.
        "moe_patch_steps.linear_bwd": 2 * N * (2 * UP + 2 * low + (A13 if lora else 0)),
    }
    frozen = w.w13_EHD.detach()
    found = count(lambda: grouped_linear(rows, frozen, plan).sum().backward())
    assert found == {
        "moe_patch_steps.linear": 2 * N * UP,
        "moe_patch_steps.linear_bwd": 2 * N * UP,
    }


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "dbrx", "nemotron_h"])
def test_a_patched_model_counts_what_its_eager_experts_count(name) -> None:
    """Count as many FLOPs as transformers' eager experts: plain products of T * K rows."""
    model = tiny_models.build(name)
    batch = tiny_models.inputs(model)
    patched = patch_model(copy.deepcopy(model), self_check=False)
    theirs, mine = (
        count(lambda m=m: tiny_models.loss(m(**batch)).backward()) for m in (model, patched)
    )
    assert sum(mine.values()) == sum(theirs.values())


def test_adapters_on_a_model() -> None:
    """Two layers of 2 x 7 tokens with 2 of 8 experts, D = 32, F = 16, frozen under rank 3."""
    pair = adapted_pair("qwen3_moe", parameters=EXPERTS, order="peft first", r=3)
    rows, layers = 2 * pair.batch["input_ids"].numel(), 2
    found = count(lambda: pair.ours(**pair.batch).loss.backward())
    low = 3 * (32 + 2 * 16) + 3 * (16 + 32)
    assert found[str(PACKETS[0])] == layers * rows * (6 * 32 * 16 + 2 * low)
    # Nothing below the first layer's experts is trained, so that no gradient of x is computed.
    first = 2 * (32 * 2 * 16 + 3 * 32)
    assert found[str(PACKETS[1])] == rows * (layers * (6 * 32 * 16 + 4 * low) - first)


@pytest.mark.parametrize("way", ["patch_model", "pickle"])
def test_patching_and_loading_register_the_formulas(way, monkeypatch) -> None:
    model = tiny_models.build("qwen3_moe")
    saved = pickle.dumps(patch_model(copy.deepcopy(model), self_check=False))
    for packet in PACKETS:
        monkeypatch.delitem(flop_registry, packet)
    one = patch_model(model, self_check=False) if way == "patch_model" else pickle.loads(saved)
    found = count(lambda: one(**tiny_models.inputs(model)))
    assert found[str(PACKETS[0])] == 2 * 28 * 6 * 32 * 16


def test_a_formula_that_a_user_registered_first_stays(monkeypatch) -> None:
    monkeypatch.setitem(flop_registry, PACKETS[0], lambda *args, out_val=None: 7)
    register_flop_formulas()
    assert count(lambda: ours(Case(), make_inputs(Case())))[str(PACKETS[0])] == 7
