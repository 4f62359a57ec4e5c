"""Several processes on one machine, with a hard deadline.

    results = run_ranks(worker, payload, world=2, timeout=120)     worker(rank, payload) -> data

Ranks meet through NCCL where each can have a CUDA device of its own, and through gloo on the CPU
elsewhere; ``device(world, rank)`` says where one computes, and results come back on the CPU.
A worker is a module-level function of a test module; it runs inside an initialised process group
with one torch thread. Ranks are forked from a clean server process that has imported torch and
transformers once (forking the test process itself is not safe after it has run a backward).
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed.fsdp", "tests.tiny_models", "tests.adapters"])


def needs_cards(count: int) -> pytest.MarkDecorator:
    """Marks a test that needs several CUDA devices in one machine."""
    found = torch.cuda.device_count()
    return pytest.mark.skipif(found < count, reason=f"needs {count} CUDA devices, found {found}")


def device(world: int, rank: int = 0) -> torch.device:
    """Where a rank computes: on its own CUDA device if there is one for every rank, else the CPU.

    Rank 0's is also where one process computes what several are compared with.
    """
    return torch.device("cuda", rank) if torch.cuda.device_count() >= world else torch.device("cpu")


def run_ranks(
    worker: Callable[..., Any], *args: Any, world: int = 2, timeout: float = 120.0
) -> list[Any]:
    """What ``worker(rank, *args)`` returned on each rank, in order.

    Raises:
        AssertionError: a rank failed (with its traceback), died, or did not end in time; then all
            ranks are stopped.
    """
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        ranks = [
            _CONTEXT.Process(target=_run, args=(worker, args, rank, world, port, folder, timeout))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            _wait(ranks, Path(folder), timeout)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        return [
            torch.load(f"{folder}/{rank}.pt", weights_only=False, map_location="cpu")
            for rank in range(world)
        ]


def free_port() -> int:
    """A TCP port that nothing listens on just now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _wait(ranks: list[Any], folder: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(process.is_alive() for process in ranks):
        failed = [f"rank {r}: exit {p.exitcode}" for r, p in enumerate(ranks) if p.exitcode]
        late = time.monotonic() > deadline
        if failed or late:
            reports = [path.read_text() for path in sorted(folder.glob("*.error"))]
            raise AssertionError("\n".join([*failed, "timed out" if late else "", *reports]))
        time.sleep(0.02)
    reports = [path.read_text() for path in sorted(folder.glob("*.error"))]
    assert not reports, "\n".join(reports)


def _run(
    worker: Any, args: tuple, rank: int, world: int, port: int, folder: str, timeout: float
) -> None:
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    own = device(world, rank)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    else:  # what looks for a device by itself must not find one that ranks would share
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        torch.distributed.init_process_group(
            "gloo" if own.type == "cpu" else "cpu:gloo,cuda:nccl",
            timeout=timedelta(seconds=timeout),
        )
        torch.manual_seed(0)
        torch.save(worker(rank, *args), f"{folder}/{rank}.pt")
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException:
        Path(f"{folder}/{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
