"""Models patched while their weights are on meta, offloaded, or placed by a device map.

accelerate.cpu_offload is in tests/patching/test_wrappers.py, hooks in
tests/patching/test_lifecycle.py.
"""

from __future__ import annotations

import copy

import accelerate
import pytest
import torch

import moe_patch.patching.report
from moe_patch import patch_model, patch_report, unpatch_model
from moe_patch.ops.backend import BackendChoice
from tests.support import tiny_models
from tests.support.numerics import assert_bits
from tests.support.snapshots import logits

FAMILIES = ["qwen2_moe", "gpt_oss", "deepseek_v3"]


@pytest.fixture(params=FAMILIES)
def trained(request):
    return tiny_models.build(request.param)


def on_meta(model):
    """Return the same architecture without storage, as transformers builds it before loading."""
    with torch.device("meta"):
        empty = type(model)(copy.deepcopy(model.config))
    empty.set_experts_implementation("eager")
    return empty.train(model.training)


def test_patch_on_meta_then_load(trained):
    batch = tiny_models.inputs(trained)
    expected = logits(patch_model(copy.deepcopy(trained)), batch)
    empty = on_meta(trained)
    patch_model(empty)
    assert all(p.is_meta for p in empty.parameters())
    assert {(r.tier, r.self_check) for r in patch_report(empty)} == {
        ("full", "skipped: meta weights")
    }
    empty.load_state_dict(trained.state_dict(), assign=True)
    with torch.no_grad():
        for (name, _), source in zip(empty.named_buffers(), trained.buffers(), strict=True):
            owner, _, key = name.rpartition(".")
            empty.get_submodule(owner)._buffers[key] = source.clone()
    assert_bits(logits(empty, batch), expected)
    unpatch_model(empty)
    assert_bits(logits(empty, batch), logits(trained, batch))


def test_patch_on_meta_then_to_empty(trained):
    """FSDP's deferred initialisation: storage first, values later."""
    empty = patch_model(on_meta(trained))
    empty.to_empty(device="cpu")
    with torch.no_grad():
        for mine, theirs in zip(
            [*empty.parameters(), *empty.buffers()],
            [*trained.parameters(), *trained.buffers()],
            strict=True,
        ):
            mine.copy_(theirs)
    batch = tiny_models.inputs(trained)
    assert_bits(logits(empty, batch), logits(patch_model(trained), batch))


@pytest.mark.parametrize("order", ["patch first", "dispatch first"])
def test_layers_on_disk_and_cpu(trained, order, tmp_path):
    """Use a device map whose second layer is on disk and is loaded for each call."""
    batch = tiny_models.inputs(trained)
    expected = logits(patch_model(copy.deepcopy(trained)), batch)
    plain = logits(trained, batch)
    if order == "patch first":
        patch_model(trained)
    placed = {name: "cpu" for name, _ in trained.model.named_children() if name != "layers"}
    device_map = {f"model.{name}": device for name, device in placed.items()}
    device_map |= {"lm_head": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    accelerate.dispatch_model(
        trained, device_map, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True
    )
    patch_model(trained)
    assert all(p.is_meta for p in trained.model.layers[1].parameters())
    assert {row.tier for row in patch_report(trained)} == {"full"}
    assert_bits(logits(trained, batch), expected)
    unpatch_model(trained)
    assert_bits(logits(trained, batch), plain)


def test_weights_of_no_size_are_not_read_when_patched(monkeypatch):
    """Never read the empty tensor that ZeRO-3 leaves in place of a partitioned parameter."""
    model = tiny_models.build("qwen3_moe")
    held = {}
    for name, p in model.named_parameters():
        held[name] = p.data
        p.ds_id, p.ds_shape = len(held), p.shape
        p.data = torch.empty(0)
    patch_model(model)
    assert {row.self_check for row in patch_report(model)} == {
        "skipped: ZeRO-3 partitioned weights"
    }
    with monkeypatch.context() as on_a_card:
        choice = BackendChoice("triton", "")
        on_a_card.setattr(moe_patch.patching.report, "choose_backend", lambda *_: choice)
        assert {row.router_backend for row in patch_report(model)} == {"triton"}
    for name, p in model.named_parameters():
        p.data = held[name]
    batch = tiny_models.inputs(model)
    out = logits(model, batch)
    assert_bits(out, logits(patch_model(tiny_models.build("qwen3_moe")), batch))


@pytest.mark.parametrize("which", ["gate_up_proj", "down_proj", ""])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "qwen2_moe", "longcat_flash"])
def test_weights_of_no_size_are_not_read_whoever_partitioned_them(model_type, which):
    """Never read empty weights without ZeRO-3's marks, whoever partitioned them."""
    model = tiny_models.build(model_type)
    held = {n: p.data for n, p in model.named_parameters() if "experts" in n and which in n}
    for name in held:
        model.get_parameter(name).data = torch.empty(0)
    patch_model(model)
    assert all("empty weights" in row.self_check for row in patch_report(model))
    for name, data in held.items():
        model.get_parameter(name).data = data
    batch = tiny_models.inputs(model)
    assert_bits(logits(model, batch), logits(patch_model(tiny_models.build(model_type)), batch))


def test_from_pretrained_with_a_device_map(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    loaded = type(trained).from_pretrained(
        tmp_path, device_map="cpu", dtype=torch.float32, attn_implementation="eager"
    )
    batch = tiny_models.inputs(trained)
    assert_bits(logits(patch_model(loaded), batch), logits(patch_model(trained), batch))
