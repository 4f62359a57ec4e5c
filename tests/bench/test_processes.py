"""The benchmark's processes: budgets, crashes, deadlines, warming up."""

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import bench
import pytest
import torch
from bench_lib import child, process, runner, warmup
from bench_lib.ops import OPS

from tests.support import bench_cases
from tests.support.bench_cases import ROOT, TINY, TINY_LORA, logged_row
from tests.support.limits import HANG_S

pytestmark = bench_cases.NEEDS_GROUPED_MM


@pytest.fixture
def clock(tmp_path, monkeypatch):
    """A clock for budgets that advances only while a fake child hangs: no machine is too slow."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        # Read the results delivered so far before the next sleep.
        now[0] += 3600.0 * len(list(tmp_path.glob("bench-*/hangs")))

    fake = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for module in (process, runner):
        monkeypatch.setattr(module, "time", fake)
    return fake


WHERE = {name: logged_row()[name] for name in ("run", "date", "commit", "card", "machine", "torch")}


def fake_child(tmp_path, monkeypatch, code: str) -> runner.Plan:
    script = tmp_path / "fake.py"
    script.write_text(
        "import json, sys, time\nfrom pathlib import Path\n"
        "job = json.load(open(sys.argv[2]))\n"
        "out = open(job['results'], 'a')\n"
        "open(job['imported'], 'w')\n"
        "sys.stdin.readline()\n"
        "def hang(): Path(job['results']).with_name('hangs').touch(); time.sleep(600)\n"
        "def deliver(fields): print(json.dumps({'fields': fields}), file=out, flush=True)\n"
        f"names = [task['impl'] for task in job['tasks']]\n{code}\n"
    )
    monkeypatch.setattr(process, "SCRIPT", script)
    return runner.Plan(OPS["experts"], (), (TINY,), "cpu", None, 1.5, bench.DRY_SETTINGS)


TASKS = [child.Task(name, TINY) for name in ("hf_eager", "scattermoe", "liger")]


def test_a_crash_costs_one_point_and_no_other(tmp_path, monkeypatch, clock):
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
def test_what_hangs_is_stopped_after_its_budget(tmp_path, monkeypatch, clock, peer):
    plan = fake_child(
        tmp_path,
        monkeypatch,
        "for name in names:\n    if name == 'scattermoe': hang()\n    deliver({'median_ms': 1.0})",
    )
    found = dict(runner.run_group("run-7", runner.Group(plan, peer, tuple(TASKS))))
    assert found[TASKS[1]] == {"skipped": "took longer than 2 s"}
    assert found[TASKS[0]] == found[TASKS[2]] == {"median_ms": 1.0}


def test_imports_are_waited_for_but_not_beyond_an_end_or_a_deadline(tmp_path, monkeypatch, clock):
    plan = fake_child(tmp_path, monkeypatch, "")
    script, touch = tmp_path / "fake.py", "Path(job['imported']).touch()\n"
    head = "import json, sys, time\nfrom pathlib import Path\njob = json.load(open(sys.argv[2]))\n"
    group = runner.Group(plan, None, tuple(TASKS))
    for body, deadline, imported in (
        (f"time.sleep(1)\n{touch}time.sleep(600)", None, True),
        ("sys.exit(1)", None, False),
        ("time.sleep(600)", clock.monotonic() - 1, False),
    ):
        script.write_text(head + body)
        started = group.start("run-7", TASKS)
        started.wait_for_imports(deadline)
        assert started._imported.exists() == imported
        started.stop()


def test_nothing_imports_while_something_is_measured(monkeypatch):
    happened = []

    class Recorded:
        def __init__(self, run, op, device, tasks, *others):
            self.tasks = tasks
            happened.append("start")

        def wait_for_imports(self, deadline):
            happened.append("wait")

        def results(self, budget_s, deadline):
            happened.append("measure")
            return iter([{"skipped": "not here"}] * len(self.tasks))

        def stop(self):
            pass

    monkeypatch.setattr(runner, "Child", Recorded)
    monkeypatch.setattr(runner, "TOGETHER", 2)
    op = OPS["experts"]
    impls = tuple(op.impl(name) for name in ("moe_patch", "scattermoe", "sonicmoe"))
    plan = runner.Plan(op, impls, (TINY,), "cuda", None, 60.0, bench.DRY_SETTINGS)
    where = dict(WHERE)
    where |= {"triton": "3.6.0", "transformers": "5.17.0"}
    found = list(runner.execute([plan], where))
    assert [row["impl"] for row in found] == ["moe_patch", "scattermoe", "sonicmoe"]
    together = ["start", "start", "wait", "wait", "measure", "measure"]
    assert happened == [*together, "start", "wait", "measure"]


PEERS = ["scattermoe", "sonicmoe", "liger"]


def test_peers_run_in_processes_of_their_own():
    op = OPS["experts"]
    plan = runner.Plan(op, op.impls, (TINY,), "cuda", None, 60.0, bench.DRY_SETTINGS)
    shared, *alone = runner.groups(plan)
    assert shared.peer is None
    assert {task.impl for task in shared.tasks} >= {child.BOUNDS, "moe_patch", "hf_grouped_mm"}
    assert [group.peer.name for group in alone] == ["moe_patch:portable", *PEERS]
    assert all({task.impl for task in g.tasks} == {g.peer.name} for g in alone)


def test_a_plain_process_times_ours_first_and_nothing_else(monkeypatch):
    def first(name):
        op = OPS[name]
        plan = runner.Plan(
            op, op.impls, (TINY,), "cuda", None, 60.0, bench.DRY_SETTINGS, plain=True
        )
        return next(runner.groups(plan))

    group = first("experts")
    assert group.tasks == (child.Task("moe_patch", TINY),)
    assert group.plan.settings.plain
    # Graphs are timed without the launches between events. A step has its own timing.
    for name in ("routing", "model"):
        assert not first(name).plan.settings.plain
    checked = []
    monkeypatch.setattr(child.measure, "check", lambda *given: checked.append(given))
    cache = child.Cache(group.plan.op, torch.device("cpu"), group.plan.settings)
    found = child.perform(group.plan.op, group.tasks[0], cache, group.plan.settings)
    assert found.keys() == {"median_ms"}
    assert checked == []


def test_a_plain_time_stands_in_the_row_of_its_point(tmp_path, monkeypatch):
    code = (
        "ms = 1.0 if job['settings']['plain'] else 3.0\n"
        "fields = {'bitwise': True, 'rel_err': 1e-3}\n"
        "for task in job['tasks']: deliver({'median_ms': ms + task['point']['T'], **fields})"
    )
    plan = fake_child(tmp_path, monkeypatch, code)
    points = (TINY, dataclasses.replace(TINY, T=32))
    impls = (plan.op.impl("moe_patch"), plan.op.impl("torch_grouped_mm_early"))
    plan = dataclasses.replace(plan, impls=impls, points=points, plain=True)
    found = list(runner.execute([plan], WHERE | {"triton": None, "transformers": None}))
    assert [(row["T"], row["median_ms"], row["plain_ms"]) for row in found] == [
        (16, 19.0, 17.0),
        (16, 19.0, None),
        (32, 35.0, 33.0),
        (32, 35.0, None),
    ]


def test_a_child_ends_with_its_parent(tmp_path):
    files = str(tmp_path / "found"), str(tmp_path / "imported")
    job = child.Job("run-7", "experts", "cpu", (), bench.DRY_SETTINGS, *files)
    (tmp_path / "job").write_text(job.to_json())
    code = (
        "import sys, time; from pathlib import Path; sys.path[:0] = sys.argv[1:3]\n"
        "from bench_lib import child\n"
        "def measure_all(*given): print('measuring', flush=True); time.sleep(7200)\n"
        "child._measure_all = measure_all\n"
        "child.main(Path(sys.argv[3]))"
    )
    process_ = subprocess.Popen(
        [sys.executable, "-c", code, str(ROOT / "benchmarks"), str(ROOT), str(tmp_path / "job")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    process_.stdin.write("go\n")
    process_.stdin.flush()
    assert process_.stdout.readline() == "measuring\n"
    process_.stdin.close()
    assert process_.wait(timeout=HANG_S) == -signal.SIGKILL


def test_what_was_tuned_among_other_processes_is_forgotten(tmp_path):
    """Forget only later tuning: keep kernels and the earlier choices of a measuring process."""
    folder = tmp_path / "quack" / "KEY"
    folder.mkdir(parents=True)
    for name, when in (("old.autotune.json", 100), ("new.autotune.json", 200), ("new.o", 200)):
        (folder / name).touch()
        os.utime(folder / name, (when, when))
    warmup.forget_tuning(tmp_path, since=150)
    assert sorted(file.name for file in folder.iterdir()) == ["new.o", "old.autotune.json"]


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


def test_what_is_left_at_the_deadline_has_no_row(tmp_path, monkeypatch, clock):
    code = (
        "for name in names:\n"
        "    if name == 'hf_eager': hang()\n"
        "    deliver({'median_ms': 1.0, 'bitwise': True, 'rel_err': 1e-3})"
    )
    op = OPS["experts"]
    impls = tuple(op.impl(name) for name in ("torch_grouped_mm_early", "hf_eager", "liger"))
    plan = dataclasses.replace(fake_child(tmp_path, monkeypatch, code), impls=impls, budget_s=60.0)
    where = dict(WHERE)
    found, versions = [], {"triton": None, "transformers": None}
    measured = runner.execute([plan], where | versions, clock.monotonic() + 1.5)
    with pytest.raises(process.Timeout, match="not finished: experts"):
        found.extend(row["impl"] for row in measured)
    assert found == ["torch_grouped_mm_early", "liger"], "what cannot run is known all the same"


def test_what_a_preset_leaves_out_says_why_unless_it_ran_elsewhere(tmp_path, monkeypatch, clock):
    code = "for name in names: deliver({'median_ms': 1.0, 'bitwise': True, 'rel_err': 1e-3})"
    op = OPS["lora"]
    points = (TINY_LORA, dataclasses.replace(TINY_LORA, T=32))
    some = dataclasses.replace(
        fake_child(tmp_path, monkeypatch, code),
        op=op, impls=(op.impl("peft"), op.impl("axolotl_lora")), points=points,
        device="cuda", left_out={"axolotl_lora": "too slow"},
    )  # fmt: skip
    one = dataclasses.replace(some, impls=some.impls[1:], points=points[:1], left_out={})
    where = dict(WHERE)
    found = list(runner.execute([some, one], where | {"triton": None, "transformers": None}))
    keys = [(row["impl"], row["T"], row.get("skipped")) for row in found]
    assert sorted(keys, key=str) == [
        ("axolotl_lora", 16, None),
        ("axolotl_lora", 32, "too slow"),
        ("peft", 16, None),
        ("peft", 32, None),
    ]


def test_what_hangs_or_crashes_twice_is_not_tried_again(tmp_path, monkeypatch, clock):
    code = (
        "for task in job['tasks']:\n"
        "    if task['impl'] == 'liger': hang()\n"
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
    # These rows come last: they need the bounds of their points, measured by the same group.
    assert sorted(task.impl for task, _ in found[-3:]) == ["liger", "liger", "scattermoe"]
    again = "not tried: it hung or crashed at an earlier point"
    assert reasons["liger"] == ["took longer than 2 s", again, again]
    assert reasons["scattermoe"][:2] == ["process ended with 1: an illegal memory access"] * 2
    assert reasons["scattermoe"][2] == again
    assert reasons["hf_eager"] == [None] * 3
