"""A process with Triton's interpreter chosen and all imports made, which forks for each file.

A program: reads one line of JSON for each test file, with the two paths for what the file prints.
It runs the file as a program in a fork, and prints the fork's exit status.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

# What test files with CASES import; a fork has it already.
import tests.support.kernels_cases
import tests.support.routing_checks  # noqa: F401


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(request["file"], Path(request["stdout"]), Path(request["stderr"]))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    os._exit(0)  # else Triton's bindings list what they leak


def _run(file: str, stdout: Path, stderr: Path) -> None:
    """Run a file as a program, with its output in two files; end the process."""
    for path, number in ((stdout, 1), (stderr, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    status = 1
    try:
        sys.argv[:] = [file]
        runpy.run_path(file, run_name="__main__")
        status = 0
    except SystemExit as stopped:
        status = int(bool(stopped.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
