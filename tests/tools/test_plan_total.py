"""The sum of a plan's parts, the search for what fits, and whole runs that were measured."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_patch import lora_targets
from moe_patch.cli.plan_sizes import read_sizes
from moe_patch.tools import plan_memory as parts
from moe_patch.tools.plan_total import candidates, first_fitting, make_plan, most_tokens
from moe_patch.tools.plan_types import Recipe
from tests.support import tiny_models

WIDE = {"hidden_size": 64, "moe_intermediate_size": 64}
GIB = 2**30


def sizes_of(model):
    return read_sizes(model, lora_targets(model))


@pytest.fixture(scope="module")
def sizes():
    return sizes_of(tiny_models.build("qwen3_moe", torch.bfloat16, **WIDE, vocab_size=4096))


def test_the_peak_is_a_moment_that_holds_its_parts(sizes):
    plan = make_plan(sizes, Recipe(tokens=512))
    part = plan.parts
    there = sum(plan.weights.values()) + part["adapters"] + part["optimizer"]
    inputs = 512 * sizes.hidden * 2
    assert part["kept"] == (len(sizes.layers) + 1) * inputs + 512 * 4 * (sizes.hidden + 1)
    assert plan.moments == {
        "loss": there + part["kept"] + part["logits_peak"],
        "first backward": there + part["kept"] + part["one_layer"] + part["block_peak"],
        "last backward": there
        + part["gradients"]
        + inputs
        + part["one_layer"]
        + part["block_peak"],
        "step": there + part["gradients"],
    }
    assert plan.allocated == max(plan.moments.values())
    assert plan.needed > plan.allocated + parts.CONTEXT


CHANGES = [
    # (option, the part that it changes, whether it lowers it)
    ({"tokens": 1024}, "kept", False),
    ({"checkpointing": False}, "kept", False),
    ({"liger": True}, "logits_peak", True),
    ({"recompute": True}, "one_layer", True),
    ({"recompute": True}, "block_peak", False),
    ({"chunk": 64}, "block_peak", True),
    ({"adapters": "bf16"}, "block_peak", True),
    ({"optimizer": "adamw_8bit"}, "optimizer", True),
    ({"rank": 4}, "gradients", True),
    ({"adapters": "bf16"}, "adapters", True),
    ({"storage": "nf4"}, "decode_buffer", False),
    ({"storage": "nf4", "ranks": 2, "ddp": True}, "ddp_buckets", False),
    ({"storage": "nf4", "ranks": 2}, "gathered_layers", False),
    ({"ranks": 2}, "gathered_layers", False),
    ({"ranks": 2}, "optimizer", True),
    ({"full": True}, "adapters", True),
]


@pytest.mark.parametrize(("change", "part", "lower"), CHANGES, ids=str)
def test_each_option_reaches_its_part(sizes, change, part, lower):
    before = make_plan(sizes, Recipe(tokens=512)).parts[part]
    after = make_plan(sizes, replace(Recipe(tokens=512), **change)).parts[part]
    assert after < before if lower else after > before


@pytest.mark.families("gpt_oss")
def test_eager_attention_is_reserved_beside_the_logits():
    plan = make_plan(sizes_of(tiny_models.build("gpt_oss", torch.bfloat16)), Recipe(tokens=512))
    assert plan.cached == 3 * 2 * 4 * 512**2  # three T x T tensors of four heads
    peak = max(plan.allocated, plan.moments["loss"] + plan.cached)
    assert plan.reserved == int(peak * (1 + parts.FRAGMENTATION))
    assert plan.needed == plan.reserved + parts.CONTEXT


def test_gradients_of_earlier_forwards_are_there_during_the_loss(sizes):
    one, two = (make_plan(sizes, Recipe(accumulation=n)) for n in (1, 2))
    for moment in ("loss", "first backward"):
        assert two.moments[moment] - one.moments[moment] == one.parts["gradients"]


def test_the_most_tokens_fit_and_one_more_does_not(sizes):
    recipe = Recipe(storage="nf4")
    for tokens in range(3000, 3008):
        memory = make_plan(sizes, replace(recipe, tokens=tokens)).needed
        most = most_tokens(sizes, recipe, memory)
        assert make_plan(sizes, replace(recipe, tokens=most)).needed <= memory
        assert make_plan(sizes, replace(recipe, tokens=most + 1)).needed > memory
    assert most_tokens(sizes, recipe, parts.CONTEXT) == 0


def test_the_last_choice_is_given_up_last():
    tried = candidates(Recipe(), {"checkpointing": (False, True), "rank": (16, 8, 4)})
    found = [(one.checkpointing, one.rank) for one in tried]
    assert found == [(on, rank) for rank in (16, 8, 4) for on in (False, True)]


def test_liger_makes_the_gradient_of_a_trained_head_in_the_forward(sizes):
    frozen, trained = (
        parts.logits_bytes(sizes, Recipe(liger=True, full=full)) for full in (False, True)
    )
    assert trained - frozen == sizes.vocab * sizes.hidden * 2


def test_merged_weights_are_kept(sizes):
    layer = sizes.layers[-1]
    router = layer.moe.experts * sizes.hidden
    assert layer.merged == router
    plain = parts.kept_bytes(layer._replace(merged=0), Recipe(), 2)
    assert parts.kept_bytes(layer, Recipe(), 2) - plain == 2 * router


def test_what_gives_up_least_is_chosen(sizes):
    choices = {"checkpointing": (False, True), "rank": (16, 4)}
    order = [(False, 16), (True, 16), (False, 4), (True, 4)]
    for at, (checkpointing, rank) in enumerate(order):
        recipe = Recipe(checkpointing=checkpointing, rank=rank)
        memory = make_plan(sizes, recipe).needed
        found, _ = first_fitting(sizes, Recipe(), choices, memory)
        needs = [make_plan(sizes, Recipe(checkpointing=c, rank=r)).needed for c, r in order]
        first = next(i for i, n in enumerate(needs) if n <= memory)
        assert (found.checkpointing, found.rank) == order[first]
        assert first <= at
    found, least = first_fitting(sizes, Recipe(), choices, parts.CONTEXT)
    assert found is None
    assert make_plan(sizes, least).needed == min(needs)


ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "plan_memory.jsonl"


@pytest.mark.skipif(not ROWS.exists(), reason="benchmarks/ is not installed")
def test_rows_of_a_card_are_as_planned():
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    assert {row["model"] for row in rows} >= {"Qwen3-30B-A3B", "gpt-oss-20b", "gpt-oss-120b"}
    for row in rows:
        assert row["allocated_gib"] == pytest.approx(row["plan_gib"], rel=0.05), row


@pytest.mark.slow
@pytest.mark.families("gpt_oss", "glm4_moe")
@pytest.mark.skipif(not ROWS.exists(), reason="benchmarks/ is not installed")
def test_rows_of_a_card_are_as_planned_now(capsys, monkeypatch):
    """Plan every row again: the formula has changed since some were measured."""
    monkeypatch.syspath_prepend(ROWS.parents[1] / "studies")
    status = importlib.import_module("plan_check").main()
    assert capsys.readouterr().out.count("layers") == len(ROWS.read_text().splitlines())
    assert status == 0


QWEN3_30B = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip
FRUGAL = {"optimizer": "sgd", "liger": True, "adapters": "bf16"}
MEASURED = [
    # (tokens, rank, options, GiB at the peak of a step on an H200)
    (4096, 16, {}, 31.8),
    (2048, 16, FRUGAL, 19.6),
    (2048, 8, FRUGAL, 18.4),
    (16384, 16, FRUGAL | {"optimizer": "adamw_8bit", "offload": True}, 11.01),
]


@pytest.fixture(scope="module")
def qwen3_30b():
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**QWEN3_30B), dtype=torch.bfloat16)
    return sizes_of(model)


@pytest.mark.parametrize(("tokens", "rank", "options", "gib"), MEASURED)
def test_whole_runs_as_measured(qwen3_30b, tokens, rank, options, gib):
    recipe = Recipe(tokens, rank, "nf4", hopper=True, **options)
    assert make_plan(qwen3_30b, recipe).allocated / GIB == pytest.approx(gib, rel=0.02)
