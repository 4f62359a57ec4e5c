"""Answers of families, inspect, verify and bench about a model, from its folder alone."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import moe_patch
from moe_patch import supported_model_types
from moe_patch.cli import CHECK_FAILED, bench, main
from moe_patch.ops.routing import route, weights_at
from moe_patch.runtime import forward
from moe_patch.types import Routing
from tests.support import tiny_models
from tests.support.cli_calls import answer, error_of, only_config
from tests.support.numerics import FP32

ROOT = Path(moe_patch.__file__).parents[1]


@pytest.fixture
def folder(tmp_path):
    """Return a function that makes a folder holding only a tiny model's config."""
    return partial(only_config, tmp_path)


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
    """Report the bytes that autograd saves, except the plan's offsets: E + 1 int32 for any T."""
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
    def worst(logits, spec, bias=None, ids=None):
        if ids is not None:  # a replay's
            return Routing(ids, weights_at(logits, spec, ids), logits)
        return dataclasses.replace(route(-logits, spec, bias), logits_TE=logits)

    monkeypatch.setattr(forward, "route_impl", lambda *args: worst)
    found = answer(capsys, "verify", folder("qwen3_moe"), "--device", "cpu", status=CHECK_FAILED)
    choice = next(check for check in found["checks"] if check["name"] == "expert choice")
    assert not choice["passed"]
    assert choice["where"].endswith("rows of model.layers.0.mlp.experts")
    # With the unpatched model's choice of experts replayed, the values still agree.
    assert all(check["passed"] for check in found["checks"] if check is not choice)


def test_verify_refuses_what_patch_model_refuses(capsys, folder):
    assert "capacity" in error_of(capsys, "verify", folder("switch_transformers"))


MISTAKES = [
    # (arguments after the folder, what stderr must say)
    (["--layers", "3"], "--layers 3: the model has 2"),
    (["--length", "1"], "at least 1 sequence of 2 tokens"),
    (["--device", "tpu"], "--device tpu: "),
    (["--seed", str(2**64)], f"--seed {2**64}: accepted: {-(2**63)} to {2**64 - 1}"),
    (["--seed", str(-(2**63) - 1)], f"--seed {-(2**63) - 1}: accepted: {-(2**63)} to"),
    (["--limit", "nan"], "--limit nan: accepted: a number of at least 0"),
    (["--limit", "-1"], "--limit -1.0: accepted: a number of at least 0"),
    (["--device", "meta"], "--device meta: nothing runs there"),
    (["--device", "cuda:77"], "--device cuda:77: "),
    (["--backend", "triton", "--device", "cpu"], "no Triton kernels on cpu"),
]


@pytest.mark.parametrize(("extra", "message"), MISTAKES, ids=[" ".join(e) for e, _ in MISTAKES])
def test_mistake(capsys, folder, extra, message):
    assert message in error_of(capsys, "verify", folder("qwen3_moe"), *extra)


def test_a_limit_of_zero_is_a_limit(capsys, folder):
    found = answer(
        capsys, "verify", folder("qwen3_moe"), "--limit", "0", "--layers", "1", status=CHECK_FAILED
    )
    assert {check["limit"] for check in found["checks"]} - {1 / 64} == {0.0}


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_a_model_that_transformers_cannot_run(capsys, folder, command):
    more_than_there_are = folder("qwen3_moe", num_experts=8, num_experts_per_tok=9)
    assert "does not run on " in error_of(capsys, command, more_than_there_are, "--device", "cpu")


@pytest.mark.parametrize("command", ["inspect", "verify", "bench"])
def test_a_model_that_is_not_there(capsys, tmp_path, command):
    missing = str(tmp_path / "none")
    assert f"MODEL {missing!r} is no folder" in error_of(capsys, command, missing)


def test_a_config_that_makes_no_model(capsys, folder):
    path = Path(folder("qwen3_moe"), "config.json")
    path.write_text(path.read_text().replace('"hidden_act": "silu"', '"hidden_act": "nothing"'))
    assert "MODEL: cannot make Qwen3MoeForCausalLM" in error_of(capsys, "inspect", str(path.parent))


@pytest.mark.parametrize("command", ["inspect", "verify", "bench", "warmup"])
def test_code_of_a_repository_is_not_run_and_nobody_is_asked(
    capsys, tmp_path, monkeypatch, command
):
    about = {"model_type": "own_moe", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(about))
    (tmp_path / "configuration_own.py").write_text("raise SystemExit('it ran')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    said = error_of(capsys, command, str(tmp_path))
    assert "needs code of its own repository" in said


@pytest.fixture
def weights(capsys, tmp_path) -> Path:
    """Save a tiny model to a folder and return the file of its weights."""
    tiny_models.build("qwen3_moe").save_pretrained(tmp_path)
    capsys.readouterr()  # its progress
    return tmp_path / "model.safetensors"


def test_weights_that_are_not_those_of_the_config_are_named(capsys, tmp_path, weights):
    tensors = load_file(weights)
    lost = "model.layers.1.self_attn.q_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != lost}, weights, {"format": "pt"})
    said = error_of(capsys, "verify", str(tmp_path), "--device", "cpu")
    assert f"1 weights of the config's model are not in its files, {lost} first" in said
    wide = {**tensors, lost: tensors[lost].new_zeros(32, 33)}
    save_file(wide, weights, {"format": "pt"})
    said = error_of(capsys, "verify", str(tmp_path), "--device", "cpu")
    assert f"{lost} is (32, 33) in the file, (32, 32) in config.json" in said
    assert main(["verify", str(tmp_path), "--device", "cpu", "--random"]) == 0


def test_a_broken_file_of_weights_is_one_line(capsys, tmp_path, weights):
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "MODEL: cannot load" in error_of(capsys, "verify", str(tmp_path), "--device", "cpu")
    weights.rename(tmp_path / "model.was")
    (tmp_path / "pytorch_model.bin").write_text("junk\n")  # whose whole message is a number
    assert "Error " in error_of(capsys, "verify", str(tmp_path), "--device", "cpu")


@pytest.mark.families("deepseek_v4")
def test_verify_where_no_layer_has_router_logits(capsys, folder):
    """transformers' auxiliary loss fails on DeepSeek-V4, whose first layers choose by token id."""
    argv = ["verify", folder("deepseek_v4"), "--device", "cpu", "--layers", "1"]
    found = answer(capsys, *argv)
    assert found["passed"]
    assert {"logits", "loss", "gradients"} <= {check["name"] for check in found["checks"]}


@pytest.mark.parametrize("name", ["dbrx", "doge", "jetmoe", "afmoe", "ernie4_5_moe"])
def test_bench_of_routers_without_one_matrix_and_of_frozen_biases(
    capsys, folder, monkeypatch, name
):
    monkeypatch.setattr(bench, "MIN_SECONDS", 0.01)
    found = answer(capsys, "bench", folder(name), "--tokens", "8", "--device", "cpu")
    assert [row["what"] for row in found["rows"]] == ["unpatched", "unpatched"] + ["patched"] * 2


@pytest.mark.families("dots3_note_vision")
def test_verify_of_a_tower_without_token_ids(capsys, folder):
    argv = ["verify", folder("dots3_note_vision"), "--device", "cpu"]
    assert "takes no token ids" in error_of(capsys, *argv)
