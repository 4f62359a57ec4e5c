"""Test bad input to merge: a one-sentence error, no partial output, inputs unchanged."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_patch.cli import INTERRUPTED, main
from moe_patch.cli.merge import bytes_of
from moe_patch.quant import shard_files
from moe_patch.serving import write
from moe_patch.tools.base_identity import Base, note_base
from tests.support.cli_calls import answer, error_of
from tests.support.merge_cases import save_adapter, save_base

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Folder with a base in several files and its adapter."""
    folder = tmp_path_factory.mktemp("refusals")
    model = save_base("qwen3_moe", folder / "base")
    model.save_pretrained(folder / "base", max_shard_size="60KB")
    (folder / "base" / "model.safetensors").unlink()
    save_adapter(model, folder / "adapter")
    return folder


@pytest.fixture
def folder(kept, tmp_path):
    """Copy of ``kept`` for one test to break."""
    for name in ("base", "adapter"):
        shutil.copytree(kept / name, tmp_path / name)
    return tmp_path


def argv(folder, *more):
    adapter, base = str(folder / "adapter"), str(folder / "base")
    return ["merge", adapter, "--base", base, "--out", str(folder / "out"), *more]


def state(folder):
    """Return a hash of every file in a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).digest() for path in files}


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def without_key(folder):
    path = folder / "adapter" / WEIGHTS
    found = load_file(path)
    found.pop(next(key for key in found if "experts" in key and "lora_B" in key))
    save_file(found, path)


def of_more_layers(folder):
    path = folder / "adapter" / WEIGHTS
    found = load_file(path)
    more = {key.replace("layers.1.", "layers.7."): value.clone() for key, value in found.items()}
    save_file(found | more, path)


def other_config(folder, **values):
    path = folder / "base" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def adapter_config(folder, **values):
    path = folder / "adapter" / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def trained_on_another(folder):
    """Note a fine-tuning of the base as the adapter's own: same shapes, one other value."""
    note_base(folder / "adapter", Base("elsewhere", "0" * 64))


FAULTS = {
    "a fine-tuning of the base": (trained_on_another, "trained on another base (elsewhere)"),
    "half an adapter": (lambda f: cut(f / "adapter" / WEIGHTS), "not a complete safetensors file"),
    "no adapter file": (lambda f: (f / "adapter" / WEIGHTS).unlink(), f"has no {WEIGHTS}"),
    "half a config": (lambda f: cut(f / "adapter" / CONFIG), "not valid JSON"),
    "a missing factor": (without_key, "is missing (first of 1); accepted: a complete folder"),
    "layers that the base lacks": (of_more_layers, "the base has no module or expert for"),
    "experts that the base lacks": (
        lambda f: other_config(f, num_local_experts=4),
        "does not fit the base",
    ),
    "another base": (lambda f: other_config(f, hidden_size=64), "does not fit the base"),
    "a shard is missing": (
        lambda f: next((f / "base").glob("model-00002*")).unlink(),
        "files that model.safetensors.index.json lists (first: model-00002",
    ),
    "half a shard": (
        lambda f: cut(next((f / "base").glob("model-00002*"))),
        "is truncated: its header describes",
    ),
    "no weights": (
        lambda f: [p.unlink() for p in (f / "base").glob("model*")],
        "holds neither model.safetensors nor model.safetensors.index.json",
    ),
    "an output folder": (lambda f: (f / "out").mkdir(), "already exists; accepted: the name of"),
    "another kind": (lambda f: adapter_config(f, peft_type="IA3"), "peft_type is 'IA3'; accepted"),
    "pissa": (lambda f: adapter_config(f, init_lora_weights="pissa"), "also changed the base"),
    "a quantised base": (
        lambda f: other_config(f, quantization_config={"quant_method": "awq", "bits": 4}),
        "is quantised with awq; accepted",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_one_sentence_and_nothing_written(name, capsys, folder):
    fault, said = FAULTS[name]
    fault(folder)
    before = state(folder)
    assert said in error_of(capsys, *argv(folder))
    assert state(folder) == before
    assert {path.name for path in folder.iterdir()} <= {"base", "adapter", "out"}


def test_a_full_disk(capsys, folder, monkeypatch):
    """The check fails before the first byte, or a write fails in the middle of a file."""
    before = state(folder)
    usage = shutil.disk_usage(folder)
    with monkeypatch.context() as patched:
        patched.setattr(shard_files.shutil, "disk_usage", lambda path: usage._replace(free=1000))
        assert "the disk has 1,000 free" in error_of(capsys, *argv(folder))
    with monkeypatch.context() as patched:
        patched.setattr(write.ShardFile, "write", after(3, OSError(28, "No space left on device")))
        assert "device; the partial result was removed" in error_of(capsys, *argv(folder))
    with monkeypatch.context() as patched:
        patched.setattr(write.ShardFile, "write", after(30, KeyboardInterrupt()))
        assert main(argv(folder)) == INTERRUPTED
    assert state(folder) == before
    assert not [path for path in folder.iterdir() if path.name.startswith("out")]


def after(count, error):
    """Return a write method that fails after ``count`` calls."""
    calls = []
    real = write.ShardFile.write

    def fail(*args):
        calls.append(1)
        if len(calls) > count:
            raise error
        return real(*args)

    return fail


def test_the_command(capsys, folder):
    adapter_config(folder, base_model_name_or_path=str(folder / "base"))
    out = ["--out", str(folder / "out")]
    said = answer(capsys, "merge", str(folder / "adapter"), *out, "--device", "cpu")
    assert said["changed"] + said["copied"] == 69
    assert said["changed"] == 58
    assert {p.name for p in (folder / "out").iterdir()} == {
        p.name for p in (folder / "base").iterdir()
    }
    index = "model.safetensors.index.json"
    maps = [json.loads((folder / x / index).read_text())["weight_map"] for x in ("base", "out")]
    assert maps[0] == maps[1]
    again = argv(folder)
    again[again.index("--out") + 1] = str(folder / "one")
    assert main([*again, "--max-shard-size", "1GB", "--dtype", "float32"]) == 0
    assert capsys.readouterr().out.startswith(f"{folder / 'one'}: 58 weights changed, 11 copied, ")
    assert load_file(folder / "one" / "model.safetensors")["lm_head.weight"].dtype == torch.float32


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19), ("7", 7)])
def test_sizes(text, size):
    assert bytes_of(text) == size


def test_no_size(capsys, folder):
    assert "--max-shard-size 5 apples" in error_of(
        capsys, *argv(folder), "--max-shard-size", "5 apples"
    )
