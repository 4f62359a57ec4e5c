"""load_state_dict of a checkpoint's own names: every weight arrives, of every kind of family."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from safetensors.torch import load_file

from moe_patch import UnsupportedOptionError
from moe_patch.tools.checkpoint_loading import check_loaded, watch_loading, watching
from tests.support import tiny_models
from tests.support.numerics import assert_bits

# Single experts; a router by another name; renamed attention; conversions over pairs of layers; a
# transposition under the same name; merged weights beside experts.
FAMILIES = ("qwen3_moe", "mixtral", "nemotron_h", "inkling2", "qwen3_vl_moe", "hy_v4")


def saved(model, folder, **options):
    """The shards of a model, in order."""
    model.save_pretrained(folder, **options)
    return [load_file(file) for file in sorted(folder.glob("*.safetensors"))]


def other(model_type, **options):
    model = tiny_models.build(model_type, seed=5, **options)
    watch_loading(model)
    return model


def assert_same(found, expected):
    state = found.state_dict()
    for name, value in expected.state_dict().items():
        assert state[name].dtype == value.dtype
        assert_bits(state[name], value, name)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_weight_arrives_shard_by_shard(model_type, tmp_path):
    model, found = tiny_models.build(model_type), other(model_type)
    identities = {name: id(p) for name, p in found.named_parameters()}
    shards = saved(model, tmp_path, max_shard_size="20KB")
    assert len(shards) > 2
    for shard in shards:
        found.load_state_dict(shard, strict=False)
    check_loaded(found)
    assert_same(found, model)
    assert identities == {name: id(p) for name, p in found.named_parameters()}
    assert (watching(found).kept, watching(found).groups) == ({}, [])


def test_one_file_of_a_loaded_model_in_16_bits_with_nothing_missing(tmp_path):
    """from_pretrained keeps the conversions on the model, which come first."""
    model = tiny_models.build("mixtral", torch.bfloat16)
    model.save_pretrained(tmp_path / "first")
    model = type(model).from_pretrained(tmp_path / "first", dtype=torch.bfloat16)
    (state,) = saved(model, tmp_path / "second")
    found = type(model).from_pretrained(tmp_path / "first", dtype=torch.bfloat16)
    with torch.no_grad():
        for p in found.parameters():
            p.zero_()
    watch_loading(found)
    result = found.load_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_same(found, model)


def test_own_names_pass_as_they_are(tmp_path):
    """Pass the model's own names through, also beside unknown names."""
    model, found = tiny_models.build("qwen3_moe"), other("qwen3_moe")
    state = model.state_dict() | {"head.weight": torch.ones(1)}
    assert found.load_state_dict(state, strict=False).unexpected_keys == ["head.weight"]
    assert watching(found).twin is None
    assert_same(found, model)


def test_a_state_dict_below_a_prefix(tmp_path):
    model, found = tiny_models.build("qwen3_moe"), other("qwen3_moe")
    (state,) = saved(model, tmp_path)
    wrapper = torch.nn.ModuleDict({"module": found})
    wrapper.load_state_dict({f"module.{name}": value for name, value in state.items()})
    assert_same(found, model)


def test_a_missing_expert_is_named_and_the_next_load_is_whole(tmp_path):
    model, found = tiny_models.build("qwen3_moe"), other("qwen3_moe")
    before = found.model.layers[1].mlp.experts.down_proj.clone()
    (state,) = saved(model, tmp_path)
    missing = "model.layers.1.mlp.experts.3.down_proj.weight"
    found.load_state_dict({k: v for k, v in state.items() if k != missing}, strict=False)
    with pytest.raises(UnsupportedOptionError, match=rf"{missing} is missing \(first of 1\)"):
        check_loaded(found)
    assert_bits(found.model.layers[1].mlp.experts.down_proj, before)
    check_loaded(found)
    found.load_state_dict(state, strict=False)
    assert_same(found, model)


def test_experts_of_another_size_are_refused(tmp_path):
    (state,) = saved(tiny_models.build("qwen3_moe", moe_intermediate_size=24), tmp_path)
    with pytest.raises(UnsupportedOptionError, match="down_proj does not have the model's shape"):
        other("qwen3_moe").load_state_dict(state, strict=False)


@pytest.mark.families("deepseek_v4")
def test_a_tied_head_is_not_missed(tmp_path):
    """Accept a file without the head of a model with tied embeddings."""
    model = tiny_models.build("deepseek_v4", tie_word_embeddings=True)
    (state,) = saved(model, tmp_path)
    assert "head.weight" not in state
    found = other("deepseek_v4", tie_word_embeddings=True)
    found.load_state_dict(state, strict=False)
    check_loaded(found)
    assert_same(found, model)


def test_watching_twice_copies_and_pickles():
    found = other("qwen3_moe")
    watch_loading(found)
    assert len(found._load_state_dict_pre_hooks) == 1
    assert watching(copy.deepcopy(found)) is not None
    assert isinstance(pickle.loads(pickle.dumps(watching(found))), type(watching(found)))
    plain = torch.nn.Linear(1, 1)
    watch_loading(plain)
    assert watching(plain) is None
