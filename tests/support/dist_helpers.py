"""Several processes on one machine, which all end if one of them fails or hangs.

    results = run_ranks(worker, payload, world=2)     worker(rank, payload) -> data

Ranks communicate through NCCL if each can have a CUDA device of its own, else through gloo on the
CPU. ``device(world, rank)`` is the device of a rank; results come back on the CPU.
A worker is a module-level function of a test module; it runs inside an initialised process group
with one torch thread. Ranks are forked from a clean server process that has imported torch and
transformers once. Forking the test process itself is not safe after it has run a backward.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.connection
import os
import random
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.support.limits import HANG_S

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch.distributed.fsdp", "tests.support.tiny_models", "tests.support.adapters"]
)
# NCCL's watchdog ends a rank four times this long after a limit has passed; torch waits 60 s.
WATCHDOG = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500"}
# Ranks beside a failed one, or at the end, get this long; then they are killed.
GRACE_S = 5.0
# Ranks end after this many calls, because the groups that workers make keep threads that compute.
CALLS = 6
PORTS = range(20_000, 32_000)


def needs_cards(count: int) -> pytest.MarkDecorator:
    """Marks a test that needs several CUDA devices in one machine."""
    found = torch.cuda.device_count()
    return pytest.mark.skipif(found < count, reason=f"needs {count} CUDA devices, found {found}")


def device(world: int, rank: int = 0) -> torch.device:
    """Return the rank's own CUDA device if there is one for every rank, else the CPU.

    The reference in one process is computed on the device of rank 0.
    """
    return torch.device("cuda", rank) if torch.cuda.device_count() >= world else torch.device("cpu")


def run_ranks(worker: Callable[..., Any], *args: Any, world: int = 2) -> list[Any]:
    """Run ``worker(rank, *args)`` on each rank and return the results, in order of rank.

    The processes are kept for the next call unless one fails: each start pays for imports, a CUDA
    context and NCCL.

    Raises:
        AssertionError: a rank failed (with its traceback), died, or did not end in time; then all
            ranks are stopped.
    """
    ranks = _WAITING.pop(world, None) or Ranks(world)
    try:
        results = ranks.call(worker, args)
    except BaseException:
        ranks.kill()
        raise
    ranks.calls += 1
    if ranks.calls < CALLS:
        _WAITING[world] = ranks
    else:
        ranks.kill()
    return results


def free_port() -> int:
    """Return a TCP port that is free just now.

    The system gives ports from 32768 on to any socket, so that another process might take one of
    them before the group does.
    """
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free TCP port in {PORTS}")


class Ranks:
    """Processes in one process group that wait for work, each at the end of a pipe."""

    def __init__(self, world: int, limit_s: float = HANG_S) -> None:
        """Start ``world`` processes; a collective that takes ``limit_s`` seconds fails."""
        port = free_port()
        self.calls = 0
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        for rank in range(world):
            mine, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_serve, args=(theirs, rank, world, port, limit_s), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def call(self, worker: Callable[..., Any], args: tuple) -> list[Any]:
        """Run one worker on every rank; see :func:`run_ranks`."""
        with tempfile.TemporaryDirectory() as folder:
            for pipe in self.pipes:
                pipe.send((worker, args, folder))
            self._wait(time.monotonic() + HANG_S)
            paths = [f"{folder}/{rank}.pt" for rank in range(len(self.pipes))]
            return [torch.load(path, map_location="cpu", weights_only=False) for path in paths]

    def close(self) -> None:
        """Let the ranks leave their group and end."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End the ranks at once."""
        for process in self.processes:
            process.kill()
            process.join()

    def _wait(self, deadline: float) -> None:
        open_pipes, failures = dict(enumerate(self.pipes)), []
        while open_pipes:
            left = deadline - time.monotonic()
            ready = multiprocessing.connection.wait(open_pipes.values(), max(left, 0.0))
            for rank in [r for r, pipe in open_pipes.items() if pipe in ready]:
                if report := self._answer(rank):
                    failures.append(f"rank {rank}:\n{report}")
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                del open_pipes[rank]
            if not ready:
                failures.append(f"no answer in time from ranks {sorted(open_pipes)}")
                break
        assert not failures, "\n".join(failures)

    def _answer(self, rank: int) -> str | None:
        try:
            return self.pipes[rank].recv()
        except EOFError:
            self.processes[rank].join(GRACE_S)
            return f"ended with exit code {self.processes[rank].exitcode}"


_WAITING: dict[int, Ranks] = {}


@atexit.register
def end_ranks() -> None:
    """End the ranks that wait for another call.

    Hundreds of threads of their groups wake up many times a second meanwhile.
    """
    while _WAITING:
        _WAITING.popitem()[1].close()


def _serve(pipe: Any, rank: int, world: int, port: int, limit_s: float) -> None:
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()} | WATCHDOG)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    own = device(world, rank)
    try:
        if own.type == "cuda":
            torch.cuda.set_device(own)
        else:  # hide devices that ranks would share from code that searches for a device
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        backend = "gloo" if own.type == "cpu" else "cpu:gloo,cuda:nccl"
        torch.distributed.init_process_group(backend, timeout=timedelta(seconds=limit_s))
        while True:
            worker, args, folder = pipe.recv()
            torch.manual_seed(0)
            torch.save(worker(rank, *args), f"{folder}/{rank}.pt")
            torch.distributed.barrier()
            pipe.send(None)
    except EOFError:
        torch.distributed.destroy_process_group()
    except BaseException:
        pipe.send(traceback.format_exc())
        raise
