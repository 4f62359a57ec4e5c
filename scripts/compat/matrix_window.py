"""The window of releases: every combination of transformers and PEFT that matrix.py runs.

All combinations share one environment with the newest releases. An older release of transformers
or PEFT is a folder in it, with that package and the dependencies that must be older as well. A
combination is an environment whose path leads to these folders first.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MATRIX = ROOT / "scripts" / "matrix.py"
ROWS = ROOT / "benchmarks" / "results" / "window.jsonl"
NEWEST = "newest"
TRANSFORMERS = ("5.9", "5.13", "5.16", "5.20", NEWEST)
PEFT = ("0.18", "0.20", NEWEST)
SUBSET = "versions and not gpu and not slow"
WHOLE = "not gpu"


@dataclass(frozen=True)
class Combination:
    """One release of transformers with one of PEFT."""

    transformers: str
    peft: str

    @property
    def name(self) -> str:
        """Return its name on the command line."""
        return f"{self.transformers}x{self.peft}"

    @property
    def releases(self) -> list[tuple[str, str]]:
        """Return (package, release) of each package that must be older than the newest."""
        pairs = [("transformers", self.transformers), ("peft", self.peft)]
        return [(package, release) for package, release in pairs if release != NEWEST]


COMBINATIONS = {c.name: c for c in (Combination(t, p) for t in TRANSFORMERS for p in PEFT)}


def add_release(interpreter: Path, folder: Path, package: str, release: str) -> None:
    """Install a release, and what it needs in another version than the environment has.

    Args:
        interpreter: Python of the environment with the newest releases; nothing changes in it.
        folder: where the packages go; kept as it is if it exists.
        package: its name on the index.
        release: "5.9" stands for the last 5.9.x.

    Raises:
        subprocess.CalledProcessError: pip finds no such release, or nothing that fits with it.
    """
    if folder.exists():
        return
    pip = [str(interpreter), "-m", "pip", "install", "-qq"]
    part = folder.with_suffix(folder.suffix + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    report = part / "report.json"
    wanted = f"{package}=={release}.*"
    subprocess.run([*pip, "--dry-run", "--report", str(report), wanted], check=True)
    found = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    pins = [f"{each['name']}=={each['version']}" for each in found]
    subprocess.run([*pip, "--no-deps", "--target", str(part), *pins], check=True)
    part.rename(folder)


def prepare(combination: Combination, base: Path) -> Path:
    """Return the Python that imports a combination.

    It belongs to an environment of a few kilobytes, whose path leads through the folders of the
    older releases to the shared environment. PYTHONPATH would be lost where a test sets it.

    Args:
        combination: of releases; those that are not there yet are installed.
        base: Python of the environment that all combinations share.

    Raises:
        subprocess.CalledProcessError: pip cannot install a release.
    """
    releases = base.parents[1] / "releases"
    lines = []
    for package, release in combination.releases:
        folder = releases / f"{package}-{release}"
        add_release(base, folder, package, release)
        lines.append(str(folder))
    made = releases / combination.name
    if not made.exists():
        subprocess.run([str(base), "-m", "venv", "--without-pip", str(made)], check=True)
    python = made / "bin" / "python"
    lines.append(f"import site; site.addsitedir({_site_packages(base)!r})")
    pth = Path(_site_packages(python)) / "combination.pth"
    pth.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for script in base.parent.iterdir():
        content = script.read_bytes()
        if content.startswith(f"#!{base}\n".encode()):
            copied = made / "bin" / script.name
            copied.write_bytes(content.replace(bytes(base), bytes(python), 1))
            copied.chmod(0o755)
    return python


def _site_packages(interpreter: Path) -> str:
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([str(interpreter), "-c", ask], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows of a run as a table of text, one line a combination."""
    names = ("combination", "result", "passed", "failed", "skipped", "seconds", "cpu_seconds")
    cells = [names, *(tuple(str(row[name]) for name in names) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def pytest_command(selection: str, arguments: list[str]) -> list[str]:
    """Return the command that runs a selection in this interpreter, on two workers."""
    command = [sys.executable, "-m", "pytest", "-n", "2", "-q", "-p", "no:cacheprovider"]
    return [*command, "-m", selection, *arguments]


def test_variables() -> dict[str, str]:
    """Return the variables of a process that runs tests."""
    return os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def run_combination(name: str, whole: bool, row: Path, arguments: list[str]) -> int:
    """Run the window's tests in this interpreter and write what came of them to a file.

    Args:
        name: of the combination that this interpreter imports.
        whole: run the whole suite.
        row: the file; it gets one JSON object.
        arguments: for pytest.
    """
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import compat
    from bench_lib.rows import commit_of, new_run

    place, (_, date) = compat.environment(), new_run()
    print(f"{name}: " + ", ".join(f"{k} {v}" for k, v in place.items()), flush=True)
    report = row.with_suffix(".xml")
    command = pytest_command(WHOLE if whole else SUBSET, [f"--junit-xml={report}", *arguments])
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    status = subprocess.run(command, cwd=ROOT, env=test_variables()).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    values = {
        "combination": name,
        "suite": "whole" if whole else "window",
        "command": f"python scripts/matrix.py {name}" + " --whole" * whole,
        "result": "fail" if status else "pass",
        **counts(report),
        "seconds": round(time.monotonic() - start, 1),
        "cpu_seconds": round(used, 1),
        "python": platform.python_version(),
        "commit": commit_of(ROOT),
        "date": date,
    }
    row.write_text(json.dumps(values | place) + "\n", encoding="utf-8")
    return status


def counts(report: Path) -> dict[str, int]:
    """Return how many tests passed, failed (errors included) and were skipped.

    Args:
        report: pytest's, as XML; where a run wrote none, no test passed.
    """
    found = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    if report.exists():
        suites = xml.etree.ElementTree.parse(report).getroot().iter("testsuite")
        suite = next(suites)
        found = {name: int(suite.attrib[name]) for name in found}
    failed = found["failures"] + found["errors"]
    passed = found["tests"] - failed - found["skipped"]
    return {"passed": passed, "failed": failed, "skipped": found["skipped"]}


def run_window(names: list[str], interpreter: Path, whole: bool, arguments: list[str]) -> list[str]:
    """Run combinations one after the other, print the table, and return the names of failed ones.

    Args:
        names: of combinations.
        interpreter: Python of the environment that they share.
        whole: run the whole suite, not the tests marked "versions".
        arguments: for pytest; with any, no row is kept.
    """
    rows: list[dict[str, Any]] = []
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            row = Path(folder) / f"{name}.json"
            try:
                python = prepare(COMBINATIONS[name], interpreter)
            except subprocess.CalledProcessError as error:
                print(f"{name}: not installed, {error}")
                failed.append(name)
                continue
            script = [str(python), str(MATRIX), "--here", name, "--row", str(row)]
            script += ["--whole"] * whole + ["--", *arguments]
            if subprocess.run(script, cwd=ROOT).returncode:
                failed.append(name)
            if row.exists():
                rows.append(json.loads(row.read_text(encoding="utf-8")))
                if not arguments:
                    with ROWS.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))
    return failed
