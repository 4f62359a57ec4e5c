"""Compile every kernel of a run ahead, in many processes at once, before any is timed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench_lib.child import Task
from bench_lib.process import Child, cache_of
from bench_lib.runner import Group, Plan, why_not_started
from bench_lib.shapes import Point
from bench_lib.spec import Impl


def warm_points(plan: Plan, impl: Impl) -> list[list[Point]]:
    """Return the points to compile at, by process; the smallest T is enough if kernels ignore T."""
    if not impl.compiles or why_not_started(plan, impl) is not None:
        return []
    by_shape: dict[str, list[Point]] = {}
    for point in plan.points:
        if impl.covers(point):
            by_shape.setdefault(point.shape, []).append(point)
    if impl.compiles != "sizes":
        by_shape = {
            shape: [p for p in points if min(other.T for other in points) == p.T]
            for shape, points in by_shape.items()
        }
    found = list(by_shape.values())
    return found[:1] if impl.compiles == "once" else found


def warm_up(run: str, plans: Iterable[Plan], jobs: int, limit_s: float) -> Iterator[str]:
    """Compile ahead in ``jobs`` processes at once: see :attr:`bench_lib.spec.Impl.compiles`.

    Kernel caches on disk are shared, so the measuring processes find everything compiled. Nothing
    is measured here. A process that fails or takes too long will fail again when it is measured.

    Yields:
        A line of progress as each process ends.
    """
    waiting: dict[tuple, Group] = {}
    for plan in plans:
        for impl in plan.impls:
            for points in warm_points(plan, impl):
                where = () if impl.compiles == "once" else (points[0].shape,)
                where += tuple(p.T for p in points) if impl.compiles == "sizes" else ()
                tasks = tuple(Task(impl.name, p) for p in points)
                group = Group(plan, impl if impl.peer else None, tasks)
                waiting.setdefault((plan.op.name, impl.name, *where), group)
    since = time.time()
    yield from _run_warm(run, list(waiting.values()), jobs, limit_s)
    for peers in {group.plan.peers for group in waiting.values()} - {None}:
        forget_tuning(cache_of(peers), since)


def forget_tuning(cache: Path, since: float) -> None:
    """Delete what SonicMoE has tuned and cached since then, so that it tunes again undisturbed."""
    for file in (cache / "quack").rglob("*.autotune.json"):
        if file.stat().st_mtime >= since:
            file.unlink()


def _run_warm(run: str, waiting: list[Group], jobs: int, limit_s: float) -> Iterator[str]:
    deadline = time.monotonic() + limit_s
    running: list[tuple[Group, Child, float]] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            group = waiting.pop(0)
            child = group.start(run, group.tasks, warm=True)
            child.go()
            running.append((group, child, time.monotonic()))
        time.sleep(0.1)
        late = time.monotonic() > deadline
        for entry in [e for e in running if late or not e[1].alive()]:
            running.remove(entry)
            group, child, since = entry
            status = child.stop()
            first = group.tasks[0]
            yield (
                f"warm {group.plan.op.name} {first.impl} {first.point.shape}: "
                f"{time.monotonic() - since:.0f} s, {status}"
            )
        if late:
            return
