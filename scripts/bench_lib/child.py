"""The process that measures: reads a job, appends one JSON line per result, flushed at once.

It stops at the first error that it does not expect (a crash of one implementation can leave the
device unusable); the parent records it and starts another process with what is left.
"""

from __future__ import annotations

import dataclasses
import gc
import json
from pathlib import Path
from typing import Any

import torch

from bench_lib import measure
from bench_lib.ops import OPS
from bench_lib.shapes import Point
from bench_lib.spec import Op

BOUNDS = "bounds"


@dataclasses.dataclass(frozen=True)
class Task:
    """One line of work: an implementation's name, or :data:`BOUNDS`, at a point."""

    impl: str
    point: Point


@dataclasses.dataclass(frozen=True)
class Job:
    """What a child is told. ``run`` is the id of the whole invocation, for messages and caches."""

    run: str
    op: str
    device: str
    tasks: tuple[Task, ...]
    settings: measure.Settings
    results: str

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        raw = json.loads(text)
        tasks = tuple(Task(task["impl"], Point(**task["point"])) for task in raw.pop("tasks"))
        return cls(tasks=tasks, settings=measure.Settings(**raw.pop("settings")), **raw)


class _Inputs:
    """Inputs and reference of the newest sizes; both passes of a size share them."""

    def __init__(self, op: Op, device: torch.device) -> None:
        self.op, self.device = op, device
        self.key: tuple | None = None
        self.values: tuple[Any, Any] | None = None

    def at(self, point: Point) -> tuple[Any, Any]:
        key = (point.shape, point.T, point.dtype, point.R)
        if key != self.key or self.values is None:
            self.values = None
            _release(self.device)
            inputs = self.op.make_inputs(point, self.device)
            self.key, self.values = key, (inputs, self.op.reference(point, inputs))
            _release(self.device)
        return self.values


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def perform(op: Op, task: Task, cache: _Inputs, settings: measure.Settings) -> dict[str, Any]:
    """The fields that one task yields; ``skipped`` where a reason is known."""
    if task.impl == BOUNDS:
        return measure.bounds(op, task.point, cache.device, settings)
    impl = op.impl(task.impl)
    obstacle = impl.obstacle(task.point, cache.device)
    if obstacle is not None:
        return {"skipped": obstacle}
    try:
        return measure.measure(op, impl, task.point, *cache.at(task.point), settings)
    except ImportError as error:
        return {"skipped": f"not installed: {error}"}
    except torch.OutOfMemoryError as error:
        return {"skipped": f"out of memory: {str(error).splitlines()[0]}"}
    except measure.WrongResultError as error:
        return {"skipped": f"wrong result: {error}"}


def main(job_file: Path) -> None:
    """Do every task of a job in order."""
    job = Job.from_json(job_file.read_text(encoding="utf-8"))
    op, device = OPS[job.op], torch.device(job.device)
    cache = _Inputs(op, device)
    with Path(job.results).open("a", encoding="utf-8") as results:
        for index, task in enumerate(job.tasks):
            fields = perform(op, task, cache, job.settings)
            print(json.dumps({"task": index, "fields": fields}), file=results, flush=True)
            _release(device)
