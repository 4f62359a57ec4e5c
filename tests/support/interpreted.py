"""Run a test file's CASES under Triton's CPU interpreter, all in a process of their own.

The interpreter has to be chosen before the kernels are imported, so not in the test session itself.
A test file has ``CASES: dict[str, Callable[[str], None]]``; each case takes a device. The file
calls :func:`report` when run as a program, and asserts case by case on the result of :func:`run`.
One process has made the imports, and each file runs in a fork of it (interpreter_process.py).
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from tests.support.limits import HANG_S
from tests.support.quick_interpreter import quicken

ROOT = Path(__file__).parents[2]


def run(file: str) -> dict[str, str]:
    """Run ``file`` and return the outcome of each case: an empty string, or the failure."""
    process = _process()
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder, name) for name in ("stdout", "stderr")}
        print(
            json.dumps({"file": file} | {name: str(path) for name, path in paths.items()}),
            file=process.stdin, flush=True,
        )  # fmt: skip
        ready, _, _ = select.select([process.stdout], [], [], HANG_S)
        status = process.stdout.readline().strip() if ready else f"none after {HANG_S} s"
        said = {name: path.read_text() for name, path in paths.items() if path.exists()}
    assert status == "0", f"{file}: status {status}\n{said.get('stderr', '')[-4000:]}"
    return json.loads(said["stdout"].splitlines()[-1])


@functools.cache
def _process() -> subprocess.Popen[str]:
    """Return the process that runs the files, one after the other; it ends with this one."""
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.support.interpreter_process"],
        env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.stdin.close()
    process.wait(HANG_S)


def skip_without_histogram() -> None:
    """Skip tests of plans before Triton 3.6, whose interpreter has an int64 histogram."""
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        pytest.skip(f"the interpreter of triton {triton.__version__} stores histograms as int64")


def report(
    cases: Mapping[str, Callable[[str], None]], row_block: int = 32, checked: bool = False
) -> None:
    """Run every case on the CPU with poisoned memory and print the outcomes as one line of JSON.

    Args:
        cases: by name.
        row_block: rows that the plan sorts at a time; changes no result. The number used on a GPU
            takes the interpreter two seconds a plan.
        checked: check integers for overflow, which costs half of the time. Set it for kernels that
            pack several numbers into one.
    """
    from moe_patch.kernels.plan import plan

    quicken(checked)
    plan.ROW_BLOCK = row_block
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    said = {}
    for name, check in cases.items():
        torch.manual_seed(0)
        try:
            check("cpu")
            said[name] = ""
        except Exception:
            said[name] = traceback.format_exc(limit=-3)
    print(json.dumps(said))
