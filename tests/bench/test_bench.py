"""Guarantees of the benchmark: valid rows, no hidden failures, no number without a check."""

import dataclasses
import json
from pathlib import Path

import bench
import pytest
import torch
from bench_lib import child, moe_block, rows, runner
from bench_lib.measure import run_pass
from bench_lib.ops import OPS, block

from tests.support import bench_cases
from tests.support.bench_cases import (
    BLOCK_FIELDS,
    COMMIT,
    FIELDS,
    LOGGED,
    MODEL_FIELDS,
    ROOT,
    TINY,
    dry_run,
)
from tests.support.window import swapped_factors

pytestmark = bench_cases.NEEDS_GROUPED_MM

REQUIRED = {
    "routing": {"torch", "torch_compile"},
    "product_key": {"all_pairs_loop", "torch"},
    "plan": set(),
    "experts": {"hf_grouped_mm", "torch_grouped_mm_early", "scattermoe", "sonicmoe"},
    "lora": {"peft", "axolotl_lora", "split_lora"},
    "decode": {"hf_batched_mm", "hf_grouped_mm"},
    "block": {"hf_grouped_mm", "peft", "split_lora"},
    "model": {"peft"},
    "signals": set(),
    "quantised": {"dequant_grouped_mm"},
}


class HereChild:
    """Stand-in for :class:`process.Child` in this process: starting a child costs seconds."""

    def __init__(self, run, op, device, tasks, settings, peers, warm):
        self.op, self.tasks, self.settings = OPS[op], tasks, settings
        self.device = torch.device(device)

    def wait_for_imports(self, deadline):
        pass

    def results(self, budget_s, deadline):
        cache = child.Cache(self.op, self.device, self.settings)
        for task in self.tasks:
            yield child.perform(self.op, task, cache, self.settings)


@pytest.fixture(scope="module")
def dry_rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runner, "Child", HereChild)
        for op in REQUIRED:
            assert dry_run(op, out / f"{op}.jsonl") == 0
    return {
        op: [json.loads(line) for line in (out / f"{op}.jsonl").read_text().splitlines()]
        for op in REQUIRED
    }


@swapped_factors
@pytest.mark.parametrize("op", REQUIRED)
def test_dry_run_rows_hold_every_field(dry_rows, op):
    for row in dry_rows[op]:
        more = {"model": MODEL_FIELDS, "block": BLOCK_FIELDS}.get(op, set())
        assert set(row) - {"skipped"} == FIELDS | LOGGED | more
        assert rows.check_row(row) is row
        assert row["op"] == op
        assert row["commit"] == COMMIT
    assert len({row["run"] for row in dry_rows[op]}) == 1
    keys = [tuple(row[name] for name in rows.KEY) for row in dry_rows[op]]
    assert len(keys) == len(set(keys))


@swapped_factors
@pytest.mark.parametrize("op", REQUIRED)
def test_required_peers_have_a_row_even_when_they_cannot_run(dry_rows, op):
    assert REQUIRED[op] == set(OPS[op].required)
    by_impl = {row["impl"]: row for row in dry_rows[op]}
    assert set(by_impl) >= REQUIRED[op]
    for name, row in by_impl.items():
        if OPS[op].impl(name).needs_cuda:
            assert row["median_ms"] is None
            assert row["skipped"] == "needs a CUDA device, this run is on cpu"
        else:
            assert "skipped" not in row
            assert row["median_ms"] > 0


@swapped_factors
@pytest.mark.parametrize("op", sorted(REQUIRED.keys() - {"model", "block"}))
def test_measured_rows_are_right_and_ours_repeat(dry_rows, op):
    for row in dry_rows[op]:
        if row["median_ms"] is not None:
            limit = OPS[op].limits[row["dtype"]]
            assert (0 if op == "plan" else 1e-9) <= row["rel_err"] <= limit
            assert row["bitwise"] is True


@swapped_factors
def test_block_rows_are_held_to_transformers_block(dry_rows):
    found = {(row["impl"], row["R"]): row["rel_err"] for row in dry_rows["block"]}
    assert found.pop(("hf_grouped_mm", None)) is None
    assert found.pop(("peft", 16)) is None
    measured = [("moe_patch", None), ("split_lora", 16), ("moe_patch", 16)]
    assert all(0 < found[each] < 1e-5 for each in measured)


@swapped_factors
@pytest.mark.parametrize("name", ["w13", "a2", "out"])
def test_a_block_that_differs_has_no_row(name):
    point = dataclasses.replace(TINY, R=None if name == "w13" else 4)
    inputs = moe_block.make_inputs(point, torch.device("cpu"))
    program = moe_block.build_module(inputs, point, patched=False)
    out, grads = run_pass(OPS["block"], point, program, inputs.layer.dout_TD)
    block._error(program, (out, grads), peer=True)
    assert block._error(program, (out, grads), peer=False) < 1e-12
    if name == "out":
        out = out * 1.1
    else:
        grads = tuple(
            grad * (1.1 if leaf == name else 1.0)
            for leaf, grad in zip(program.leaves, grads, strict=True)
        )
    assert block._error(program, (out, grads), peer=False) == pytest.approx(0.1, rel=1e-4)


@swapped_factors
def test_model_rows_are_of_one_model_and_share_its_loss(dry_rows):
    unpatched, patched = (row for row in dry_rows["model"] if "skipped" not in row)
    assert (unpatched["impl"], patched["impl"]) == ("peft", "moe_patch")
    assert unpatched["rel_err"] is None
    assert patched["rel_err"] < 1e-5
    for row in (unpatched, patched):
        assert 0 < row["moe_ms"] < row["median_ms"]
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["T"] / row["median_ms"])


@swapped_factors
def test_saved_bytes_of_our_experts_are_h_and_metadata(dry_rows):
    N, H = 16 * 2, 2 * 16
    found = {row["impl"]: row["saved_bytes"] for row in dry_rows["experts"]}
    assert N * H * 4 <= found["moe_patch"] <= N * H * 4 + 16 * N
    assert found["moe_patch:recompute"] <= 16 * N


def test_dry_run_without_out_writes_nothing():
    results = ROOT / "benchmarks" / "results"
    before = {path: path.read_bytes() for path in results.glob("*")}
    assert dry_run("experts", None, "--impls", "torch_grouped_mm_early", "--passes", "fwd") == 0
    assert {path: path.read_bytes() for path in results.glob("*")} == before


def test_json_is_all_that_is_on_stdout(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "Child", HereChild)
    out = tmp_path / "plan.jsonl"
    assert dry_run("plan", out, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["rows"] == rows.read_rows(out) != []
    assert said["run"] == said["rows"][0]["run"]
    assert said["files"] == [str(out)]
    assert bench.main(["table", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == said["rows"]


def test_one_command_makes_tables_and_charts(capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="charts need the extra plots")
    page = tmp_path / "page.md"
    page.write_text("<!-- bench: plan -->\nold\n<!-- end of bench -->\n")
    monkeypatch.setattr(bench, "DOCUMENTS", (page,))
    monkeypatch.setattr(bench, "CHARTS", tmp_path / "img")
    assert bench.main(["docs", "--check"]) == 1
    assert f"{page} is older than its rows" in capsys.readouterr().err
    assert bench.main(["docs", "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert files[0] == str(page)
    assert {Path(file).name for file in files[1:]} >= {"bench_experts.svg", "bench_lora.svg"}
    assert bench.main(["docs", "--check"]) == 0
    monkeypatch.setattr(bench.charts.importlib.util, "find_spec", lambda name: None)
    assert bench.main(["docs"]) == 2
    assert "pip install 'moe-patch[plots]'" in capsys.readouterr().err


def test_each_repeat_is_a_run_and_holds_a_plain_time(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "Child", HereChild)
    out = tmp_path / "experts.jsonl"
    impls = ("--impls", "moe_patch", "torch_grouped_mm_early", "--passes", "fwd")
    assert dry_run("experts", out, "--plain", "--runs", "2", "--json", *impls) == 0
    said, found = json.loads(capsys.readouterr().out), rows.read_rows(out)
    assert [row["run"] for row in found] == [run for run in said["runs"] for _ in range(2)]
    assert len(set(said["runs"])) == 2
    for ours, theirs in (found[:2], found[2:]):
        assert ours["plain_ms"] > 0
        assert theirs["plain_ms"] is None
    assert len({row["machine"] for row in found}) == 1


def test_a_command_line_that_cannot_be_read_is_one_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["plan", "--T", "many"])
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("moe-patch: error: argument --T: invalid int value: 'many'; see ")
    assert err.count("\n") == 1


def test_a_tree_without_git_needs_commit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert bench.main(["experts", "--dry-run"]) == 2
    assert "--commit SHA" in capsys.readouterr().err
    assert bench.main(["experts", "--dry-run", "--commit", "main"]) == 2
    assert "'main', not a full SHA" in capsys.readouterr().err
