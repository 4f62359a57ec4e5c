"""The measuring process: read a job and append one JSON line per result, flushed at once.

It imports what its job needs, then waits for its turn (a line on stdin) before it uses the device.
The parent can therefore start it while another process still measures.

It stops at the first unexpected error, because a crash of one implementation can leave the device
unusable. The parent records the error and starts another process for the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from bench_lib import measure
from bench_lib.ops import OPS
from bench_lib.shapes import Point
from bench_lib.spec import Impl, Op, Program

BOUNDS = "bounds"


@dataclasses.dataclass(frozen=True)
class Task:
    """One unit of work: an implementation's name, or :data:`BOUNDS`, at a point."""

    impl: str
    point: Point


@dataclasses.dataclass(frozen=True)
class Job:
    """The instructions for a child process.

    Attributes:
        run: the id of the whole invocation, for messages and caches.
        op, device, tasks, settings: what to measure, where and how.
        results: the file that gets a line per task.
        imported: the file that exists once all imports are done.
        warm: only run every task once, so that kernels are compiled and cached on disk.
    """

    run: str
    op: str
    device: str
    tasks: tuple[Task, ...]
    settings: measure.Settings
    results: str
    imported: str
    warm: bool = False

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        raw = json.loads(text)
        tasks = tuple(Task(task["impl"], Point(**task["point"])) for task in raw.pop("tasks"))
        return cls(tasks=tasks, settings=measure.Settings(**raw.pop("settings")), **raw)


class Cache:
    """State that neighbouring tasks share: inputs and reference of a size, the built program."""

    def __init__(self, op: Op, device: torch.device, settings: measure.Settings) -> None:
        self.op, self.device = op, device
        self.bounds = measure.Bounds(op, device, settings)
        self.size: tuple | None = None
        self.inputs: Any = None
        self.expected: Any = None
        self.built: tuple[str, Program] | None = None
        # Result for the built program: if backward repeats, so does its forward.
        self.repeats: bool | None = None

    def load(self, point: Point, with_reference: bool = True) -> tuple[Any, Any]:
        """Return (inputs, expected) of the point's size."""
        size = (point.shape, point.T, point.dtype, point.R)
        if size != self.size:
            self.built = self.inputs = self.expected = None
            release(self.device)
            self.size, self.inputs = size, self.op.make_inputs(point, self.device)
        if with_reference and self.expected is None:
            self.expected = self.op.reference(point, self.inputs)
            release(self.device)
        return self.inputs, self.expected

    def program(self, impl: Impl, point: Point) -> Program:
        """Return the implementation, built on the loaded inputs."""
        if self.built is None or self.built[0] != impl.name:
            self.built = self.repeats = None
            release(self.device)
            self.built = impl.name, impl.build(self.inputs, point)
        return self.built[1]


def release(device: torch.device) -> None:
    """Return unreferenced memory to the device."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def perform(op: Op, task: Task, cache: Cache, settings: measure.Settings) -> dict[str, Any]:
    """Return the fields that one task yields; ``skipped`` gives a known reason."""
    if task.impl == BOUNDS:
        return cache.bounds.at(task.point)
    impl = op.impl(task.impl)
    why_not = impl.why_not(task.point, cache.device)
    if why_not is not None:
        return {"skipped": why_not}
    try:
        if op.measure is not None:
            return op.measure(impl, task.point, cache.device, settings)
        inputs, expected = cache.load(task.point, with_reference=not settings.plain)
        program = cache.program(impl, task.point)
        if settings.plain:
            return measure.measure_plain(op, task.point, program, inputs)
        known = cache.repeats or None
        found = measure.measure(op, impl, task.point, program, inputs, expected, settings, known)
        cache.repeats = found["bitwise"] if task.point.backward else None
        return found
    except ImportError as error:
        return {"skipped": f"not installed: {error}"}
    except torch.OutOfMemoryError as error:
        cache.built = None
        return {"skipped": f"out of memory: {str(error).splitlines()[0]}"}
    except measure.WrongResultError as error:
        return {"skipped": f"wrong result: {error}"}


def warm(op: Op, tasks: tuple[Task, ...], cache: Cache) -> None:
    """Run every task once. Skip a task if other processes leave it too little memory."""
    for task in tasks:
        impl = op.impl(task.impl)
        if impl.why_not(task.point, cache.device) is not None:
            continue
        with contextlib.suppress(torch.OutOfMemoryError):
            if op.warm is not None:
                op.warm(impl, task.point, cache.device)
                continue
            inputs, _ = cache.load(task.point, with_reference=False)
            measure.run_pass(op, task.point, cache.program(impl, task.point), inputs.dout_TD)
        cache.built = None
    if cache.device.type == "cuda":
        torch.cuda.synchronize(cache.device)


def preload(op: Op, tasks: tuple[Task, ...]) -> None:
    """Import ahead of the turn; missing modules are reported when their task runs."""
    for name in {task.impl for task in tasks} - {BOUNDS}:
        for module in op.impl(name).modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)


def _end_with_the_parent() -> None:
    """End this process and its children when the parent's end of the pipe closes."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def main(job_file: Path) -> None:
    """Run every task of a job in order."""
    job = Job.from_json(job_file.read_text(encoding="utf-8"))
    op, device = OPS[job.op], torch.device(job.device)
    preload(op, job.tasks)
    Path(job.imported).touch()
    if not sys.stdin.readline():
        return
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    # Imports stay alive, so exclude them from collections between implementations.
    gc.freeze()
    cache = Cache(op, device, job.settings)
    if job.warm:
        warm(op, job.tasks, cache)
    else:
        _measure_all(op, job, cache)
    # Exit directly: tearing down a device context takes seconds, and some peers crash in it.
    sys.stdout.flush()
    os._exit(0)


def _measure_all(op: Op, job: Job, cache: Cache) -> None:
    with Path(job.results).open("a", encoding="utf-8") as results:
        for index, task in enumerate(job.tasks):
            fields = perform(op, task, cache, job.settings)
            print(json.dumps({"task": index, "fields": fields}), file=results, flush=True)
