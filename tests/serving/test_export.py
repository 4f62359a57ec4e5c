"""Test moe-patch export: layouts of vLLM and SGLang, read back and compared with PEFT's deltas.

The tests of the engines' sources need MOE_PATCH_ENGINES. It names a folder with the unpacked wheels
of moe_patch/serving/engines.py (``vllm/`` and ``sglang/``).
"""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_patch import UnsupportedModelError
from moe_patch.cli import CHECK_FAILED
from moe_patch.runtime.peft_release import rewrites_targets
from moe_patch.serving.adapter import read_adapter
from moe_patch.serving.checkpoint import Checkpoint
from moe_patch.serving.engines import ENGINES, PER_EXPERT, STACKED
from moe_patch.serving.export import export
from moe_patch.serving.read_back import exported
from tests.support.adapters import EXPERTS
from tests.support.cli_calls import answer, error_of
from tests.support.merge_cases import plain, save_adapter, save_base

ATTENTION = ["q_proj", "v_proj", "o_proj"]
MLA = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
CASES = [
    ("qwen3_moe", "vllm", ATTENTION, {}),
    ("qwen3_moe", "sglang", ATTENTION, {"use_rslora": True, "rank_pattern": {"q_proj": 7}}),
    ("mixtral", "sglang", ATTENTION, {"alpha_pattern": {"down_proj": 5}}),
    ("deepseek_v3", "vllm", MLA, {}),
    ("gpt_oss", "vllm", ATTENTION, {"rank_pattern": {"gate_up_proj": 5}}),
]  # fmt: skip
# Module names that the engines' releases expect for two experts; sources: after/engines.py.
NAMES = {
    PER_EXPERT: {f"experts.{i}.{p}" for i in (0, 1) for p in ("gate_proj", "up_proj", "down_proj")},
    STACKED: {"experts", "experts.base_layer"},
}


def made(folder, model_type, to, modules=ATTENTION, parameters=EXPERTS, base=None, **options):
    """Save a base and an adapter, export the adapter, and return it as read from its file."""
    model = save_base(model_type, folder / "base", **(base or {}))
    modules = [m for m in modules if any(n.endswith(m) for n, _ in model.named_modules())]
    save_adapter(
        model, folder / "adapter", target_modules=modules,
        target_parameters=list(parameters), **options,
    )  # fmt: skip
    adapter = read_adapter(folder / "adapter", plain(folder / "base", folder / "adapter"))
    export(adapter, Checkpoint(folder / "base"), to, folder / "out")
    return adapter


def modules_of(folder):
    """Return the module names of an exported file."""
    found = load_file(folder / "out" / "adapter_model.safetensors")
    return {re.fullmatch(r"base_model\.model\.(.*)\.lora_[AB]\.weight", key)[1] for key in found}


@pytest.mark.parametrize(("model_type", "to", "modules", "options"), CASES)
def test_every_delta_is_that_of_peft(model_type, to, modules, options, tmp_path, capsys):
    """Also add the deltas that the engine reads to the base: PEFT's logits result."""
    adapter = made(tmp_path, model_type, to, modules, **options)
    found = list(exported(adapter, Checkpoint(tmp_path / "base"), tmp_path / "out"))
    assert len(found) > len(adapter.changes)
    assert all(one.passed for one in found)
    layout = ENGINES[to].layouts[type(adapter.plain).__name__]
    experts = {
        re.sub(r".*\.(experts)\b", r"\1", name)
        for name in modules_of(tmp_path)
        if ".experts" in name
    }
    if model_type == "mixtral":
        assert {name.rpartition(".")[2] for name in experts} == {"w1", "w2", "w3"}
    else:
        assert NAMES[layout] <= experts
    argv = ["verify", "--adapter", str(tmp_path / "adapter"), str(tmp_path / "base")]
    said = answer(capsys, *argv, "--exported", str(tmp_path / "out"), "--device", "cpu")
    assert said["passed"]
    assert said["logits"]["exported"] < 1e-5 < said["logits"]["adapter"]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda key, value, all_: value * 1.5 if "lora_B" in key else value,
        lambda key, value, all_: all_[key.replace("experts.0.", "experts.1.")],
        lambda key, value, all_: all_[re.sub("gate_proj|up_proj", other, key)],
    ],
    ids=["wrongly scaled", "experts permuted", "gate and up swapped"],
)
def test_wrong_exports_are_caught(wrong, tmp_path):
    adapter = made(tmp_path, "qwen3_moe", "vllm")
    path = tmp_path / "out" / "adapter_model.safetensors"
    before = load_file(path)
    after = {
        key: wrong(key, value, before).clone() if "experts.0." in key else value
        for key, value in before.items()
    }
    save_file(after, path, metadata={"format": "pt"})
    found = exported(adapter, Checkpoint(tmp_path / "base"), tmp_path / "out")
    failed = {one.name for one in found if not one.passed}
    assert failed
    assert all("experts.0." in name for name in failed)


def other(match):
    """Swap gate and up."""
    return {"gate_proj": "up_proj", "up_proj": "gate_proj"}[match[0]]


def test_projections_without_an_adapter_get_zeros(tmp_path):
    """Both engines refuse an expert, or q, k and v, of which only some projections are adapted."""
    adapter = made(tmp_path, "qwen3_moe", "sglang", ["q_proj"], ["experts.down_proj"])
    names = modules_of(tmp_path)
    for name in ("mlp.experts.3.up_proj", "self_attn.k_proj", "self_attn.v_proj"):
        assert f"model.layers.0.{name}" in names
    found = list(exported(adapter, Checkpoint(tmp_path / "base"), tmp_path / "out"))
    assert all(one.passed for one in found)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 3


@pytest.mark.parametrize(
    ("model_type", "options", "said"),
    [
        ("olmoe", {"parameters": [*EXPERTS, "gate.weight"]}, r"run an adapter on .*gate\.weight"),
        ("qwen3_moe", {"parameters": [], "use_dora": True}, "does not support DoRA"),
        ("qwen3_moe", {"modules_to_save": ["lm_head"]}, "lm_head.weight is saved in full"),
        ("llama4", {}, "cannot load an adapter on the experts of Llama4ForCausalLM"),
    ],
)
def test_what_an_engine_does_not_read_is_refused(model_type, options, said, tmp_path):
    with pytest.raises(UnsupportedModelError, match=rf"SGLang 0\.5\.23 .*{said}.*moe-patch merge"):
        made(tmp_path, model_type, "sglang", **options)
    assert not (tmp_path / "out").exists()


def test_the_command(capsys, tmp_path):
    made(tmp_path, "qwen3_moe", "vllm")
    base, adapter = str(tmp_path / "base"), str(tmp_path / "adapter")
    argv = ["export", adapter, "--base", base, "--to"]
    other = "0.18" if rewrites_targets() else "0.21"
    for to, release in (("vllm", "vLLM 0.33.0"), ("peft", f"PEFT {other}")):
        more = ["--release", other] if to == "peft" else []
        said = answer(capsys, *argv, to, "--out", str(tmp_path / to), *more)
        assert said["release"] == release
        assert said["pairs"] > 0
        check = ["verify", "--adapter", adapter, base, "--exported", str(tmp_path / to)]
        found = answer(capsys, *check)
        assert found["passed"]
        assert found["worst_ulps"] < 0.1
        assert found["logits"]["exported"] < 1e-5 < found["logits"]["adapter"]
    config = tmp_path / "vllm" / "adapter_config.json"
    about = json.loads(config.read_text())
    config.write_text(json.dumps(about | {"lora_alpha": 2 * about["r"]}))
    check = ["verify", "--adapter", adapter, base, "--exported", str(tmp_path / "vllm")]
    wrong = answer(capsys, *check, status=CHECK_FAILED)
    assert len(wrong["failed"]) > 40
    assert wrong["logits"]["exported"] > 1e-4
    assert "exists; accepted" in error_of(capsys, *argv, "vllm", "--out", str(tmp_path / "vllm"))


SOURCES = Path(os.environ.get("MOE_PATCH_ENGINES", "/nowhere"))
needs_sources = pytest.mark.skipif(
    not (SOURCES / "vllm").is_dir() or not (SOURCES / "sglang").is_dir(),
    reason="MOE_PATCH_ENGINES names no folder with the engines' wheels unpacked",
)


def classes_of(folder):
    """Return each class of a folder's files: file, names of bases, names annotated in its body."""
    found = {}
    for file in sorted(folder.glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                names = {
                    ast.unparse(part.target)
                    for part in node.body
                    if isinstance(part, ast.AnnAssign)
                }
                found.setdefault(node.name, (file, bases, names))
    return found


@needs_sources
def test_vllm_reads_these_names():
    classes = classes_of(SOURCES / "vllm" / "model_executor" / "models")

    def above(name):
        bases = classes[name][1] if name in classes else set()
        return {name}.union(*map(above, bases))

    for name, layout in ENGINES["vllm"].layouts.items():
        line = above(name)
        assert "SupportsLoRA" in line, name
        flags = set().union(*(classes[c][2] for c in line if c in classes and c != "SupportsLoRA"))
        assert ("is_3d_moe_weight" in flags) == (layout == STACKED), name
    tree = ast.parse((SOURCES / "vllm" / "lora" / "utils.py").read_text(encoding="utf-8"))
    (parse,) = (n for n in tree.body if getattr(n, "name", "") == "parse_fine_tuned_lora_name")
    space: dict = {}
    exec(ast.unparse(parse), space)
    read = space["parse_fine_tuned_lora_name"]
    assert read("base_model.model.a.experts.0.up_proj.lora_A.weight") == (
        "a.experts.0.up_proj",
        True,
    )
    assert read("base_model.model.a.experts.base_layer.lora_B.weight") == (
        "a.experts.base_layer",
        False,
    )


@needs_sources
def test_sglang_reads_these_names(tmp_path):
    for name in ENGINES["sglang"].layouts:
        files = [
            file
            for file in (SOURCES / "sglang" / "srt" / "models").glob("*.py")
            if re.search(rf"^(class {name}\b|EntryClass[^\]]*\b{name}\b)", file.read_text(), re.M)
        ]
        text = "".join(file.read_text() for file in files)
        assert re.search(r"FusedMoE|get_moe_impl_class", text) or "DeepseekV" in text, name
        assert "def should_apply_lora" not in text, name
    tree = ast.parse((SOURCES / "sglang" / "srt" / "lora" / "lora.py").read_text(encoding="utf-8"))
    wanted = ("normalize_gate_up_proj", "normalize_qkv_proj", "_rename_expert_w_to_proj")
    methods = [n for n in ast.walk(tree) if getattr(n, "name", "") in wanted]
    space: dict = {"torch": torch, "List": list, "Dict": dict}
    for method in methods:
        exec(ast.unparse(method), space)
    made(tmp_path, "mixtral", "sglang", ["q_proj"], ["experts.gate_up_proj"])
    layer = load_file(tmp_path / "out" / "adapter_model.safetensors")
    layer = {key: value for key, value in layer.items() if ".layers.0." in key}
    before = dict(layer)
    space["_rename_expert_w_to_proj"](None, layer)
    space["normalize_qkv_proj"](None, list(layer), layer)
    space["normalize_gate_up_proj"](None, list(layer), layer)
    path = "base_model.model.model.layers.0.block_sparse_moe.experts.1"
    halves = torch.cat([before[f"{path}.{w}.lora_B.weight"] for w in ("w1", "w3")])
    assert torch.equal(layer[f"{path}.gate_up_proj.lora_B.weight"], halves)
    assert not layer[f"{path}.down_proj.lora_B.weight"].any()
