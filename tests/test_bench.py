"""The benchmark's own promises: valid rows, nothing hidden, no number before a correct result."""

import dataclasses
import importlib
import json
import signal
import subprocess
import sys
import time
import weakref
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))

import bench  # noqa: E402
from bench_lib import (  # noqa: E402
    aims,
    blocks,
    charts,
    child,
    measure,
    moe_layer,
    newest,
    process,
    rows,
    runner,
    table,
    timers,
    warmup,
)
from bench_lib.ops import OPS  # noqa: E402
from bench_lib.rows import RowError  # noqa: E402
from bench_lib.shapes import Point  # noqa: E402
from bench_lib.spec import Impl, Program  # noqa: E402

pytestmark = pytest.mark.skipif(
    not hasattr(torch.nn.functional, "grouped_mm"),
    reason="the benchmark's peers need grouped_mm: torch 2.10",
)

# The contract for everyone who reads the files, spelled out once more on purpose.
FIELDS = {
    "run", "date", "commit", "card", "torch", "triton", "transformers", "op", "impl", "shape", "D",
    "F", "E", "K", "T", "R", "dtype", "pass", "median_ms", "host_us", "tflops", "ceiling_tflops",
    "floor_ms", "saved_bytes", "peak_bytes", "rel_err", "bitwise",
}  # fmt: skip
MODEL_FIELDS = {"moe_ms", "tokens_per_s"}
REQUIRED = {
    "routing": {"torch", "torch_compile"},
    "product_key": {"all_pairs_loop", "torch"},
    "plan": set(),
    "experts": {"hf_grouped_mm", "torch_grouped_mm_early", "scattermoe", "sonicmoe"},
    "lora": {"peft", "axolotl_lora", "split_lora"},
    "decode": {"hf_batched_mm", "hf_grouped_mm"},
    "model": {"peft"},
    "signals": set(),
    "quantised": {"dequant_grouped_mm"},
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TINY = Point("tiny", 16, "fwd+bwd", "fp32")
TINY_LORA = dataclasses.replace(TINY, R=4)


def dry_run(op: str, out: Path | None, *more: str) -> int:
    where = [] if out is None else ["--out", str(out)]
    return bench.main([op, "--dry-run", "--commit", COMMIT, *where, *more])


class HereChild:
    """What :class:`process.Child` does, in this process: starting one costs seconds."""

    def __init__(self, run, op, device, tasks, settings, peers, warm):
        self.op, self.tasks, self.settings = OPS[op], tasks, settings
        self.device = torch.device(device)

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


@pytest.mark.parametrize("op", REQUIRED)
def test_dry_run_rows_hold_every_field(dry_rows, op):
    for row in dry_rows[op]:
        assert set(row) - {"skipped"} == FIELDS | (MODEL_FIELDS if op == "model" else set())
        assert rows.check_row(row) is row
        assert row["op"] == op
        assert row["commit"] == COMMIT
    assert len({row["run"] for row in dry_rows[op]}) == 1
    keys = [tuple(row[name] for name in rows.KEY) for row in dry_rows[op]]
    assert len(keys) == len(set(keys))


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


@pytest.mark.parametrize("op", sorted(REQUIRED.keys() - {"model"}))
def test_measured_rows_are_right_and_ours_repeat(dry_rows, op):
    for row in dry_rows[op]:
        if row["median_ms"] is not None:
            limit = OPS[op].limits[row["dtype"]]
            assert (0 if op == "plan" else 1e-9) <= row["rel_err"] <= limit
            assert row["bitwise"] is True


def test_model_rows_are_of_one_model_and_share_its_loss(dry_rows):
    unpatched, patched = dry_rows["model"]
    assert (unpatched["impl"], patched["impl"]) == ("peft", "moe_patch")
    assert unpatched["rel_err"] is None
    assert patched["rel_err"] < 1e-5
    for row in (unpatched, patched):
        assert 0 < row["moe_ms"] < row["median_ms"]
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["T"] / row["median_ms"])


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


def test_a_tree_without_git_needs_commit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert bench.main(["experts", "--dry-run"]) == 1
    assert "--commit SHA" in capsys.readouterr().err
    assert bench.main(["experts", "--dry-run", "--commit", "main"]) == 1
    assert "'main', not a full SHA" in capsys.readouterr().err


def good_row(**changes) -> dict:
    row = {
        "run": "r1", "date": "2026-11-27T23:00:00Z", "commit": COMMIT, "card": "card",
        "torch": "2.13.0", "triton": None, "transformers": "5.24.0", "op": "experts",
        "impl": "moe_patch:recompute", "shape": "olmoe", "D": 2048, "F": 1024, "E": 64, "K": 8,
        "T": 4096, "R": None, "dtype": "bf16", "pass": "fwd", "median_ms": 2.0, "host_us": 90.5,
        "tflops": 300.0, "ceiling_tflops": 600.0, "floor_ms": 0.5, "saved_bytes": 0,
        "peak_bytes": 5, "rel_err": 3e-3, "bitwise": True,
    }  # fmt: skip
    return row | changes


def test_good_rows_pass():
    rows.check_row(good_row())
    rows.check_row(good_row(shape="E256_K8_G8", op="routing", D=None, F=None, impl="torch"))
    rows.check_row(good_row(impl="sonicmoe", median_ms=None, skipped="not installed"))
    rows.check_row(good_row(op="model", shape="qwen3_30b_12L_4x4096_ckpt", commit=f"{COMMIT}+dirty",
                            moe_ms=1.5, tokens_per_s=1e4))  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"impl": "moe_patsch"}, "impl"),
        ({"impl": "peft:fast"}, "impl"),
        ({"shape": "qwen3_31b"}, "shape"),
        ({"shape": "E128"}, "shape"),
        ({"op": "expert"}, "op"),
        ({"dtype": "float32"}, "dtype"),
        ({"pass": "bwd"}, "pass"),
        ({"date": "2026-11-27T23:00Z"}, "date"),
        ({"commit": "e8d9507"}, "commit"),
        ({"T": None}, "T"),
        ({"T": 4096.0}, "T"),
        ({"median_ms": "2.0"}, "median_ms"),
        ({"median_ms": float("nan")}, "median_ms"),
        ({"median_ms": -1.0}, "median_ms"),
        ({"median_ms": True}, "median_ms"),
        ({"median_ms": None}, "skipped"),
        ({"skipped": "slow"}, "skipped"),
        ({"skipped": "", "median_ms": None}, "skipped"),
        ({"rel_err": None}, "rel_err"),
        ({"bitwise": None}, "bitwise"),
        ({"bitwise": "yes"}, "bitwise"),
        ({"mood": "fine"}, "mood"),
        ({"moe_ms": 1.0}, "moe_ms"),
        ({"op": "model"}, "tokens_per_s"),
    ],
)
def test_bad_rows_are_refused_by_field(changes, named):
    with pytest.raises(RowError, match=rf"\b{named}\b"):
        rows.check_row(good_row(**changes))


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_missing_field_is_named(field):
    row = good_row()
    del row[field]
    with pytest.raises(RowError, match=f"{field} is missing"):
        rows.check_row(row)


def test_nothing_is_written_when_one_row_is_bad(tmp_path):
    out = tmp_path / "new" / "experts.jsonl"
    with pytest.raises(RowError):
        rows.append_rows(out, [good_row(), good_row(op="expert")])
    assert not out.exists()
    rows.append_rows(out, [good_row()])
    rows.append_rows(out, [good_row(run="r2")])
    assert [row["run"] for row in rows.read_rows(out)] == ["r1", "r2"]


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")), ids=str)
def test_committed_rows_are_valid(path):
    if path.stem in rows.OPS:
        assert all(row["op"] == path.stem for row in rows.read_rows(path))


def test_ratios_stay_within_one_run_and_point():
    slow, fast = good_row(median_ms=3.0), good_row(impl="hf_eager", median_ms=1.5)
    assert table.ratio(slow, fast) == 2.0
    for change in ({"run": "r2"}, {"T": 16384}, {"pass": "fwd+bwd"}, {"dtype": "fp16"}):
        with pytest.raises(RowError, match="no ratio across different"):
            table.ratio(slow, fast | change)
    with pytest.raises(RowError, match="hf_eager, which was skipped: absent"):
        table.ratio(slow, fast | {"median_ms": None, "skipped": "absent"})


def test_a_table_is_of_one_run():
    mixed = [good_row(), good_row(run="r2", impl="hf_eager", median_ms=9.0)]
    with pytest.raises(RowError, match="of one run, these rows are of 2"):
        table.markdown(mixed)
    assert table.of_run(mixed, None) == mixed[1:]
    assert table.of_run(mixed, "r1") == mixed[:1]
    with pytest.raises(RowError, match="no rows of run 'r3'; the file has r1, r2"):
        table.of_run(mixed, "r3")


def test_table_shows_ratios_and_reasons():
    text = table.markdown(
        [
            good_row(impl="moe_patch", median_ms=2.0),
            good_row(impl="hf_eager", median_ms=5.0),
            good_row(impl="sonicmoe", median_ms=None, skipped="not installed: sonicmoe"),
        ],
        over="hf_eager",
    )
    assert "| 2 ms, 300 TF, 2.50x | 5 ms, 300 TF | skipped |" in text
    assert "- skipped sonicmoe: not installed: sonicmoe" in text


def test_a_document_shows_the_newest_run_that_has_the_peers():
    def rows_of(run, day, peers, **changes):
        when = {"run": run, "date": f"2026-11-{day}T00:00:00Z", "impl": "moe_patch"}
        return [good_row(**when | {"impl": impl}, **changes) for impl in ("moe_patch", *peers)]

    required = OPS["experts"].required
    full = rows_of("full", 20, required)
    newer = rows_of("newer", 22, required, shape="mixtral")
    alone = rows_of("alone", 25, ())
    on_cpu = rows_of("laptop", 26, required, card="CPU: some")
    lines = newest.newest_lines([*full, *newer, *alone, *on_cpu], OPS["experts"])
    assert [(line.shape, line.ours["run"]) for line in lines] == [
        ("olmoe", "full"),
        ("mixtral", "newer"),
    ]
    assert newest.newest_lines(alone, OPS["experts"])[0].ours["run"] == "alone"


def test_blocks_are_made_from_rows_alone(tmp_path):
    timed = [good_row(impl="moe_patch"), good_row(impl="hf_grouped_mm", median_ms=5.0)]
    skipped = good_row(impl="sonicmoe", median_ms=None, skipped="needs another card")
    rows.append_rows(tmp_path / "experts.jsonl", [*timed, skipped])
    text = "before\n<!-- bench: experts -->\nold\n<!-- end of bench -->\nafter\n"
    new = blocks.rewrite(text, tmp_path)
    assert "| olmoe | 4096 | fwd | 2 | 5 (2.50x) | skipped | 300 (0.50) |" in new
    assert "- sonicmoe skipped at olmoe T=4096 fwd: needs another card" in new
    assert "Run r1 (2026-11-27 23:00 UTC, commit 0123456789)." in new
    assert "old" not in new
    assert blocks.rewrite(new, tmp_path) == new
    with pytest.raises(RowError, match="no block 'expert'; there are headline, experts"):
        blocks.rewrite(text.replace("experts", "expert"), tmp_path)
    assert all(block(tmp_path / "nothing") == blocks.NOTHING for block in blocks.BLOCKS.values())


def test_aims_are_judged_within_one_run(tmp_path):
    def row(**changes):
        return good_row(**{"op": "lora", "impl": "moe_patch", "shape": "qwen3_30b", "T": 16384,
                           "pass": "fwd+bwd", "tflops": 400.0} | changes)  # fmt: skip

    bases = [row(run=run, median_ms=ms) for run, ms in (("r1", 5.0), ("r2", 9.0))]
    adapted = [row(R=16, median_ms=6.0), row(R=16, impl="peft", median_ms=18.0)]
    rows.append_rows(tmp_path / "lora.jsonl", [*adapted, bases[0]])
    found = {line[1]: line[3:] for line in aims.table(tmp_path, aims.all_aims())}
    assert found["over the fastest peer"] == ["≥ 2.5", "3.00", "met"]
    assert found["times the frozen base"] == ["≤ 1.35", "1.20", "met"]
    assert found["share of bmm"] == ["≥ 0.65", "0.67", "met"]
    other = tmp_path / "other"
    rows.append_rows(other / "lora.jsonl", [*adapted, bases[1]])
    assert "times the frozen base" not in {line[1] for line in aims.table(other, aims.all_aims())}


def test_documents_are_not_older_than_their_rows():
    bench.write_docs(check=True)


def test_charts_are_drawn_and_repeat(tmp_path):
    pytest.importorskip("matplotlib", reason="charts need the extra plots")
    impls = ("moe_patch", "hf_grouped_mm")
    timed = [good_row(impl=impl, **{"pass": "fwd+bwd"}) for impl in impls]
    rows.append_rows(tmp_path / "experts.jsonl", timed)
    (first,) = charts.draw(tmp_path, tmp_path / "a")
    (second,) = charts.draw(tmp_path, tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()
    assert "hf_grouped_mm" in first.read_text()


def test_an_absent_peer_is_skipped_with_the_reason():
    op = OPS["experts"]
    absent = Impl("liger", lambda inputs, point: importlib.import_module("no_such_peer"))
    op = dataclasses.replace(op, impls=(absent,))
    cache = child.Cache(op, torch.device("cpu"), bench.DRY_SETTINGS)
    found = child.perform(op, child.Task("liger", TINY), cache, bench.DRY_SETTINGS)
    assert found == {"skipped": "not installed: No module named 'no_such_peer'"}


def fake_child(tmp_path, monkeypatch, code: str) -> runner.Plan:
    script = tmp_path / "fake.py"
    script.write_text(
        "import json, sys, time\n"
        "job = json.load(open(sys.argv[2]))\n"
        "out = open(job['results'], 'a')\n"
        "sys.stdin.readline()\n"
        "def deliver(fields): print(json.dumps({'fields': fields}), file=out, flush=True)\n"
        f"names = [task['impl'] for task in job['tasks']]\n{code}\n"
    )
    monkeypatch.setattr(process, "SCRIPT", script)
    return runner.Plan(OPS["experts"], (), (TINY,), "cpu", None, 1.5, bench.DRY_SETTINGS)


TASKS = [child.Task(name, TINY) for name in ("hf_eager", "scattermoe", "liger")]


def test_a_crash_costs_one_point_and_no_other(tmp_path, monkeypatch):
    plan = fake_child(
        tmp_path,
        monkeypatch,
        "for name in names:\n"
        "    if name == 'scattermoe': sys.exit('an illegal memory access')\n"
        "    deliver({'median_ms': 1.0, 'run': job['run']})",
    )
    found = dict(runner.run_group("run-7", runner.Group(plan, None, tuple(TASKS))))
    assert found[TASKS[0]] == found[TASKS[2]] == {"median_ms": 1.0, "run": "run-7"}
    assert found[TASKS[1]] == {"skipped": "process ended with 1: an illegal memory access"}


@pytest.mark.parametrize("peer", [None, OPS["experts"].impl("scattermoe")], ids=["ours", "peer"])
def test_what_hangs_is_stopped_after_its_budget(tmp_path, monkeypatch, peer):
    plan = fake_child(
        tmp_path,
        monkeypatch,
        "for name in names:\n"
        "    if name == 'scattermoe': time.sleep(60)\n"
        "    deliver({'median_ms': 1.0})",
    )
    found = dict(runner.run_group("run-7", runner.Group(plan, peer, tuple(TASKS))))
    assert found[TASKS[1]] == {"skipped": "took longer than 2 s"}
    assert found[TASKS[0]] == found[TASKS[2]] == {"median_ms": 1.0}


def test_peers_run_in_processes_of_their_own():
    op = OPS["experts"]
    plan = runner.Plan(op, op.impls, (TINY,), "cuda", None, 60.0, bench.DRY_SETTINGS)
    shared, *alone = runner.groups(plan)
    assert shared.peer is None
    assert {task.impl for task in shared.tasks} >= {child.BOUNDS, "moe_patch", "hf_grouped_mm"}
    assert [group.peer.name for group in alone] == ["scattermoe", "sonicmoe", "liger"]
    assert all({task.impl for task in g.tasks} == {g.peer.name} for g in alone)


def spoiled(leaf: str | None, factor: float):
    """The plain grouped_mm layer with its output, or one gradient, multiplied by ``factor``."""

    def build(inputs, point):
        program = OPS["experts"].impl("torch_grouped_mm_early").build(inputs, point)
        if leaf is None:
            return Program(lambda: program.forward() * factor, program.leaves)
        return Program(program.forward, program.leaves, {leaf: lambda grad: grad * factor})

    return build


@pytest.mark.parametrize("leaf", [None, "x", "weights", "w13", "w2"])
@pytest.mark.parametrize("factor", [1 + 1e-4, float("nan")])
def test_a_wrong_output_or_gradient_is_never_timed(leaf, factor):
    op = OPS["experts"]
    inputs = op.make_inputs(TINY, torch.device("cpu"))
    expected = op.reference(TINY, inputs)
    program = spoiled(leaf, factor)(inputs, TINY)
    with pytest.raises(measure.WrongResultError, match="above the limit"):
        measure.check(op, TINY, program, inputs, expected)
    assert measure.check(op, TINY, spoiled(leaf, 1.0)(inputs, TINY), inputs, expected) < 1e-5


def test_the_check_covers_every_adapter_gradient():
    inputs = moe_layer.make_layer(TINY_LORA, torch.device("cpu"), train_base=False)
    expected = moe_layer.layer_reference(TINY_LORA, inputs)
    assert set(expected.by_token) == {"out", "x", "weights"}
    assert set(expected.by_expert) == set(moe_layer.FACTORS)


def test_results_that_change_between_passes_are_noticed():
    op = OPS["experts"]
    inputs = op.make_inputs(TINY, torch.device("cpu"))
    program = op.impl("torch_grouped_mm_early").build(inputs, TINY)
    calls = iter(range(100))

    def drifting():
        return program.forward() + (1e-3 if next(calls) == 4 else 0.0)

    assert measure.repeatable(op, TINY, program, inputs.dout_TD, 6)
    changed = Program(drifting, program.leaves)
    assert not measure.repeatable(op, TINY, changed, inputs.dout_TD, 6)


def test_saved_bytes_count_each_storage_once_and_no_input():
    x = torch.randn(10, requires_grad=True)
    cpu = torch.device("cpu")

    def forward():
        y = x.exp()
        return (y * y[:]).sin() * x

    # y (saved by exp and, through a view, by mul), y * y and sin(y * y); x is an input.
    assert timers.saved_bytes(forward, [x], cpu) == 3 * 40
    assert timers.saved_bytes(forward, [], cpu) == 4 * 40


def test_counting_saved_bytes_keeps_no_graph_alive():
    x, outputs = torch.randn(4, 8, requires_grad=True), []

    def forward():
        # softmax saves its own output
        out = torch.softmax(x, dim=-1)
        outputs.append(weakref.ref(out))
        return out * 2

    timers.saved_bytes(forward, [x], torch.device("cpu"))
    assert outputs[0]() is None


@pytest.mark.parametrize(
    ("op", "R", "passes", "flops"),
    [
        ("experts", None, "fwd", 6),
        ("experts", None, "fwd+bwd", 18),
        ("lora", None, "fwd+bwd", 12),
        ("lora", 16, "fwd+bwd", 12),
    ],
)
def test_flops_and_ceiling_are_the_same_work(op, R, passes, flops):
    T, K, D, F = 4096, 8, 2048, 768
    work = OPS[op].work(Point("qwen3_30b", T, passes, "bf16", R))
    assert work.flops == flops * T * K * D * F
    assert sum(2 * b * m * k * n for b, m, k, n in work.matmuls) == work.flops


def test_moved_bytes_are_inputs_once_and_outputs_once():
    op = OPS["experts"]
    inputs = op.make_inputs(TINY, torch.device("cpu"))
    read = [*inputs.leaves().values(), inputs.ids_TK]
    forward = sum(t.nbytes for t in read) + inputs.x_TD.nbytes
    backward = inputs.dout_TD.nbytes + sum(t.nbytes for t in inputs.leaves().values())
    assert op.work(dataclasses.replace(TINY, passes="fwd")).moved_bytes == forward
    assert op.work(TINY).moved_bytes == forward + backward
    assert op.input_bytes(TINY) == sum(t.nbytes for t in read) + inputs.dout_TD.nbytes


def peers_script(*arguments: str) -> subprocess.CompletedProcess:
    command = ["bash", str(ROOT / "scripts" / "peers.sh"), *arguments]
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_peers_unpack(tmp_path):
    assert "run 'download' first" in peers_script("unpack", str(tmp_path)).stderr
    (tmp_path / "packed").mkdir()
    with zipfile.ZipFile(tmp_path / "packed" / "a-1.whl", "w") as wheel:
        wheel.writestr("peer/__init__.py", "x = 1")
    kernels = tmp_path / "kernels" / "other"
    kernels.mkdir(parents=True)
    (kernels / "k.py").write_text("y = 2")
    archive = tmp_path / "packed" / "k.tar.xz"
    subprocess.run(["tar", "-C", tmp_path / "kernels", "-cJf", archive, "other"], check=True)
    assert peers_script("unpack", str(tmp_path)).returncode == 0
    assert (tmp_path / "site" / "peer" / "__init__.py").read_text() == "x = 1"
    assert (tmp_path / "site" / "other" / "k.py").read_text() == "y = 2"
    assert peers_script("fetch").returncode == 2


def test_a_child_ends_with_its_parent(tmp_path):
    job = child.Job("run-7", "experts", "cpu", (), bench.DRY_SETTINGS, str(tmp_path / "found"))
    (tmp_path / "job").write_text(job.to_json())
    code = (
        "import sys, time; from pathlib import Path; sys.path[:0] = sys.argv[1:3]\n"
        "from bench_lib import child\n"
        "def measure_all(*given): print('measuring', flush=True); time.sleep(60)\n"
        "child._measure_all = measure_all\n"
        "child.main(Path(sys.argv[3]))"
    )
    process_ = subprocess.Popen(
        [sys.executable, "-c", code, str(ROOT / "scripts"), str(ROOT), str(tmp_path / "job")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    process_.stdin.write("go\n")
    process_.stdin.flush()
    assert process_.stdout.readline() == "measuring\n"
    process_.stdin.close()
    assert process_.wait(timeout=20) == -signal.SIGKILL


def test_a_warm_up_compiles_each_kernel_in_one_process():
    def points(name, impl):
        op = OPS[name]
        grid = runner.grid(op, "cuda", None, None, None, None, None)
        plan = runner.Plan(op, op.impls, grid, "cuda", None, 60.0, bench.DRY_SETTINGS)
        return [
            {(p.shape, p.T) for p in group} for group in warmup.warm_points(plan, op.impl(impl))
        ]

    assert points("experts", "hf_grouped_mm") == []
    assert points("experts", "moe_patch") == [{("qwen3_30b", 4096)}]
    assert points("lora", "axolotl_lora") == [{(name, 4096)} for name in OPS["lora"].shapes]
    assert points("decode", "moe_patch")[0] == {("qwen3_30b", T) for T in OPS["decode"].tokens}


def test_what_is_left_at_the_deadline_has_no_row(tmp_path, monkeypatch):
    code = (
        "for name in names:\n"
        "    if name == 'hf_eager': time.sleep(60)\n"
        "    deliver({'median_ms': 1.0, 'bitwise': True, 'rel_err': 1e-3})"
    )
    op = OPS["experts"]
    impls = tuple(op.impl(name) for name in ("torch_grouped_mm_early", "hf_eager", "liger"))
    plan = dataclasses.replace(fake_child(tmp_path, monkeypatch, code), impls=impls, budget_s=60.0)
    where = {name: good_row()[name] for name in ("run", "date", "commit", "card", "torch")}
    found, versions = [], {"triton": None, "transformers": None}
    measured = runner.execute([plan], where | versions, time.monotonic() + 1.5)
    with pytest.raises(process.Timeout, match="not finished: experts"):
        found.extend(row["impl"] for row in measured)
    assert found == ["torch_grouped_mm_early", "liger"], "what cannot run is known all the same"


def test_what_a_preset_leaves_out_says_why_unless_it_ran_elsewhere(tmp_path, monkeypatch):
    code = "for name in names: deliver({'median_ms': 1.0, 'bitwise': True, 'rel_err': 1e-3})"
    op = OPS["lora"]
    points = (TINY_LORA, dataclasses.replace(TINY_LORA, T=32))
    some = dataclasses.replace(
        fake_child(tmp_path, monkeypatch, code),
        op=op, impls=(op.impl("peft"), op.impl("axolotl_lora")), points=points,
        device="cuda", left_out={"axolotl_lora": "too slow"},
    )  # fmt: skip
    one = dataclasses.replace(some, impls=some.impls[1:], points=points[:1], left_out={})
    where = {name: good_row()[name] for name in ("run", "date", "commit", "card", "torch")}
    found = list(runner.execute([some, one], where | {"triton": None, "transformers": None}))
    keys = [(row["impl"], row["T"], row.get("skipped")) for row in found]
    assert sorted(keys, key=str) == [
        ("axolotl_lora", 16, None),
        ("axolotl_lora", 32, "too slow"),
        ("peft", 16, None),
        ("peft", 32, None),
    ]


def test_what_hangs_or_crashes_twice_is_not_tried_again(tmp_path, monkeypatch):
    code = (
        "for task in job['tasks']:\n"
        "    if task['impl'] == 'liger': time.sleep(60)\n"
        "    if task['impl'] == 'scattermoe': sys.exit('an illegal memory access')\n"
        "    deliver({'median_ms': 1.0})"
    )
    plan = fake_child(tmp_path, monkeypatch, code)
    sizes = [dataclasses.replace(TINY, T=T) for T in (8, 16, 32)]
    names = ("scattermoe", "liger", "hf_eager")
    tasks = tuple(child.Task(name, size) for size in sizes for name in names)
    found = list(runner.run_group("run-7", runner.Group(plan, None, tasks)))
    reasons = {name: [f.get("skipped") for t, f in found if t.impl == name] for name in names}
    assert len(found) == len(tasks)
    # Their rows need the bounds of their points, which the same group measures.
    assert sorted(task.impl for task, _ in found[-3:]) == ["liger", "liger", "scattermoe"]
    again = "not tried: it hung or crashed at an earlier point"
    assert reasons["liger"] == ["took longer than 2 s", again, again]
    assert reasons["scattermoe"][:2] == ["process ended with 1: an illegal memory access"] * 2
    assert reasons["scattermoe"][2] == again
    assert reasons["hf_eager"] == [None] * 3
