"""Test the hash that distinguishes bases, and the errors for broken folders."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_patch import UnsupportedModelError, UnsupportedOptionError
from moe_patch.tools import base_identity
from moe_patch.tools.base_identity import (
    base_hash,
    check_base,
    find_base,
    known_base,
    note_base,
)
from tests.support import tiny_models


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folder with a model in one file and in shards, and a model with other weights."""
    root = tmp_path_factory.mktemp("bases")
    model = tiny_models.build("qwen3_moe")
    model.save_pretrained(root / "one")
    model.save_pretrained(root / "sharded", max_shard_size="20KB")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.mul_(1.5)
    model.save_pretrained(root / "trained")
    assert len(list((root / "sharded").glob("*.safetensors"))) > 2
    return root


@pytest.fixture
def adapter(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    return tmp_path / "adapter"


def change(base, folder, edit):
    """Copy a base's single file, with ``edit`` applied to its tensors."""
    folder.mkdir()
    tensors = load_file(base / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_shards_may_be_cut_in_another_way(bases):
    assert len(base_hash(bases / "one")) == 64
    assert base_hash(bases / "sharded") == base_hash(bases / "one")


def rename(tensors):
    tensors["lm_head.other"] = tensors.pop("lm_head.weight")


def reshape(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].flatten()


def cast(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].view(torch.int32)


@pytest.mark.parametrize("edit", [rename, reshape, cast])
def test_name_shape_and_dtype_are_in_the_hash(bases, tmp_path, edit):
    same = change(bases / "one", tmp_path / "same", lambda tensors: None)
    assert base_hash(same) == base_hash(bases / "one")
    assert base_hash(change(bases / "one", tmp_path / "other", edit)) != base_hash(same)


def test_values_of_every_kind_of_tensor_are_in_the_hash(bases, tmp_path):
    """The index cannot tell a fine-tuning from its base."""
    index = {name: (one.dtype, one.shape) for name, one in
             base_identity.read_header(bases / "one" / "model.safetensors").items()}  # fmt: skip
    trained = base_identity.read_header(bases / "trained" / "model.safetensors")
    assert index == {name: (one.dtype, one.shape) for name, one in trained.items()}
    assert base_hash(bases / "trained") != base_hash(bases / "one")
    kinds = {base_identity._NUMBER.sub("#", name): name for name in index}
    for number, name in enumerate(kinds.values()):

        def edit(tensors, name=name):
            tensors[name].add_(1)

        other = change(bases / "one", tmp_path / str(number), edit)
        assert base_hash(other) != base_hash(bases / "one"), name


def test_another_base_is_refused_and_the_own_one_passes(bases, adapter):
    check_base(adapter, bases / "trained")  # the adapter has no record yet
    note_base(adapter, known_base(bases / "one"))
    check_base(adapter, bases / "one")
    check_base(adapter, bases / "sharded")
    with pytest.raises(UnsupportedModelError, match=r"another base \(.*one\), not on .*trained"):
        check_base(adapter, bases / "trained")


def test_bases_that_cannot_be_known_pass(bases, adapter, tmp_path):
    (tmp_path / "empty").mkdir()
    assert known_base(tmp_path / "empty") is None
    assert known_base(None) is None
    note_base(adapter, known_base(bases / "one"))
    check_base(adapter, tmp_path / "empty")


def test_a_missing_shard_and_a_cut_file_are_one_sentence(bases, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    files = sorted((bases / "sharded").glob("model*"))
    for file in files[1:]:
        (broken / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UnsupportedOptionError, match=rf"missing 1 of the .*: {files[0].name}"):
        known_base(broken)
    (broken / files[0].name).write_bytes(files[0].read_bytes()[:-8])
    with pytest.raises(UnsupportedOptionError, match=rf"{files[0].name} is truncated"):
        known_base(broken)
    for bad in (b"", b"\xff" * 20, b"\x02" + bytes(7) + b"[]", b"\x08" + bytes(7) + b'{"a": 1}'):
        (broken / files[0].name).write_bytes(bad)
        with pytest.raises(UnsupportedOptionError, match="not a safetensors file"):
            known_base(broken)
    (broken / base_identity.INDEX).write_text("[]")
    with pytest.raises(UnsupportedOptionError, match="not an index"):
        known_base(broken)


def test_a_broken_record_and_a_folder_without_an_adapter_are_one_sentence(bases, tmp_path, adapter):
    with pytest.raises(UnsupportedOptionError, match=r"no adapter_config\.json"):
        check_base(tmp_path, bases / "one")
    for text in ("{", "[]", '{"base": "x"}'):
        (adapter / base_identity.RECORD).write_text(text)
        with pytest.raises(UnsupportedOptionError, match="delete it"):
            check_base(adapter, bases / "one")


def test_a_base_is_found_in_its_folder_or_in_the_hub_cache(bases, tmp_path, monkeypatch):
    assert find_base(str(bases / "one")) == bases / "one"
    assert find_base("") is None
    assert find_base("no/such-model") is None
    assert find_base(str(tmp_path / "gone" / "for" / "good")) is None
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({}))
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert find_base("some/model") == snapshot
    assert find_base("some/model", "0" * 40) == snapshot
