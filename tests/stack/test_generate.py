"""generate on a patched model: tokens of the unpatched model, and unchanged settings.

Greedy decoding under each experts implementation is in tests/patching/test_wrappers.py.
"""

from __future__ import annotations

import pytest
import torch
from transformers.generation import CompileConfig

import moe_patch.runtime.experts
from moe_patch import patch_model, unpatch_model
from tests.support import tiny_models
from tests.support.snapshots import experts_setting

FAMILIES = ["qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss"]
WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beam": {"do_sample": False, "num_beams": 3},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "no cache": {"do_sample": False, "use_cache": False},
}
NEW = 6


def generate(model, **options):
    torch.manual_seed(7)
    ids = tiny_models.inputs(model)["input_ids"]
    return model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_equal_the_unpatched_models(name, way, monkeypatch):
    # With router logits transformers' auxiliary loss cannot read a static cache's mask.
    over = {} if name == "deepseek_v3" else {"output_router_logits": False}
    model = tiny_models.build(name, **over).eval()
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    options = WAYS[way] | {"disable_compile": True}
    expected = generate(model, **options)
    setting = experts_setting(model)
    patch_model(model)
    rows, inner = [], moe_patch.runtime.experts.experts_mlp

    def count(x_TD, *args, **kwargs):
        rows.append(x_TD.shape[0])
        return inner(x_TD, *args, **kwargs)

    monkeypatch.setattr(moe_patch.runtime.experts, "experts_mlp", count)
    assert torch.equal(generate(model, **options), expected)
    beams = options.get("num_beams", 1)
    assert len(rows) == 2 * NEW, "some steps were not ours"
    if way != "no cache":
        assert rows[2:] == [2 * beams] * (2 * (NEW - 1))
    assert experts_setting(model) == setting
    experts = [block.experts for _, block in tiny_models.blocks(model)]
    assert {e.config._experts_implementation for e in experts} == {"moe_patch"}
    unpatch_model(model)
    assert experts_setting(model) == setting
    assert torch.equal(generate(model, **options), expected)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_compiled_decoding(name):
    """Compile the whole decode step if the cache is static."""
    torch._dynamo.reset()
    model = tiny_models.build(name, output_router_logits=False).eval()
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    expected = generate(model, **WAYS["static cache"], disable_compile=True)
    setting = experts_setting(model)
    patch_model(model)
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True  # transformers' own switch for tests without a GPU
    compiled = torch._dynamo.utils.counters["stats"]
    compiled.clear()
    assert torch.equal(generate(model, **WAYS["static cache"], compile_config=config), expected)
    assert compiled["unique_graphs"] >= 1
    assert experts_setting(model) == setting


def test_generation_inside_training():
    """Leave mode, gradients and the next step unchanged by evaluation between steps."""
    model = patch_model(tiny_models.build("qwen3_moe", output_router_logits=False))
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    batch = tiny_models.inputs(model)
    model(**batch).loss.backward()
    before = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    for context in (torch.no_grad, torch.inference_mode):
        model.eval()
        with context():
            generate(model, do_sample=False)
            model(**batch)
        model.train()
    model(**batch).loss.backward()
    for found, wanted in zip(model.parameters(), before, strict=True):
        assert torch.equal(found.grad, wanted)
