"""The parent: plans the grid, hands it to child processes, turns what they found into rows.

It measures nothing itself. Everything that needs no third-party code shares one child, so that its
rows are taken side by side; each peer gets a child of its own. Every implementation has a time
budget per point. A child that dies or hangs costs the point it was at, which is recorded with the
reason, and no other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_lib.child import BOUNDS, Job, Task
from bench_lib.measure import Settings
from bench_lib.rows import Row, check_row
from bench_lib.shapes import SHAPES, Point
from bench_lib.spec import Impl, Op

SCRIPT = Path(__file__).resolve().parent.parent / "bench.py"
POLL_S = 0.1


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one invocation runs.

    Attributes:
        op: the op.
        impls: contestants, in the order of the rows.
        points: the grid.
        device: "cuda" or "cpu".
        peers: the folder of third-party packages, or None.
        budget_s: seconds an implementation may take for one point, its compilation included.
        settings: how thorough.
    """

    op: Op
    impls: tuple[Impl, ...]
    points: tuple[Point, ...]
    device: str
    peers: Path | None
    budget_s: float
    settings: Settings


def grid(
    op: Op,
    device: str,
    shapes: tuple[str, ...] | None,
    tokens: tuple[int, ...] | None,
    passes: tuple[str, ...] | None,
    dtype: str | None,
    ranks: tuple[int | None, ...] | None,
) -> tuple[Point, ...]:
    """The points of a run; None takes the op's or the shape's own default."""
    names = shapes or (("cpu_e64",) if device == "cpu" else op.shapes)
    return tuple(
        Point(name, T, one_pass, dtype or SHAPES[name].dtype or op.dtype, R)
        for name in names
        for T in tokens or SHAPES[name].tokens or op.tokens
        for R in ranks or op.ranks
        for one_pass in passes or op.passes
    )


def known_obstacle(impl: Impl, device: str) -> str | None:
    """Why an implementation is not even started, or None."""
    if impl.needs_cuda and device != "cuda":
        return f"needs a CUDA device, this run is on {device}"
    return None


def groups(plan: Plan) -> Iterator[tuple[Impl | None, list[Task]]]:
    """Tasks that share a process: first all that is not a peer (None), then one group per peer."""
    home = [impl for impl in plan.impls if not impl.peer]
    shared = []
    for point in plan.points:
        shared.append(Task(BOUNDS, point))
        shared += [Task(impl.name, point) for impl in home if impl.covers(point)]
    yield None, shared
    for impl in plan.impls:
        if impl.peer and known_obstacle(impl, plan.device) is None:
            yield impl, [Task(impl.name, point) for point in plan.points if impl.covers(point)]


def _environment(peers: Path | None) -> dict[str, str]:
    env = dict(os.environ)
    if peers is not None:
        paths = [peers, peers / "nvidia_cutlass_dsl" / "python_packages"]
        inherited = [env["PYTHONPATH"]] if "PYTHONPATH" in env else []
        env["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *inherited])
    return env


def _read_results(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line)["fields"] for line in lines if line.endswith("\n")]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"


def _run_child(
    plan: Plan, run: str, peer: Impl | None, tasks: list[Task], folder: Path
) -> Iterator[dict[str, Any]]:
    """Results of one process as they come; on a crash or a hang the last one says why."""
    job_file, found_file, log_file = (folder / name for name in ("job", "found", "log"))
    job = Job(run, plan.op.name, plan.device, tuple(tasks), plan.settings, str(found_file))
    job_file.write_text(job.to_json(), encoding="utf-8")
    with log_file.open("w", encoding="utf-8") as log:
        child = subprocess.Popen(
            [sys.executable, str(SCRIPT), "child", str(job_file)],
            stdout=log, stderr=subprocess.STDOUT, env=_environment(plan.peers if peer else None),
            start_new_session=True,
        )  # fmt: skip
    done, since, alive = 0, time.monotonic(), True
    try:
        while alive:
            alive = child.poll() is None
            for fields in _read_results(found_file)[done:]:
                done, since = done + 1, time.monotonic()
                yield fields
            if alive and time.monotonic() - since > plan.budget_s:
                yield {"skipped": f"took longer than {plan.budget_s:.0f} s"}
                return
            time.sleep(POLL_S if alive else 0)
    finally:
        # The whole session: some peers compile in processes of their own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if done < len(tasks):
        reason = _last_line(log_file.read_text(encoding="utf-8", errors="replace"))
        yield {"skipped": f"process ended with {child.returncode}: {reason}"}


def run_tasks(
    plan: Plan, run: str, peer: Impl | None, tasks: list[Task]
) -> Iterator[tuple[Task, dict[str, Any]]]:
    """Every task with what it yields, however many processes that takes."""
    pending = list(tasks)
    while pending:
        with tempfile.TemporaryDirectory(prefix=f"bench-{run}-") as folder:
            for fields in _run_child(plan, run, peer, pending.copy(), Path(folder)):
                yield pending.pop(0), fields


def make_row(plan: Plan, where: Row, impl: Impl, point: Point, found: dict, bounds: dict) -> Row:
    """One checked row from what was found for an implementation and for the point's bounds."""
    s, work = point.sizes, plan.op.work(point)
    skipped = found.get("skipped")
    ceiling_ms = bounds.get("ceiling_ms")

    def rate(ms: float | None) -> float | None:
        return None if ms is None or work.flops is None else work.flops / ms / 1e9

    row = {
        **where, "op": plan.op.name, "impl": impl.name, "shape": point.shape,
        "D": s.D, "F": s.F, "E": s.E, "K": s.K, "T": point.T, "R": point.R,
        "dtype": point.dtype, "pass": point.passes,
        "median_ms": found.get("median_ms"), "host_us": found.get("host_us"),
        "tflops": rate(found.get("median_ms")), "ceiling_tflops": rate(ceiling_ms),
        "floor_ms": bounds.get("floor_ms"), "saved_bytes": found.get("saved_bytes"),
        "peak_bytes": found.get("peak_bytes"), "rel_err": found.get("rel_err"),
        "bitwise": found.get("bitwise"),
    }  # fmt: skip
    return check_row(row if skipped is None else row | {"skipped": skipped})


def execute(plan: Plan, where: Row) -> Iterator[Row]:
    """Run a plan.

    Args:
        plan: what to run.
        where: the fields that all rows share (run, date, commit, card, versions).

    Yields:
        Every row as soon as it is known, skipped ones included.
    """
    bounds: dict[Point, dict[str, Any]] = {}
    for peer, tasks in groups(plan):
        for task, found in run_tasks(plan, where["run"], peer, tasks):
            if task.impl == BOUNDS:
                bounds[task.point] = found
            else:
                impl = plan.op.impl(task.impl)
                yield make_row(plan, where, impl, task.point, found, bounds[task.point])
    for impl in plan.impls:
        obstacle = known_obstacle(impl, plan.device)
        for point in plan.points if obstacle else ():
            if impl.covers(point):
                yield make_row(plan, where, impl, point, {"skipped": obstacle}, bounds[point])
