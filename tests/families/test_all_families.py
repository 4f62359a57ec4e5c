"""Every recipe against transformers, by the parity run of scripts/parity.py."""

from __future__ import annotations

import collections

import pytest

from moe_patch import supported_model_types
from tests.support import tiny_models
from tests.support.all_families import check
from tests.support.tiny_recipes import FAMILIES

# Families without a 3-D expert parameter: experts are embeddings, or one module each.
# DBRX has matrices; transformers reads their holder past PEFT's wrapper, so PEFT alone fails too.
NO_EXPERT_LORA = {"dbrx", "doge", "nllb_moe", "switch_transformers", "vitpose_backbone"}

VARIANTS = [
    # The other branch of a router's own switch.
    ("deepseek_v2", {"topk_method": "greedy"}),
    ("axk2", {"n_group": None, "topk_group": None}),
    ("lfm2_moe", {"use_expert_bias": False}),
    ("laguna", {"moe_router_logit_softcapping": 2.0}),
    ("qwen3_moe", {"norm_topk_prob": False}),
    ("lara_mini", {"norm_topk_prob": False}),
    ("mistral4", {"norm_topk_prob": False}),
    ("flint", {"norm_topk_prob": False}),
    ("kolibri1", {"norm_topk_prob": True}),
    # Clamps that take effect at inputs of size one.
    ("glm5_next", {"swiglu_limit": 0.5}),
    ("hy_v4", {"swiglu_limit": 0.5}),
    ("minimax_m3_vl", {"swiglu_limit": 0.5}),
    ("gpt_oss", {"swiglu_limit": 0.5}),
    # A single group, and many groups.
    ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    ("mistral4", {"n_group": 4, "topk_group": 2}),
    # Code left to transformers: another latent width, fp32 addition, no shared expert.
    ("nemotron_h", {"moe_latent_size": 24}),
    ("hy_v3", {"enable_moe_fp32_combine": True}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0}),
    # Training noise, which both models draw alike.
    ("mixtral", {"router_jitter_noise": 0.2}),
    ("minimax", {"router_jitter_noise": 0.2}),
    ("minimax_m2", {"router_jitter_noise": 0.2}),
]


# One family of each layout, of each activation and of each way to call the experts.
UNKNOWN = (
    "aria", "axk1", "beam", "deepseek_v4", "gemma4", "glm5_next", "gpt_oss", "inkling2",
    "lfm2_moe", "minimax_m3_vl", "muse_spark", "nemotron_h", "openai_privacy_filter", "qwen2_moe",
    "qwen3_moe",
)  # fmt: skip


@pytest.mark.every_release
@pytest.mark.parametrize("name", tiny_models.runnable())
def test_recipe(name):
    result = check(name)
    assert not result.problem, result.problem
    assert (result.lora != "both orders") == (name in {*NO_EXPERT_LORA, *tiny_models.absent()})


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        pytest.param(name, over, marks=pytest.mark.families(*tiny_models.needs(name, over)))
        for name, over in VARIANTS
    ],
)
def test_variant(name, overrides):
    result = check(name, **overrides)
    assert not result.problem, result.problem


@pytest.mark.parametrize("name", UNKNOWN)
def test_unregistered_family_reaches_tier_experts(name, monkeypatch):
    """Patch an unregistered family at tier experts: its own router, our experts and LoRA."""
    monkeypatch.setattr("moe_patch.families._BY_CLASS", {})
    result = check(name)
    assert not result.problem, result.problem
    assert result.tier == "experts"
    assert result.lora == "both orders"


def test_tiers_of_all_recipes():
    tiers = supported_model_types()
    here = tiny_models.runnable()
    counts = collections.Counter(tiers[tiny_models.config(name).model_type] for name in here)
    assert len(FAMILIES) == 81
    assert counts["refused"] <= 6 + len(tiny_models.absent() & {*here})
    if here == tuple(FAMILIES):
        assert counts["full"] >= 60
        assert counts["full"] + counts["experts"] >= 74
