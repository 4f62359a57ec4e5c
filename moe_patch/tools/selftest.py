"""A self-test for the user's own machine: the operators against fp64.

Compilers and GPUs differ: a kernel that is right on one card may be miscompiled for another while
losses look healthy. The tests of this library ran on other cards, so this runs on the card at hand.
It compares every result with the plain reference in fp64, and its bits with a second run.
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from moe_patch.errors import MoePatchError, UnsupportedOptionError
from moe_patch.ops.backend import choose_backend
from moe_patch.tools.fp8_checks import fp8_groups
from moe_patch.tools.selftest_checks import Failed, Group, groups_of

Result = TypeVar("Result")


class Check(NamedTuple):
    """One check.

    Attributes:
        name: what was checked.
        passed: whether it holds.
        error: the largest relative error over its limit (at most 1 passes); 0 for exact checks.
        seconds: duration; the first time mostly compilation.
        detail: what went wrong, or "".
    """

    name: str
    passed: bool
    error: float
    seconds: float
    detail: str


@dataclass
class SelfTest:
    """The outcome of :func:`selftest`; ``as_dict()`` is JSON.

    Attributes:
        device: the device's name.
        backend: the backend that ran, "triton" or "torch".
        note: what the outcome does not cover, or "".
        checks: one per check, in order.
    """

    device: str
    backend: str
    note: str
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Return whether every check holds."""
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, with the versions that they hold for."""
        import transformers

        return {
            "passed": self.passed, "device": self.device, "backend": self.backend,
            "note": self.note, "torch": torch.__version__, "transformers": transformers.__version__,
            "checks": [check._asdict() for check in self.checks],
        }  # fmt: skip


def selftest(
    device: str | torch.device | None = None, *, progress: bool = True, jobs: int = 1
) -> SelfTest:
    """Run plan, routing, experts and adapters on a device, forward and backward, against fp64.

    Args:
        device: default: cuda if available, else cpu, on the torch backend.
        progress: show a progress bar on stderr.
        jobs: processes that share the checks, most of which is compilation. Several are spawned by
            :mod:`multiprocessing`, which must be able to import the program's main module.

    Raises:
        UnsupportedOptionError: there is no such device.
        MoePatchError: a process died.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedOptionError("selftest: no CUDA device here; accepted: cpu")
    if where.type == "cuda" and where.index is None:  # other processes need the index
        where = torch.device("cuda", torch.cuda.current_device())
    choice = choose_backend("auto", where, torch.bfloat16)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else where.type
    note = ""
    if choice.name == "torch":
        note = f"only the torch backend was tested, no kernel: {choice.reason}"
    elif where.type == "cuda":
        note = _closed(where)
    result = SelfTest(name, choice.name, note)
    from tqdm import tqdm

    count = len(_groups(where))
    with tqdm(total=count, desc="self-test", disable=not progress) as bar:
        for found in each_group(partial(_run_group, where), count, jobs, "selftest"):
            result.checks += found
            bar.update()
    return result


def _closed(device: torch.device) -> str:
    """Say which kernels of a Hopper card may not run here and were not tested; else ""."""
    from moe_patch.kernels.common.device import device_at
    from moe_patch.kernels.common.versions import gates

    return gates().reason if device_at(device).capability == (9, 0) else ""


def start_process(threads: int) -> None:
    """Prepare a process that shares the checks; hide warnings that the first one has shown."""
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", message="moe_patch: ")


def each_group(
    run: Callable[[int], Result], count: int, jobs: int, command: str
) -> Iterator[Result]:
    """Yield ``run(index)`` for each of ``count`` groups, in order.

    Args:
        run: a function that other processes can import.
        count: number of groups.
        jobs: processes that share them; 1 is this one.
        command: name of the command, for errors.

    Raises:
        MoePatchError: a process died.
    """
    if jobs <= 1:
        yield from map(run, range(count))
        return
    spawn = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // jobs)
    with ProcessPoolExecutor(min(jobs, count), spawn, start_process, (threads,)) as processes:
        try:
            yield from processes.map(run, range(count))
        except BrokenProcessPool as error:
            raise MoePatchError(
                f"{command}: a process that ran checks died; jobs=1 (--jobs 1) shows in which check"
            ) from error


def _groups(device: torch.device) -> list[Group]:
    return [*groups_of(device), *fp8_groups(device)]


def _run_group(device: torch.device, index: int) -> list[Check]:
    group = _groups(device)[index]
    found = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for title, check in group:
            torch.manual_seed(0)
            found.append(run_check(title, check))
    return found


def run_check(name: str, check: Callable[[], float]) -> Check:
    """Run a check that returns its error over its limit or raises :class:`Failed`."""
    start = time.perf_counter()
    error, detail = 0.0, ""
    try:
        error = check()
    except Failed as failure:
        detail = str(failure)
    passed = not detail and error <= 1.0
    if not passed and not detail:
        detail = f"{error:.1f} times the limit"
    return Check(name, passed, round(error, 4), round(time.perf_counter() - start, 3), detail)
