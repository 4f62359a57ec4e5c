"""Run the suite on the oldest and the newest supported versions, each in its own environment.

    python scripts/matrix.py                     oldest and newest
    python scripts/matrix.py oldest              one of them
    python scripts/matrix.py oldest --keep       reuse what is installed
    python scripts/matrix.py oldest -- -k cli    arguments for pytest; then no row is written
    python scripts/matrix.py window              tests marked "versions", in every combination
    python scripts/matrix.py 5.9x0.18            in one: transformers 5.9 with PEFT 0.18
    python scripts/matrix.py 5.9x0.18 newestxnewest --whole    the whole suite in the two ends

The oldest versions are the lower bounds in pyproject.toml, so a wrong bound fails here. The newest
are what pip finds; an unknown Triton among them fails, too. Environments go to .venv-matrix-NAME
(gigabytes where pip has no CPU build of torch). Combinations share one environment
(scripts/compat/matrix_window.py), with the torch of scripts/env/constraints-cpu.txt. Rows of
environments go to compat.jsonl in benchmarks/results, and those of combinations to window.jsonl.
scripts/compat/compat.py makes the tables. This script needs no package.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts" / "compat"))

from matrix_window import (  # noqa: E402
    COMBINATIONS,
    WHOLE,
    pytest_command,
    run_combination,
    run_window,
    test_variables,
)

ROW = "versions"


@dataclass(frozen=True)
class Environment:
    """One environment: a Python version and the versions of the dependencies in it."""

    name: str
    python: str
    oldest: bool
    constraints: str = ""

    @property
    def folder(self) -> Path:
        """Return the environment's folder."""
        return ROOT / f".venv-matrix-{self.name}"

    @property
    def interpreter(self) -> Path:
        """Return the environment's Python."""
        return self.folder / "bin" / "python"


ENVIRONMENTS = (
    Environment("oldest", "3.11", oldest=True),
    Environment("newest", "3.12", oldest=False),
)
WINDOW = Environment("window", "3.11", oldest=False, constraints="scripts/env/constraints-cpu.txt")


def lower_bounds() -> list[str]:
    """Return the dependencies at their lower bounds, as constraints for pip."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = []
    for requirement in project["dependencies"]:
        name, bound = re.fullmatch(r"([\w-]+)>=([\w.]+)(?:;.*)?", requirement).groups()
        pins.append(f"{name}=={bound}")
    return pins


def find_python(version: str) -> str:
    """Find an interpreter of that version: on the path, or from pyenv or uv.

    Raises:
        SystemExit: there is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = [
        shutil.which(f"python{version}"),
        *sorted(map(str, pyenv.glob(f"{version}.*/bin/python{version}")), reverse=True),
        sys.executable,
    ]
    if shutil.which("uv"):
        found = subprocess.run(["uv", "python", "find", version], capture_output=True, text=True)
        places.append(found.stdout.strip())
    ask = "import platform; print(platform.python_version())"
    for place in filter(None, places):
        done = subprocess.run([place, "-c", ask], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.startswith(f"{version}."):
            return place
    raise SystemExit(f"no Python {version} here: install it (apt, pyenv, or uv python install)")


def build(environment: Environment) -> None:
    """Make the environment and install this checkout into it, with the tests' requirements."""
    if environment.folder.exists():
        shutil.rmtree(environment.folder)
    python = find_python(environment.python)
    subprocess.run([python, "-m", "venv", str(environment.folder)], check=True)
    pip = [str(environment.interpreter), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--upgrade", "pip"], check=True)
    pip += ["--editable", f"{ROOT}[train,dev]"]
    if environment.oldest:
        constraints = environment.folder / "oldest.txt"
        constraints.write_text("\n".join(lower_bounds()) + "\n", encoding="utf-8")
        pip += ["--constraint", str(constraints)]
    if environment.constraints:
        pip += ["--constraint", str(ROOT / environment.constraints)]
    subprocess.run(pip, check=True)


TABLE = "from moe_patch.kernels.common.versions import TRITON_VERSIONS; print(*TRITON_VERSIONS)"
INSTALLED = "from importlib.metadata import version; print(version('triton'))"


def unseen_triton(interpreter: Path) -> str:
    """Say which Triton has no row in the table: the newest on the index or the installed one.

    Args:
        interpreter: Python of an environment with this checkout in it.

    Returns:
        What to do about it, or "" if the table has both or Triton is not for this platform.
    """
    index = _printed(interpreter, "-m", "pip", "index", "versions", "triton")
    newest = re.search(r"^triton \(([\w.+]+)\)", index, re.MULTILINE)
    found = {_printed(interpreter, "-c", INSTALLED).strip(), newest[1] if newest else ""} - {""}
    known = set(_printed(interpreter, "-c", TABLE).split()) if found else set()
    unseen = sorted(each for each in found if ".".join(each.split(".")[:2]) not in known)
    if not unseen:
        return ""
    return (
        f"triton {', '.join(unseen)} has no row in TRITON_VERSIONS "
        "(moe_patch/kernels/common/versions.py): unpack its wheel, run "
        "tests/support/offline_launches.py and scripts/tiles/compile_tiles.py --capability 9.0 "
        "with it first on PYTHONPATH, add a row"
    )


def _printed(interpreter: Path, *arguments: str) -> str:
    """Return a command's output; empty if it fails, for example without a network."""
    command = [str(interpreter), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout


def run_suite(name: str, arguments: list[str]) -> int:
    """Run the suite in this interpreter; write the row if the whole suite runs.

    Args:
        name: name of an environment.
        arguments: for pytest.
    """
    sys.path[:0] = [str(ROOT / "scripts" / "compat"), str(ROOT / "benchmarks")]
    import compat
    from bench_lib.rows import commit_of, new_run

    place, commit, (_, date) = compat.environment(), commit_of(ROOT), new_run()
    python = platform.python_version()
    print(f"{name}: Python {python}, " + ", ".join(f"{k} {v}" for k, v in place.items()))
    start = time.monotonic()
    command = pytest_command(WHOLE, arguments)
    status = subprocess.run(command, cwd=ROOT, env=test_variables()).returncode
    if arguments or commit is None:
        return status
    values = {
        "row": ROW,
        "test": f"the CPU suite, {name} versions, Python {python.rpartition('.')[0]}",
        "command": f"python scripts/matrix.py {name}",
        "world": 1,
        "commit": commit,
        "result": "fail" if status else "pass",
        "seconds": round(time.monotonic() - start, 1),
        "date": date,
    } | place
    with compat.ROWS.open("a", encoding="utf-8") as file:
        file.write(json.dumps({field: values[field] for field in compat.FIELDS}) + "\n")
    return status


def main() -> int:
    """Build and run; return status 1 if a suite fails."""
    parser = argparse.ArgumentParser(description="The suite on the oldest and newest versions.")
    names = [environment.name for environment in ENVIRONMENTS]
    known = [*names, WINDOW.name, *COMBINATIONS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--keep", action="store_true", help="reuse an environment that is there")
    parser.add_argument("--whole", action="store_true", help="all tests in each combination")
    parser.add_argument("--here", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    own, rest = _split(sys.argv[1:])
    args = parser.parse_args(own)
    if args.here in COMBINATIONS:
        return run_combination(args.here, args.whole, args.row, rest)
    if args.here:
        return run_suite(args.here, rest)
    if unknown := sorted(set(args.names) - set(known)):
        parser.error(f"unknown environments {unknown}; known: {', '.join(known)}")
    failed = []
    for environment in ENVIRONMENTS:
        if environment.name in (args.names or names):
            if not (args.keep and environment.interpreter.exists()):
                build(environment)
            script = [str(environment.interpreter), __file__, "--here", environment.name]
            if subprocess.run([*script, "--", *rest], cwd=ROOT).returncode:
                failed.append(environment.name)
            if not environment.oldest and (said := unseen_triton(environment.interpreter)):
                failed.append(said)
    asked = [name for name in COMBINATIONS if {name, WINDOW.name} & {*args.names}]
    if asked:
        if not (args.keep and WINDOW.interpreter.exists()):
            build(WINDOW)
        failed += run_window(asked, WINDOW.interpreter, args.whole, rest)
    print(f"failed: {', '.join(failed)}" if failed else "passed")
    return 1 if failed else 0


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments at "--"."""
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], argv[place + 1 :]


if __name__ == "__main__":
    sys.exit(main())
