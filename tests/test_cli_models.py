"""families, inspect, verify and bench: what they answer about a model, from its folder alone."""

from __future__ import annotations

import ast
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moe_patch
from moe_patch import forward, selftest, supported_model_types
from moe_patch.cli import CHECK_FAILED, SUBCOMMANDS, UNUSABLE, bench, main
from moe_patch.cli.output import bytes_text
from moe_patch.routing import route
from tests import tiny_models
from tests.numerics import FP32

ROOT = Path(moe_patch.__file__).parents[1]


@pytest.fixture
def folder(tmp_path):
    """A function: the folder of a tiny model's config, and nothing but the config."""

    def make(model_type: str, **overrides) -> str:
        tiny_models.config(model_type, **overrides).save_pretrained(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
        return str(tmp_path)

    return make


def answer(capsys, *argv: str, status: int = 0):
    """What a command prints with --json."""
    assert main([*argv, "--json"]) == status
    out, _ = capsys.readouterr()
    return json.loads(out)


def error_of(capsys, *argv: str) -> str:
    """The one line of a command that cannot be done."""
    assert main([*argv]) == UNUSABLE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("moe_patch: error: ")
    assert err.count("\n") == 1
    return err


def test_families_are_the_supported_model_types(capsys):
    rows = answer(capsys, "families")
    assert {row["model_type"]: row["tier"] for row in rows} == supported_model_types()
    assert len({row["model_type"] for row in rows}) == len(rows)
    by_name = {row["model_type"]: row for row in rows}
    assert by_name["qwen3_moe"]["routers"] == ["softmax_topk"]
    assert by_name["qwen3_vl_moe"]["towers"] == ["qwen3_vl_moe_text"]
    assert all(bool(row["reason"]) == (row["tier"] == "refused") for row in rows)


def test_families_of_one_tier_as_a_table(capsys):
    assert main(["families", "--tier", "refused"]) == 0
    head, *rows, _, counts = capsys.readouterr().out.splitlines()
    assert head.split() == ["model", "type", "tier", "router", "note"]
    refused = [name for name, tier in supported_model_types().items() if tier == "refused"]
    assert [row.split()[0] for row in rows] == refused
    assert counts.endswith(f": {len(refused)} refused")


def test_inspect_needs_the_config_only(capsys, folder):
    found = answer(capsys, "inspect", folder("qwen2_moe"), "--dtype", "float32")
    model = tiny_models.build("qwen2_moe")
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["weight_bytes"] == 4 * found["parameters"]
    assert found["model_type"] == "qwen2_moe"
    assert [block["path"] for block in found["blocks"]] == [p for p, _ in tiny_models.blocks(model)]
    for block in found["blocks"]:
        wanted = {
            "tier": "full", "router": "softmax_topk", "experts": 8, "top_k": 2, "hidden": 32,
            "width": 16, "shared": "shared_expert x sigmoid(shared_expert_gate)",
        }  # fmt: skip
        assert wanted.items() <= block.items()
        assert block["experts_backend"] == ("triton" if torch.cuda.is_available() else "torch")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h", "zaya"])
def test_saved_bytes_are_those_that_autograd_keeps(capsys, folder, name, recompute):
    """Beside the plan's offsets, E + 1 int32, which do not grow with the tokens."""
    found = answer(capsys, "inspect", folder(name), "--dtype", "float32")["blocks"][-1]
    model = moe_patch.patch_model(tiny_models.build(name), backend="torch", recompute=recompute)
    experts = tiny_models.blocks(model)[-1][1].experts
    D, E, K, T = found["hidden"], found["experts"], found["top_k"], 50
    x = torch.randn(T, D, requires_grad=True)
    ids = torch.rand(T, E).argsort(-1)[:, :K]
    weights = torch.rand(T, K, requires_grad=True).clone()
    kept: dict[int, int] = {}
    known = {t.untyped_storage().data_ptr() for t in [x, *experts.parameters()]}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        experts(x, ids, weights)
    key = "saved_with_recompute" if recompute else "saved_bytes_per_token"
    assert sum(kept.values()) == T * found[key] + 4 * (E + 1)


def test_inspect_prints_one_line_for_blocks_of_one_kind(capsys, folder):
    assert main(["inspect", folder("deepseek_v3", num_hidden_layers=4)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith(
        "4 x, model.layers.0.mlp ... model.layers.3.mlp  full  sigmoid_topk"
    )


def test_inspect_of_a_refused_family_is_status_1(capsys, folder):
    found = answer(capsys, "inspect", folder("switch_transformers"), status=CHECK_FAILED)
    assert {block["tier"] for block in found["blocks"]} == {"refused"}
    assert all("capacity" in block["reason"] for block in found["blocks"])


def test_inspect_of_a_dense_model_is_status_1(capsys, tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=32,
    ).save_pretrained(tmp_path)  # fmt: skip
    found = answer(capsys, "inspect", str(tmp_path), status=CHECK_FAILED)
    assert "no MoE block found" in found["blocks"][0]["reason"]


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "deepseek_v3", "minimax_m2", "gpt_oss", "qwen3_vl_moe"]
)
def test_verify_agrees_on_random_weights(capsys, folder, name):
    found = answer(capsys, "verify", folder(name), "--device", "cpu")
    assert found["passed"]
    assert found["weights"] == "random"
    names = {check["name"] for check in found["checks"]}
    result = {"hidden states"} if name == "qwen3_vl_moe" else {"logits", "loss"}
    assert names >= {"expert choice", "gradients", *result}
    assert "router logits" in names or name != "qwen3_moe"
    assert all(check["error"] <= 2 * FP32 for check in found["checks"]), found["checks"]
    assert len(found["blocks"]) == 2


def test_verify_of_saved_weights_on_fewer_layers(capsys, tmp_path):
    tiny_models.build("olmoe", num_hidden_layers=3).save_pretrained(tmp_path)
    argv = ["verify", str(tmp_path), "--device", "cpu", "--layers", "1", "--length", "5"]
    found = answer(capsys, *argv)
    assert found["passed"]
    assert found["weights"] == "loaded"
    assert len(found["blocks"]) == 1


def test_verify_notices_wrong_experts_and_says_where(capsys, folder, monkeypatch):
    right = forward.run_experts

    def wrong(*args, **kwargs):
        return right(*args, **kwargs) * 1.01

    monkeypatch.setattr(forward, "run_experts", wrong)
    assert main(["verify", folder("qwen3_moe"), "--device", "cpu"]) == CHECK_FAILED
    out = capsys.readouterr().out
    assert "patched and unpatched DIFFER" in out
    failed = {line.split("  ")[0] for line in out.splitlines() if "FAILED" in line}
    assert {"logits", "gradients"} <= failed


def test_verify_notices_a_router_that_chooses_others(capsys, folder, monkeypatch):
    def worst(logits, spec, bias=None):
        return dataclasses.replace(route(-logits, spec, bias), logits_TE=logits)

    monkeypatch.setattr(forward, "route_impl", lambda *args: worst)
    found = answer(capsys, "verify", folder("qwen3_moe"), "--device", "cpu", status=CHECK_FAILED)
    choice = next(check for check in found["checks"] if check["name"] == "expert choice")
    assert not choice["passed"]
    assert choice["where"].endswith("rows of model.layers.0.mlp.experts")
    # with the unpatched model's experts replayed, the values themselves still agree
    assert all(check["passed"] for check in found["checks"] if check is not choice)


def test_verify_refuses_what_patch_model_refuses(capsys, folder):
    assert "capacity" in error_of(capsys, "verify", folder("switch_transformers"))


MISTAKES = [
    # (arguments after the folder, what stderr must say)
    (["--layers", "3"], "--layers 3: the model has 2"),
    (["--length", "1"], "at least 1 sequence of 2 tokens"),
    (["--device", "tpu"], "--device tpu: "),
    (["--device", "cuda:77"], "--device cuda:77: "),
    (["--backend", "triton", "--device", "cpu"], "no Triton kernels on cpu"),
]


@pytest.mark.parametrize(("extra", "message"), MISTAKES, ids=[" ".join(e) for e, _ in MISTAKES])
def test_mistake(capsys, folder, extra, message):
    assert message in error_of(capsys, "verify", folder("qwen3_moe"), *extra)


@pytest.mark.parametrize("command", ["inspect", "verify", "bench"])
def test_a_model_that_is_not_there(capsys, tmp_path, command):
    missing = str(tmp_path / "none")
    assert f"MODEL {missing!r} is no folder" in error_of(capsys, command, missing)


def test_a_config_that_makes_no_model(capsys, folder):
    path = Path(folder("qwen3_moe"), "config.json")
    path.write_text(path.read_text().replace('"hidden_act": "silu"', '"hidden_act": "nothing"'))
    assert "MODEL: cannot make Qwen3MoeForCausalLM" in error_of(capsys, "inspect", str(path.parent))


def test_bench_times_both_sides(capsys, folder, monkeypatch):
    monkeypatch.setattr(bench, "MIN_SECONDS", 0.01)
    argv = ["bench", folder("glm4_moe"), "--tokens", "16", "--device", "cpu"]
    found = answer(capsys, *argv)
    assert found["block"].endswith("Glm4MoeMoE")
    assert [(row["what"], row["pass"]) for row in found["rows"]] == [
        ("unpatched", "fwd"), ("unpatched", "fwd+bwd"), ("patched", "fwd"), ("patched", "fwd+bwd"),
    ]  # fmt: skip
    assert all(row["ms"] > 0 for row in found["rows"])
    assert found["rows"][2]["saved_bytes"] < found["rows"][0]["saved_bytes"]
    assert main(argv) == 0
    assert capsys.readouterr().out.startswith("Glm4MoeMoE of ")


def test_bench_hands_ops_to_the_script_of_the_checkout(monkeypatch):
    calls = []
    monkeypatch.setattr(bench.subprocess, "call", lambda command: calls.append(command) or 7)
    assert main(["bench", "experts", "--dry-run"]) == 7
    assert calls == [[sys.executable, str(ROOT / "scripts" / "bench.py"), "experts", "--dry-run"]]


def test_bench_ops_outside_a_checkout_say_where_to_go(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench.moe_patch, "__file__", str(tmp_path / "moe_patch" / "__init__.py"))
    assert "is part of a source checkout" in error_of(capsys, "bench", "experts")


def test_ops_that_are_handed_on_are_those_of_the_script():
    source = (ROOT / "scripts" / "bench_lib" / "rows.py").read_text(encoding="utf-8")
    (ops,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "OPS"
    ]
    assert set(bench.GRID) == {*ops, "table"}


@pytest.mark.parametrize("command", SUBCOMMANDS, ids=lambda module: module.__name__)
def test_every_command_has_help_and_json(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        main([command.__name__.rpartition(".")[2], "--help"])
    assert stopped.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_a_reader_that_leaves_early_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m moe_patch families | head -n 1",
        shell=True, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("model type")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (9999, "9,999 B"), (10_000, "9.8 KiB"), (2**30 * 61, "61.0 GiB")],
)
def test_bytes_text(count, text):
    assert bytes_text(count) == text


def test_selftest_passes_on_the_cpu(capsys):
    found = answer(capsys, "selftest", "--device", "cpu")
    assert found["passed"]
    assert found["backend"] == "torch"
    assert all(check["passed"] for check in found["checks"])


def test_selftest_that_fails_is_status_1(capsys, monkeypatch):
    check = selftest.Check("experts bf16", False, 3.0, 0.1, "3.0 times the limit")
    result = selftest.SelfTest("a card", "triton", "", [check])
    monkeypatch.setattr(selftest, "selftest", lambda device, progress: result)
    assert main(["selftest", "--device", "cpu"]) == CHECK_FAILED
    out = capsys.readouterr().out
    assert "FAILED" in out
    assert "3.0 times the limit" in out
    assert "0 of 1 checks hold" in out


@pytest.mark.parametrize("extra", [[], ["--lora", "4"], ["--inference", "--tokens", "5"]])
def test_warmup_says_why_there_is_nothing_to_compile(capsys, folder, extra):
    (row,) = answer(capsys, "warmup", folder("qwen3_moe"), "--device", "cpu", *extra)
    assert row["path"].endswith("model.layers.0.mlp")
    assert "nothing to compile on the torch backend" in row["skipped"]


def test_warmup_with_a_rank_that_is_none(capsys, folder):
    assert "--lora 0: " in error_of(capsys, "warmup", folder("qwen3_moe"), "--lora", "0")


def test_replay_finds_what_debug_nan_wrote(capsys, tmp_path):
    model = tiny_models.build("qwen3_moe")
    moe_patch.patch_model(model, debug_nan=True, debug_dir=str(tmp_path))
    with torch.no_grad():
        tiny_models.blocks(model)[0][1].experts.down_proj[3, 0, 0] = float("nan")
        model(**tiny_models.inputs(model))
    (file,) = tmp_path.glob("*.safetensors")
    found = answer(capsys, "replay", str(file), "--device", "cpu")
    assert found["path"] == tiny_models.blocks(model)[0][0]
    assert found["ours"] == found["theirs"] != []
    assert main(["replay", str(file), "--device", "cpu"]) == 0
    assert "not finite" in capsys.readouterr().out
    assert "not a safetensors file" in error_of(capsys, "replay", str(tmp_path / "none"))
