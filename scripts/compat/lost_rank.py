"""Time how long a rank waits for one that was killed, under different settings of NCCL's watchdog.

    python scripts/compat/lost_rank.py                     all settings at once, on two cards
    python scripts/compat/lost_rank.py --on cpu            a trial with gloo

Each setting has two processes in a group with a limit of 20 s. Rank 1 kills itself, rank 0 waits in
an all-reduce. One line of JSON a setting gives the seconds until rank 0 had ended and how.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

GROUP_S = 20.0
SHORT = "short wait for dumps"
SETTINGS: dict[str, dict[str, str]] = {
    "defaults": {},
    # After a limit has passed, the watchdog sleeps four times this long before it ends the process.
    SHORT: {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500"},
    "no dump": {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"},
    "no dump, abort": {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
    "blocking wait": {"TORCH_NCCL_BLOCKING_WAIT": "1"},
    "torchrun": {},
}


def work(device_type: str) -> None:
    """Run one rank: a first all-reduce on both, and one that rank 1 never joins."""
    rank = int(os.environ["RANK"])
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=GROUP_S))
    value = torch.ones(1 << 20, device=device)
    dist.all_reduce(value)
    print(f"LOST {rank} begins {value[0].item()} {time.time()}", flush=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(3):
            dist.all_reduce(value)
        print(f"LOST {rank} read {value[0].item()} {time.time()}", flush=True)
    except RuntimeError as error:
        print(f"LOST {rank} error {str(error)[:160]!r} {time.time()}", flush=True)
        os._exit(3)


def launch(name: str, device: str) -> list[subprocess.Popen[str]]:
    """Start both ranks of a setting; torchrun starts them itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = os.environ | SETTINGS[name] | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own = [__file__, "--work", device]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    if name == "torchrun":
        command = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}"]
        return [subprocess.Popen([sys.executable, *command, *own], env=env, **options)]  # type: ignore[call-overload]
    ranks = []
    for rank in (0, 1):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        ranks.append(subprocess.Popen([sys.executable, *own], env=env | place, **options))  # type: ignore[call-overload]
    return ranks


def main() -> int:
    """Start all settings, and print how each ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--on", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--settings", nargs="+", choices=sorted(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--until", type=float, default=120.0, help="seconds; then all are killed")
    parser.add_argument("--most", type=float, default=60.0, help="seconds; more is a failure")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return 0
    begun = time.time()
    running = {name: launch(name, options.on) for name in options.settings}
    late = 0
    while running:
        over = time.time() - begun > options.until
        for name in [n for n, p in running.items() if over or p[0].poll() is not None]:
            seconds = report(name, running.pop(name), time.time())
            late += over or seconds is None or seconds > options.most
        time.sleep(0.1)
    return 1 if late else 0


def report(name: str, processes: list[subprocess.Popen[str]], now: float) -> float | None:
    """Print how a setting ended, or that it had not; end what still runs.

    Returns:
        Seconds from the loss of rank 1 to ``now``, or None if no rank came so far.
    """
    code = processes[0].poll()
    for process in processes:
        process.terminate()  # torchrun stops its ranks then.
    if code is None:
        time.sleep(2.0)
    for process in processes:
        process.kill()
    output = "".join(process.communicate()[0] for process in reversed(processes)).splitlines()
    lines = [line for line in output if line.startswith("LOST ")]
    began = [float(line.split()[-1]) for line in lines if line.startswith("LOST 1 begins")]
    seconds = round(now - began[0], 1) if began else None
    how = "NOT ENDED" if code is None else f"exit code {code}"
    print(json.dumps({"setting": name, "seconds": seconds, "how": how, "lines": lines}))
    for line in [line for line in output if "atchdog" in line or "dump" in line][:6]:
        print("   ", line[:220], flush=True)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
