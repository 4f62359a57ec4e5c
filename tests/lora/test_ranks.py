"""lora_targets with a budget: PEFT trains at most so many parameters, by the stated rule."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from moe_patch import lora_targets, patch_model, patch_report
from moe_patch.errors import UnsupportedOptionError
from tests.support import tiny_models

FAMILIES = [
    pytest.param(name, marks=pytest.mark.families(name))
    for name in ("qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral")
]


def trained_by(model: nn.Module, targets: dict) -> int:
    with torch.device("meta"):
        adapted = get_peft_model(model, LoraConfig(**targets))
    count = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    adapted.unload()
    return count


def ranks_of(targets: dict) -> dict[str, int]:
    names = [*targets["target_modules"], *targets["target_parameters"]]
    return {name: targets["rank_pattern"].get(name, targets["r"]) for name in names}


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_trains_at_most_the_budget(family):
    model = tiny_models.build(family)
    least = trained_by(model, {**lora_targets(model), "r": 1})
    for budget in (least, 3 * least, 10 * least):
        targets = lora_targets(model, budget=budget)
        count = trained_by(model, targets)
        assert count <= budget
        assert lora_targets(model, budget=count) == targets
    with pytest.raises(UnsupportedOptionError) as raised:
        lora_targets(model, budget=least - 1)
    assert f"accepted: {least:,} or more" in str(raised.value)


def test_experts_get_the_rank_over_the_active_experts():
    model = tiny_models.build("qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    least = trained_by(model, {**lora_targets(model), "r": 1})
    targets = lora_targets(model, budget=6 * least)
    ranks = ranks_of(targets)
    K = model.config.num_experts_per_tok
    assert K > 1
    whole = ranks["self_attn.q_proj"]
    (experts,) = {rank for name, rank in ranks.items() if ".experts." in name}
    assert 1 < experts < whole
    # Both are multiples of 8 at or below R and R / K, or small.
    assert abs(K * experts - whole) < 8 * K
    assert all(rank < 8 or rank % 8 == 0 for rank in ranks.values())
    assert ranks["mlp.gate.weight"] == min(whole, model.config.num_experts)
    assert targets["lora_alpha"] == 2 * targets["r"]
    assert targets["alpha_pattern"] == {n: 2 * r for n, r in targets["rank_pattern"].items()}


def test_parts_that_are_left_out_cost_nothing():
    model = tiny_models.build("qwen3_moe")
    parts = {"router": False, "shared": False, "attention": False}
    targets = lora_targets(model, **parts, budget=20_000)
    assert targets["rank_pattern"] == {}
    assert trained_by(model, targets) <= 20_000
    assert targets["r"] > ranks_of(lora_targets(model, budget=20_000))["mlp.experts.down_proj"]


def test_no_rank_exceeds_its_weight():
    model = tiny_models.build("qwen3_moe")
    ranks = ranks_of(lora_targets(model, budget=10**12))
    config = model.config
    assert ranks["mlp.gate.weight"] == min(config.num_experts, config.hidden_size)
    assert ranks["mlp.experts.down_proj"] == min(config.moe_intermediate_size, config.hidden_size)


def test_the_ranks_run_fused():
    model = tiny_models.build("qwen3_moe")
    targets = lora_targets(model, budget=30_000)
    assert len(set(ranks_of(targets).values())) > 1
    adapted = patch_model(get_peft_model(model, LoraConfig(**targets)), fuse_lora="require")
    assert {row.tier for row in patch_report(adapted)} == {"full"}
