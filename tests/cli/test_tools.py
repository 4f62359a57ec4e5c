"""bench, selftest, warmup and replay, and behaviour common to all commands."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import moe_patch
from moe_patch._version import __version__
from moe_patch.cli import CHECK_FAILED, SUBCOMMANDS, bench, bench_report, main, run
from moe_patch.cli.output import bytes_text
from moe_patch.cli.status import UNUSABLE
from moe_patch.ops.backend import BackendChoice
from moe_patch.tools import selftest
from tests.support import tiny_models
from tests.support.cli_calls import answer, error_of, only_config
from tests.support.limits import HANG_S

ROOT = Path(moe_patch.__file__).parents[1]


def test_bench_times_both_sides(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "MIN_SECONDS", 0.01)
    argv = ["bench", only_config(tmp_path, "glm4_moe"), "--tokens", "16", "--device", "cpu"]
    found = answer(capsys, *argv)
    assert found["block"].endswith("Glm4MoeMoE")
    assert [(row["what"], row["pass"]) for row in found["rows"]] == [
        ("unpatched", "fwd"), ("unpatched", "fwd+bwd"), ("patched", "fwd"), ("patched", "fwd+bwd"),
    ]  # fmt: skip
    assert all(row["ms"] > 0 for row in found["rows"])
    assert found["rows"][2]["saved_bytes"] < found["rows"][0]["saved_bytes"]
    assert main(argv) == 0
    assert capsys.readouterr().out.startswith("Glm4MoeMoE of ")


def test_a_report_is_one_block_of_text(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "MIN_SECONDS", 0.01)
    argv = ["bench", only_config(tmp_path, "qwen3_moe"), "--report", "--tokens", "8"]
    argv += ["--device", "cpu"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert text.startswith("```\ncard: ")
    assert text.endswith("```\n")
    for said in (
        f"torch {torch.__version__}", f"moe_patch {__version__}", "triton ", "python 3.",
        "kernels: none, the torch backend: no Triton kernels on cpu", "launched directly: no",
        "Qwen3MoeSparseMoeBlock of ", " 8 tokens, float32:", "fwd+bwd: patched ", " ms (torch), un",
        "checks hold on torch, worst error ",
    ):  # fmt: skip
        assert said in text, said
    found = answer(capsys, *argv)
    assert set(found) == {"card", "versions", "kernels", "points", "selftest"}
    assert found["selftest"]["failed"] == []


def test_a_report_keeps_what_did_not_fit_and_what_failed(capsys, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(bench, "_measure", full)
    wrong = selftest.Check("experts bf16", False, 0.0, 0.1, "w2 is 3.00 times as far")
    monkeypatch.setattr(
        "moe_patch.tools.selftest.selftest",
        lambda *_, **__: selftest.SelfTest("cpu", "torch", "", [wrong]),
    )
    argv = ["bench", only_config(tmp_path, "qwen3_moe"), "--report", "--device", "cpu"]
    assert main(argv) == CHECK_FAILED
    text = capsys.readouterr().out
    assert "512 tokens, float32: out of memory" in text
    assert "0 of 1 checks hold" in text
    assert "FAILED experts bf16: w2 is 3.00 times as far" in text


def test_a_report_of_a_card_names_its_kernels(monkeypatch):
    triton = pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
    from moe_patch.kernels.common import device, versions

    card = torch.device("cuda", 0)
    monkeypatch.setattr(
        "moe_patch.ops.backend.choose_backend", lambda *_: BackendChoice("triton", "auto")
    )
    for capability, gates, said in (
        ((8, 0), versions.PORTABLE, "portable"),
        ((9, 0), versions.Gates(True, True), "Hopper"),
        ((9, 0), versions.Gates(False, False, "why not"), "portable; why not"),
        ((9, 0), versions.Gates(True, False, "a hazard"), "Hopper; a hazard"),
    ):
        found = device.Device(capability, 227 << 10, 132)
        monkeypatch.setattr(device, "_cuda_device", lambda index, found=found: found)
        monkeypatch.setitem(versions._GATES, triton.__version__, gates)
        assert bench_report._kernels(card)["which"] == said
    assert bench_report._kernels(card)["direct_launches"] == (
        "yes" if versions.tested().direct else "no, by Triton"
    )


def test_bench_without_a_model_says_what_it_takes(capsys):
    assert "MODEL is missing; accepted: a hub id" in error_of(capsys, "bench")
    assert bench_report.default_config().num_experts == 128


def test_a_device_without_enough_memory_is_one_line(capsys, tmp_path, monkeypatch):
    texts = ["CUDA out of memory. Tried to allocate 2.00 GiB.\nand more", ""]

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError(texts.pop(0))

    monkeypatch.setattr(Qwen3MoeExperts, "forward", full)
    command = "bench", only_config(tmp_path, "qwen3_moe"), "--tokens", "8"
    said = error_of(capsys, *command)
    assert "CUDA out of memory. Tried to allocate 2.00 GiB. Use fewer tokens" in said
    assert "OutOfMemoryError. Use fewer tokens" in error_of(capsys, *command)


def test_bench_hands_ops_to_the_script_of_the_checkout(monkeypatch):
    calls = []
    monkeypatch.setattr(bench.subprocess, "call", lambda command: calls.append(command) or 7)
    assert main(["bench", "experts", "--dry-run"]) == 7
    assert calls == [[sys.executable, str(ROOT / "scripts" / "bench.py"), "experts", "--dry-run"]]


def test_bench_ops_outside_a_checkout_say_where_to_go(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench.moe_patch, "__file__", str(tmp_path / "moe_patch" / "__init__.py"))
    assert "is part of a source checkout" in error_of(capsys, "bench", "experts")


def test_ops_that_are_handed_on_are_those_of_the_script():
    source = (ROOT / "benchmarks" / "bench_lib" / "rows.py").read_text(encoding="utf-8")
    (ops,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "OPS"
    ]
    assert set(bench.GRID) == {*ops, "all", "table", "chart", "docs"}


@pytest.mark.parametrize("command", SUBCOMMANDS, ids=lambda module: module.__name__)
def test_every_command_has_help_and_json(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        main([command.__name__.rpartition(".")[2], "--help"])
    assert stopped.value.code == 0
    # `run` prints only the output of the command that it runs.
    assert ("--json" in capsys.readouterr().out) == (command is not run)


def test_a_reader_that_leaves_early_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m moe_patch families | head -n 1",
        shell=True, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("model type")
    assert done.stderr == ""


def test_stderr_is_empty_where_it_is_no_terminal(tmp_path):
    """Run in a separate process, to capture the output of transformers on import and loading."""
    tiny_models.build("gpt_oss", num_hidden_layers=1).save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "moe_patch", "verify", str(tmp_path), "--device", "cpu", "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert json.loads(done.stdout)["weights"] == "loaded"
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


def test_selftest_wants_a_process(capsys):
    assert main(["selftest", "--device", "cpu", "--jobs", "0"]) == UNUSABLE
    assert "--jobs 0: at least 1" in capsys.readouterr().err


def test_selftest_that_fails_is_status_1(capsys, monkeypatch):
    check = selftest.Check("experts bf16", False, 3.0, 0.1, "3.0 times the limit")
    result = selftest.SelfTest("a card", "triton", "", [check])
    monkeypatch.setattr(selftest, "selftest", lambda device, **_: result)
    assert main(["selftest", "--device", "cpu"]) == CHECK_FAILED
    out = capsys.readouterr().out
    assert "FAILED" in out
    assert "3.0 times the limit" in out
    assert "0 of 1 checks hold" in out


@pytest.mark.parametrize("extra", [[], ["--lora", "4"], ["--inference", "--tokens", "5"]])
def test_warmup_says_why_there_is_nothing_to_compile(capsys, tmp_path, extra):
    (row,) = answer(capsys, "warmup", only_config(tmp_path, "qwen3_moe"), "--device", "cpu", *extra)
    assert row["path"].endswith("model.layers.0.mlp")
    assert "nothing to compile on the torch backend" in row["skipped"]


def test_warmup_passes_on_no_advice_of_other_libraries(capsys, tmp_path, recwarn):
    answer(capsys, "warmup", only_config(tmp_path, "qwen3_moe"), "--device", "cpu", "--lora", "4")
    assert [str(w.message) for w in recwarn if w.category is FutureWarning] == []


def test_warmup_with_tokens_that_are_none(capsys, tmp_path):
    assert "--tokens -3: at least 1" in error_of(
        capsys, "warmup", only_config(tmp_path, "qwen3_moe"), "--tokens", "8", "-3"
    )


def test_warmup_with_a_rank_that_is_none(capsys, tmp_path):
    assert "--lora 0: " in error_of(
        capsys, "warmup", only_config(tmp_path, "qwen3_moe"), "--lora", "0"
    )


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
