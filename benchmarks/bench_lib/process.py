"""Run one child process: start it, hand it the device, read its results, stop its whole tree."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_lib.child import Job, Task
from bench_lib.measure import Settings

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench.py"
POLL_S = 0.1
# A longer hang in an import counts against the budget of the first result.
IMPORTS_S = 120.0
# Key in a result: how much a lost process counts against its implementation.
LOST = "lost"


class Timeout(RuntimeError):
    """The time for the whole run is over."""


def cache_of(peers: Path) -> Path:
    """Return the folder beside the peers that keeps their compiled and tuned kernels."""
    return peers.parent / "cache"


def _environment(peers: Path | None, warm: bool) -> dict[str, str]:
    env = dict(os.environ)
    if peers is not None:
        paths = [peers, peers / "nvidia_cutlass_dsl" / "python_packages"]
        inherited = [env["PYTHONPATH"]] if "PYTHONPATH" in env else []
        env["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *inherited])
        cache = cache_of(peers)
        env |= {"TRITON_CACHE_DIR": str(cache / "triton"), "QUACK_CACHE_DIR": str(cache / "quack")}
        # A choice tuned beside other processes may be bad: do not keep it (warmup.forget_tuning).
        if not warm:
            env |= {"TRITON_CACHE_AUTOTUNING": "1", "QUACK_CACHE_AUTOTUNING": "1"}
    return env


def _why(text: str) -> str:
    """Return the last line that names an error, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Advice follows a CUDA error's own line.
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["no message"])[-1][:300]


class Child:
    """A process for a list of tasks. It imports at once and measures after :meth:`go`."""

    def __init__(
        self,
        run: str,
        op: str,
        device: str,
        tasks: tuple[Task, ...],
        settings: Settings,
        peers: Path | None,
        warm: bool = False,
    ) -> None:
        self.tasks = tasks
        self._folder = tempfile.TemporaryDirectory(prefix=f"bench-{run}-")
        job_file, self._found, self._imported, self._log = (
            Path(self._folder.name) / name for name in ("job", "found", "imported", "log")
        )
        job = Job(run, op, device, tasks, settings, str(self._found), str(self._imported), warm)
        job_file.write_text(job.to_json(), encoding="utf-8")
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT), "child", str(job_file)],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                env=_environment(peers, warm), start_new_session=True, text=True,
            )  # fmt: skip

    def go(self) -> None:
        """Hand over the device. The pipe stays open: closing it tells the child to end too."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def wait_for_imports(self, deadline: float | None) -> None:
        """Wait until the child has imported everything or has ended, at most until the deadline."""
        last = time.monotonic() + IMPORTS_S
        last = last if deadline is None else min(last, deadline)
        while self.alive() and not self._imported.exists() and time.monotonic() < last:
            time.sleep(POLL_S)

    def alive(self) -> bool:
        return self._process.poll() is None

    def _new_results(self, done: int) -> list[dict[str, Any]]:
        if not self._found.exists():
            return []
        lines = self._found.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line)["fields"] for line in lines[done:] if line.endswith("\n")]

    def results(self, budget_s: float, deadline: float | None) -> Iterator[dict[str, Any]]:
        """Yield results as they come; after a crash or a hang the last one gives the reason.

        Args:
            budget_s: seconds that one result may take.
            deadline: ``time.monotonic()`` at which results end, or None.
        """
        self.go()
        done, since, alive = 0, time.monotonic(), True
        try:
            while alive:
                alive = self.alive()
                for fields in self._new_results(done):
                    done, since = done + 1, time.monotonic()
                    yield fields
                if alive and deadline is not None and time.monotonic() > deadline:
                    return
                if alive and time.monotonic() - since > budget_s:
                    yield {"skipped": f"took longer than {budget_s:.0f} s", LOST: 2}
                    return
                time.sleep(POLL_S if alive else 0)
            if done < len(self.tasks):
                status = self._process.returncode
                yield {"skipped": f"process ended with {status}: {self.why()}", LOST: 1}
        finally:
            self.stop()

    def why(self) -> str:
        """Return the last error that it printed."""
        return _why(self._log.read_text(encoding="utf-8", errors="replace"))

    def stop(self) -> str:
        """Stop it and the processes that it started (some peers compile in their own).

        Returns:
            "done", or how it ended.
        """
        status = self._process.poll()
        ended = "stopped" if status is None else "done" if status == 0 else self.why()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._folder.cleanup()
        return ended
