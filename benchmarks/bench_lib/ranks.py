"""Start the ranks of a study on several cards, time their steps, and write rows when measured.

    rows = rows_of(options, ("layers", "steps"))
    start([1, 2], measure, (options, rows))        measure(rank, options, rows) on each rank

Ranks communicate through NCCL where each can have a CUDA device of its own, else through gloo. A
row is on the disk before the next is measured, so a killed run keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench_lib.rows import commit_of, machine, new_run

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "benchmarks" / "results" / "parallel.jsonl"
# A collective waits at most this long; ranks that compile kernels reach it one after another.
GROUP_S = 120.0
SKIPPED = 2  # steps before the timed ones


@dataclass(frozen=True)
class Rows:
    """The rows of one run.

    Attributes:
        path: the file they are appended to.
        common: fields that all rows of the run have.
        start: time of the start, in seconds of the clock.
    """

    path: Path
    common: dict[str, Any]
    start: float = field(default_factory=time.time)

    def log(self, text: str) -> None:
        """Print a line with the time of day and the seconds since the start."""
        print(f"{time.strftime('%X')} [{time.time() - self.start:5.1f} s] {text}", flush=True)

    def write(self, measured: dict[str, Any]) -> None:
        """Append one row, and print it."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.common | measured) + "\n")
        self.log(str(measured))


@dataclass(frozen=True)
class Rank:
    """One process among ``world`` in a group, with its device."""

    number: int
    world: int
    device: torch.device

    def wait(self) -> None:
        """Wait until every rank has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order of rank."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def peaks(self) -> list[int | None]:
        """Return the bytes at the peak of each rank since the last reset; None on a CPU."""
        cuda = self.device.type == "cuda"
        return self.gather(torch.cuda.max_memory_allocated() if cuda else None)


def add_arguments(parser: argparse.ArgumentParser, steps: int) -> None:
    """Add the options that all studies on several cards have."""
    parser.add_argument("--steps", type=int, default=steps, help="timed steps of each row")
    parser.add_argument("--tiny", action="store_true", help="a trial; the numbers mean nothing")
    parser.add_argument("--commit", help="HEAD, where the tree was copied without its .git")
    parser.add_argument("--out", type=Path, default=OUT, help="append the rows to this file")


def rows_of(options: argparse.Namespace, names: Sequence[str], **others: Any) -> Rows:
    """Return the rows of a new run, with the options ``names`` in each."""
    run, date = new_run()
    common = {"run": run, "date": date, "commit": options.commit or commit_of(ROOT)}
    common |= machine("cuda" if torch.cuda.is_available() else "cpu")
    return Rows(options.out, common | {n: getattr(options, n) for n in names} | others)


@contextmanager
def joined(number: int, world: int, port: int, limit_s: float = GROUP_S) -> Iterator[Rank]:
    """Join a new process group on this machine as one rank, and leave it at the end."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", number) if cuda else torch.device("cpu")
    names = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    # NCCL's watchdog would wait another minute for debug dumps before it ends a rank.
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "500"
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=limit_s))
    yield Rank(number, world, device)
    dist.destroy_process_group()


def start(
    worlds: Sequence[int], measure: Callable[..., None], args: tuple[Any, ...], threads: int = 1
) -> None:
    """Run ``measure(rank, *args)`` on every rank of each world in turn.

    The processes start once, because each start costs imports and a CUDA context. Ranks outside a
    world wait for it.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; the others are stopped.
    """
    turn = torch.multiprocessing.get_context("spawn").Barrier(max(worlds))
    ports = free_ports(len(worlds))
    torch.multiprocessing.start_processes(
        _run, (worlds, ports, turn, threads, measure, args), nprocs=max(worlds),
        start_method="spawn",
    )  # fmt: skip


def _run(
    number: int, worlds: Sequence[int], ports: Sequence[int], turn: Any, threads: int,
    measure: Callable[..., None], args: tuple[Any, ...],
) -> None:  # fmt: skip
    torch.set_num_threads(threads if torch.cuda.is_available() else 1)
    for world, port in zip(worlds, ports, strict=True):
        if number < world:
            with joined(number, world, port) as rank:
                measure(rank, *args)
        turn.wait()


def free_ports(count: int) -> list[int]:
    """Return different TCP ports that are free just now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def step_ms(rank: Rank, step: Callable[[], object], steps: int) -> tuple[float, float]:
    """Return the median wall time of a step on all ranks, and of its part in Python."""
    times, host = [], []
    for _ in range(steps + SKIPPED):
        rank.wait()
        begun = time.perf_counter()
        step()
        host.append((time.perf_counter() - begun) * 1e3)
        rank.wait()
        times.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times[SKIPPED:]), statistics.median(host[SKIPPED:])
