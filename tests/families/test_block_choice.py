"""Families whose router only makes logits and whose block chooses, as before transformers 5.13."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn

from moe_patch import (
    FamilySpec,
    UnsupportedModelError,
    families,
    lora_targets,
    patch_model,
    patch_report,
    register_family,
    unpatch_model,
)
from moe_patch.cli import inspect
from moe_patch.cli.models import perturb
from moe_patch.families import lookup
from moe_patch.ops.backend import BackendChoice
from moe_patch.ops.routing import sigmoid_topk
from moe_patch.patching.discover import discover
from moe_patch.runtime.spec import Const
from moe_patch.tools import warmup
from tests.support import tiny_models
from tests.support.numerics import FP32, assert_close, assert_same_choice, dense_weights
from tests.support.snapshots import assert_unchanged, snapshot
from tests.support.toy_family import ToyConfig, ToyExperts
from tests.support.trace import assert_tier, executed

pytestmark = pytest.mark.versions
OLD = sorted(tiny_models.block_chosen())


class LogitsOnly(nn.Module):
    """A router that returns logits and chooses nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8) * 0.5)
        self.register_buffer("bias", torch.linspace(-0.3, 0.3, 4))

    def forward(self, hidden_states):
        return nn.functional.linear(hidden_states.reshape(-1, 8), self.weight)


class ChoosingBlock(nn.Module):
    """Choose the best two by sigmoid score plus bias, weighted by score alone."""

    def __init__(self, config) -> None:
        super().__init__()
        self.chosen, self.scale = 2, 1.5
        self.gate, self.experts = LogitsOnly(), ToyExperts(config, 4, 8, 6)

    def route_tokens_to_experts(self, router_logits):
        scores = router_logits.sigmoid()
        ids = (scores + self.gate.bias).topk(self.chosen, sorted=False)[1]
        return ids, scores.gather(1, ids) * self.scale

    def forward(self, hidden_states):
        ids, weights = self.route_tokens_to_experts(self.gate(hidden_states))
        return self.experts(hidden_states.reshape(-1, 8), ids, weights).view(hidden_states.shape)


class ChoosingModel(nn.Module):
    """A model of one block that chooses, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.config = ToyConfig(experts_implementation="eager")
        self.layers = nn.ModuleList([ChoosingBlock(self.config)])

    def forward(self, x):
        return transformers.utils.ModelOutput(logits=x + self.layers[0](x))


ENTRY = {
    "model_types": ("toy_moe",),
    "block": "ChoosingBlock",
    "experts": "ToyExperts",
    "routing": sigmoid_topk,
    "params": {"top_k": "chosen", "renormalize": Const(False), "scale": "scale"},
    "bias": "gate.bias",
    "block_slot": "route_tokens_to_experts",
}


@pytest.fixture
def registry(monkeypatch):
    """Restore the registered entries after each test."""
    monkeypatch.setattr(families, "_FAMILIES", list(families._FAMILIES))
    by_class = {name: list(entries) for name, entries in families._BY_CLASS.items()}
    monkeypatch.setattr(families, "_BY_CLASS", by_class)


def test_a_block_that_chooses_is_patched_in_its_method(registry):
    register_family(FamilySpec(**ENTRY))
    torch.manual_seed(0)
    reference = ChoosingModel()
    model, x = copy.deepcopy(reference), torch.randn(2, 5, 8)
    before = snapshot(model)
    patch_model(model)
    (row,) = patch_report(model)
    assert (row.tier, row.router, row.self_check) == ("full", "sigmoid_topk", "passed")
    ran = executed(lambda: model(x).logits.square().mean().backward())
    assert_tier("full", model, ran)
    reference(x).logits.square().mean().backward()
    assert_close(model(x).logits, reference(x).logits, FP32)
    for (name, theirs), ours in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, FP32, name)
    unpatch_model(model)
    model.zero_grad()
    assert_unchanged(before, snapshot(model))
    assert_tier("refused", model, executed(lambda: model(x)))


def test_tools_read_what_a_block_chooses_by(registry, monkeypatch):
    """Sizes for inspect, the choice that warmup compiles, values that make a comparison see it."""
    register_family(FamilySpec(**ENTRY))
    model = patch_model(ChoosingModel())
    (found,) = discover(model)
    assert found.choosers == [(model.layers[0], found.spec)]
    assert inspect.block_sizes(found)["top_k"] == 2
    choice = BackendChoice("triton", "for this test")
    monkeypatch.setattr(warmup, "choose_backend", lambda *_: choice)
    (row,) = warmup.warmup(model, [3], progress=False)
    assert (row.tokens, row.skipped) == ([3], "")
    assert warmup._route(found, 3).ids_TK.shape == (3, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    perturb(model, seed=1)
    changed = {name for name, value in model.state_dict().items() if (value != before[name]).any()}
    assert {"layers.0.gate.weight", "layers.0.gate.bias"} <= changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": "gate.correction"}, r"no attribute 'gate\.correction'"),
        ({"params": ENTRY["params"] | {"top_k": "top_k"}}, "no attribute 'top_k'"),
        ({"bias": None}, "self-check: block output 0 differs"),
        ({"params": ENTRY["params"] | {"scale": Const(1.0)}}, "self-check: block output 0 differs"),
    ],
)
def test_a_wrong_entry_is_refused(change, message, registry):
    register_family(FamilySpec(**ENTRY | change))
    torch.manual_seed(0)
    with pytest.raises(UnsupportedModelError, match=message):
        patch_model(ChoosingModel())


def test_no_router_adapter_where_the_block_reads_the_routers_bias(registry):
    """Target the router's weight only without a bias, which PEFT's wrapper does not expose."""
    register_family(FamilySpec(**ENTRY))
    assert lora_targets(ChoosingModel())["target_parameters"] == [
        "0.experts.down_proj",
        "0.experts.gate_up_proj",
    ]
    register_family(FamilySpec(**ENTRY | {"bias": None}))
    assert "0.gate.weight" in lora_targets(ChoosingModel())["target_parameters"]


def test_both_forms_of_a_family_meet_at_one_release():
    """Exactly one entry applies to a class in every release."""
    import moe_patch.families.deepseek as deepseek

    forms = [s for s in deepseek.FAMILIES if s.model_types[0] == "deepseek_v3"]
    assert [(s.since, s.until, s.chooses_in_block) for s in forms] == [
        ("5.13", "", False),
        ("", "5.13", True),
    ]
    registered = [s for s in families.families() if "deepseek_v3" in s.model_types]
    assert len(registered) == 1


@pytest.mark.parametrize("name", OLD)
def test_the_choice_is_that_of_the_class(name):
    """Choice of experts and weights from random logits, with a bias if there is one."""
    model = patch_model(tiny_models.build(name))
    block = tiny_models.blocks(model)[0][1]
    assert lookup(block)[0].chooses_in_block
    torch.manual_seed(3)
    if hasattr(block.gate, "e_score_correction_bias"):
        block.gate.e_score_correction_bias.uniform_(-0.3, 0.3)
    E = block.experts.num_experts
    logits = torch.randn(1, 64, E)
    if name not in ("deepseek_v2_greedy", "deepseek_v2", "deepseek_ocr2"):
        logits = logits[0]
    ids, weights = block.route_tokens_to_experts(logits)
    ref_ids, ref_weights = type(block).route_tokens_to_experts(block, logits)
    assert_same_choice(ids, ref_ids)
    dense = [dense_weights(i, w, E) for i, w in ((ids, weights), (ref_ids, ref_weights))]
    assert_close(*dense, 1e-6)
