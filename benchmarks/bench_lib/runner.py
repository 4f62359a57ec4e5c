"""The parent: plan the grid, distribute it to child processes, turn their results into rows.

It measures nothing itself. Implementations without third-party code share one child, so that their
rows are taken side by side; each peer has a child of its own. One child measures at a time. The
next ones have imported before that, many at once, and are idle meanwhile. Every implementation has
a time budget per point. A child that dies or hangs loses only its current point, which is recorded
with the reason.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_lib import clocks
from bench_lib.child import BOUNDS, Task
from bench_lib.measure import Settings
from bench_lib.process import LOST, Child, Timeout
from bench_lib.rows import OF_OP, OURS, Row, check_row
from bench_lib.shapes import SHAPES, Point
from bench_lib.spec import Impl, Op

# Processes that import at once, as many as cores allow: a small op takes less time than its
# imports. None imports while another one measures, because that would change its host time.
TOGETHER = max(1, min(12, (os.cpu_count() or 1) // 2))


@dataclasses.dataclass(frozen=True)
class Plan:
    """The part of one op that one invocation runs.

    Attributes:
        op: the op.
        impls: contestants, in the order of the rows.
        points: the grid.
        device: "cuda" or "cpu".
        peers: the folder of third-party packages, or None.
        budget_s: seconds that an implementation may take for one point, compilation included.
        settings: how thorough.
        left_out: implementations whose rows only say why they did not run.
        plain: time ours in a plain process too, for the field ``plain_ms``.
    """

    op: Op
    impls: tuple[Impl, ...]
    points: tuple[Point, ...]
    device: str
    peers: Path | None
    budget_s: float
    settings: Settings
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    plain: bool = False


@dataclasses.dataclass(frozen=True)
class Group:
    """Tasks that share a process: those of one peer, or (None) of everyone who is not a peer."""

    plan: Plan
    peer: Impl | None
    tasks: tuple[Task, ...]

    def start(self, run: str, tasks: Sequence[Task], *, warm: bool = False) -> Child:
        """Start a process for some of the tasks."""
        plan = self.plan
        peers = plan.peers if self.peer else None
        return Child(run, plan.op.name, plan.device, tuple(tasks), plan.settings, peers, warm)


def grid(
    op: Op,
    device: str,
    shapes: Sequence[str] | None,
    tokens: Sequence[int] | None,
    passes: Sequence[str] | None,
    dtype: str | None,
    ranks: Sequence[int | None] | None,
) -> tuple[Point, ...]:
    """Return the points of a run; None takes the op's or the shape's own default.

    At each size backward comes first, because its repeats include those of forward.
    """
    names = shapes or (("cpu_e64",) if device == "cpu" else op.shapes)
    return tuple(
        Point(name, T, one_pass, one_dtype, R)
        for name in names
        for T in tokens or SHAPES[name].tokens or op.tokens
        for R in ranks or op.ranks
        for one_dtype in ([dtype] if dtype else op.dtypes_of(SHAPES[name]))
        for one_pass in sorted(passes or op.passes, reverse=True)
    )


def why_not_started(plan: Plan, impl: Impl) -> str | None:
    """Say why an implementation is not even started, or return None."""
    if impl.needs_cuda and plan.device != "cuda":
        return f"needs a CUDA device, this run is on {plan.device}"
    return plan.left_out.get(impl.name)


def groups(plan: Plan) -> Iterator[Group]:
    """Yield first a group of all that is not a peer (with the bounds), then one group per peer.

    The plain process comes before: its times belong into the rows of the next group. Both passes of
    an implementation at a size are neighbours, since they share what they are built from.
    """
    runnable = [impl for impl in plan.impls if why_not_started(plan, impl) is None]
    home = [impl for impl in runnable if not impl.peer]
    shared: list[Task] = []
    for size in dict.fromkeys(dataclasses.replace(point, passes="") for point in plan.points):
        points = [p for p in plan.points if dataclasses.replace(p, passes="") == size]
        shared += [Task(BOUNDS, point) for point in points]
        shared += [Task(i.name, point) for i in home for point in points if i.covers(point)]
    yield from plain_group(plan)
    yield Group(plan, None, tuple(shared))
    for impl in runnable:
        tasks = tuple(Task(impl.name, point) for point in plan.points if impl.covers(point))
        if impl.peer and tasks:
            yield Group(plan, impl, tasks)


def plain_group(plan: Plan) -> Iterator[Group]:
    """Yield a process that only times ours, if that is requested and makes sense.

    Small ops are timed as graphs: between events they would show the cost of a launch.
    """
    ours = [impl for impl in plan.impls if impl.name == OURS]
    if plan.plain and ours and plan.op.timer == "do_bench" and plan.op.measure is None:
        settings = dataclasses.replace(plan.settings, plain=True)
        tasks = tuple(Task(OURS, point) for point in plan.points if ours[0].covers(point))
        yield Group(dataclasses.replace(plan, settings=settings), None, tasks)


def all_groups(plans: Sequence[Plan]) -> list[Group]:
    """Return the groups of all plans, without those that would only repeat known bounds."""
    found: list[Group] = []
    known: set[tuple[str, Point]] = set()
    for plan in plans:
        for group in groups(plan):
            bounds = {(plan.op.name, t.point) for t in group.tasks if t.impl == BOUNDS}
            if len(bounds) < len(group.tasks) or not bounds <= known:
                found.append(group)
            known |= bounds
    return found


def run_group(
    run: str, group: Group, child: Child | None = None, deadline: float | None = None
) -> Iterator[tuple[Task, dict[str, Any]]]:
    """Yield every task with its result, however many processes that takes.

    An implementation that hangs once or crashes twice is not tried at its later points, because
    each try costs a process.

    Args:
        run: the id of the invocation.
        group: the tasks to run.
        child: a process that was already started for the whole group.
        deadline: ``time.monotonic()`` at which it ends, finished or not.
    """
    pending, given_up = list(group.tasks), []
    strikes: dict[str, int] = {}
    while pending:
        child = child or group.start(run, pending)
        for fields in child.results(group.plan.budget_s, deadline):
            task = pending.pop(0)
            yield task, {name: value for name, value in fields.items() if name != LOST}
            strikes[task.impl] = strikes.get(task.impl, 0) + fields.get(LOST, 0)
        child = None
        given_up += [task for task in pending if strikes.get(task.impl, 0) >= 2]
        pending = [task for task in pending if task not in given_up]
        if deadline is not None and time.monotonic() > deadline:
            return
    # These come last, because the bounds of their points must be known.
    for task in given_up:
        yield task, {"skipped": "not tried: it hung or crashed at an earlier point"}


def make_row(
    plan: Plan,
    where: Row,
    impl: Impl,
    point: Point,
    found: dict,
    bounds: dict,
    plain_ms: float | None = None,
) -> Row:
    """Make one checked row from the results of an implementation and the point's bounds."""
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
        "bitwise": found.get("bitwise"), "plain_ms": plain_ms,
        **{name: found.get(name) for name in clocks.FIELDS},
    }  # fmt: skip
    row |= {name: found.get(name) for name in OF_OP.get(plan.op.name, ())}
    return check_row(row if skipped is None else row | {"skipped": skipped})


def execute(plans: Sequence[Plan], where: Row, deadline: float | None = None) -> Iterator[Row]:
    """Run plans one after the other, within one run.

    Args:
        plans: what to run, the most important first.
        where: the fields that all rows share (run, date, commit, card, versions).
        deadline: ``time.monotonic()`` after which nothing more is measured.

    Yields:
        Every row as soon as it is known, skipped ones included.

    Raises:
        Timeout: the deadline passed; names the rest, which has no rows.
    """
    run = where["run"]
    todo = all_groups(plans)
    ready: list[Child] = []
    bounds: dict[tuple[str, Point], dict[str, Any]] = {}
    left: list[str] = []
    measured: set[tuple[str, Task]] = set()
    plain: dict[tuple[str, Task], float | None] = {}
    try:
        for index, group in enumerate(todo):
            if not ready:
                ready = [each.start(run, each.tasks) for each in todo[index : index + TOGETHER]]
                for child in ready:
                    child.wait_for_imports(deadline)
            op = group.plan.op
            for task, found in run_group(run, group, ready.pop(0), deadline):
                at = op.name, task
                if group.plan.settings.plain:
                    plain[at] = found.get("median_ms")
                    continue
                if task.impl == BOUNDS:
                    bounds[op.name, task.point] = found
                    continue
                measured.add(at)
                known, impl = bounds.get((op.name, task.point), {}), op.impl(task.impl)
                yield make_row(group.plan, where, impl, task.point, found, known, plain.get(at))
            if deadline is not None and time.monotonic() > deadline:
                left = [g.peer.name if g.peer else g.plan.op.name for g in todo[index:]]
                break
    finally:
        for child in ready:
            child.stop()
    for plan in plans:
        for task, reason in obstructed(plan):
            known = bounds.get((plan.op.name, task.point))
            if known is not None and (plan.op.name, task) not in measured:
                impl = plan.op.impl(task.impl)
                yield make_row(plan, where, impl, task.point, {"skipped": reason}, known)
    if left:
        raise Timeout(f"out of time; not finished: {', '.join(left)}")


def obstructed(plan: Plan) -> Iterator[tuple[Task, str]]:
    """Yield the tasks that are not even started, and why."""
    for impl in plan.impls:
        reason = why_not_started(plan, impl)
        for point in plan.points if reason else ():
            if impl.covers(point):
                yield Task(impl.name, point), reason or ""
