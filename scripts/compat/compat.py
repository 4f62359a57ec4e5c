"""Run the tests that prove the patch inside training and serving stacks, and keep the rows.

    python scripts/compat/compat.py                    run every proof that this machine can run
    python scripts/compat/compat.py --rows ep tp       some of them
    python scripts/compat/compat.py --on card          only those that use CUDA devices
    python scripts/compat/compat.py --table            only write docs/compatibility.md

A proof is a selection of tests (scripts/compat/compat_proofs.py). Each run appends one line to
benchmarks/results/compat.jsonl; the table shows the newest line of each proof on a CPU and on
cards.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Prefer the checkout to an installed moe_patch.
sys.path[1:1] = [str(ROOT), str(ROOT / "benchmarks")]

import pytest  # noqa: E402
import torch  # noqa: E402
from bench_lib.rows import commit_of, machine, new_run  # noqa: E402
from compat_page import document  # noqa: E402
from compat_proofs import PROOFS, Proof  # noqa: E402

ROWS = ROOT / "benchmarks" / "results" / "compat.jsonl"
PARALLEL = ROOT / "benchmarks" / "results" / "parallel.jsonl"
WINDOW = ROOT / "benchmarks" / "results" / "window.jsonl"
DOC = ROOT / "docs" / "compatibility.md"
PACKAGES = ("transformers", "peft", "accelerate")
# Limit for tests that hang; the slowest proof takes minutes on a busy machine.
TIMEOUT_S = 3600
FIELDS = (
    "row", "test", "command", "card", "world", "torch", "triton", *PACKAGES, "stack", "commit",
    "result", "seconds", "date",
)  # fmt: skip


def uses_cards(proof: Proof) -> bool:
    """Return whether the proof's tests compute on CUDA devices here."""
    return proof.on != "cpu" and torch.cuda.device_count() >= proof.world


def version_of(distribution: str | None) -> str | None:
    """Return "name version" of an installed distribution, or None if it is not installed."""
    if distribution is None:
        return None
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def why_not(proof: Proof) -> str | None:
    """Say why the proof cannot run here, or return None."""
    if proof.on == "card" and not uses_cards(proof):
        return f"needs {proof.world} CUDA device(s)"
    if proof.needs is not None and version_of(proof.needs) is None:
        return f"{proof.needs} is not installed"
    return None


def environment(device: str = "cpu", needs: str | None = None) -> dict[str, Any]:
    """Return the card and the versions in the form that rows have."""
    place = machine(device)
    found = {name: place[name] for name in ("card", "torch", "triton")}
    found |= {name: importlib.metadata.version(name) for name in PACKAGES}
    return found | {"stack": version_of(needs)}


def row_of(proof: Proof, good: bool, seconds: float, commit: str, date: str) -> dict[str, Any]:
    """Return the row of a proof that has just run here."""
    values = {
        "row": proof.row,
        "test": proof.test,
        "command": f"python -m pytest -q {proof.test}",
        "world": proof.world,
        "commit": commit,
        "result": proof.good if good else "fail",
        "seconds": round(seconds, 1),
        "date": date,
    } | environment("cuda" if uses_cards(proof) else "cpu", proof.needs)
    return {name: values[name] for name in FIELDS}


def run_alone(proof: Proof, timeout: float) -> tuple[bool, float]:
    """Run one proof in its own process; return whether its tests passed, and the seconds."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{proof.file}"]
    command += ["-k", proof.select] if proof.select else []
    command += [] if proof.on == "card" else ["-m", "not gpu"]
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=timeout
        )
        # A selection of skipped tests only is no proof.
        good, output = done.returncode == 0 and " passed" in done.stdout, done.stdout
    except subprocess.TimeoutExpired:
        good, output = False, f"stopped after {timeout} s"
    print(f"{proof.row:14} {proof.test}: {output.strip().splitlines()[-1]}", flush=True)
    if not good:
        print(output)
    return good, time.monotonic() - start


def selects(proof: Proof, test: str) -> bool:
    """Return whether a proof selects a test ("tests/file.py::name[case]"), as -k would."""
    file, _, name = test.partition("::")
    if file != f"tests/{proof.file}":
        return False

    def holds(word: str) -> str:
        return word if word in ("and", "or", "not") else str(word in name)

    # tests/stack/test_compat.py checks that selections contain only words, and, or, not.
    return not proof.select or eval(" ".join(map(holds, proof.select.split())))


class Outcomes:
    """A pytest plugin that keeps the collected tests, the outcome of each, and its seconds."""

    def __init__(self) -> None:
        self.expected: list[str] = []
        self.ended: dict[str, tuple[str, float]] = {}
        self._phases: dict[str, list[Any]] = {}

    def pytest_collection_finish(self, session: Any) -> None:
        """Keep all tests of the run."""
        self.expected = [item.nodeid for item in session.items]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep one phase of a test, which ends with its last; runs may stop in between."""
        phases = self._phases.setdefault(report.nodeid, [])
        phases.append(report)
        if report.when == "teardown":
            bad = [phase.outcome for phase in phases if phase.outcome != "passed"]
            seconds = sum(phase.duration for phase in phases)
            self.ended[report.nodeid] = (bad[0] if bad else "passed", seconds)


def run_together(proofs: list[Proof]) -> dict[Proof, tuple[bool, float]]:
    """Run all proofs in this process, which imports and starts up only once.

    Ctrl-C or a SIGTERM ends the run; proofs with unfinished tests are left out.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    files = sorted({f"tests/{proof.file}" for proof in proofs})
    command = ["-v", "--tb=short", "--show-capture=no", "-W", "ignore"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", *files]
    if all(proof.select for proof in proofs):
        command += ["-k", " or ".join(f"({proof.select})" for proof in proofs)]
    if all(proof.on != "card" for proof in proofs):
        command += ["-m", "not gpu"]
    outcomes, results = Outcomes(), {}
    os.chdir(ROOT)
    pytest.main(command, plugins=[outcomes])
    for proof in proofs:
        own = [test for test in outcomes.expected if selects(proof, test)]
        if not own:
            print(f"{proof.row:14} {proof.test}: no such test with these releases")
            continue
        if missing := [test for test in own if test not in outcomes.ended]:
            print(f"{proof.row:14} {proof.test}: not ended, {len(missing)} of {len(own)} tests")
            continue
        found = [outcomes.ended[test] for test in own]
        passed = {outcome for outcome, _ in found} - {"skipped"} == {"passed"}
        results[proof] = (passed, sum(seconds for _, seconds in found))
    return results


def stored(path: Path = ROWS) -> list[dict[str, Any]]:
    """Return all rows of a file so far; none if it does not exist."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description="Prove compatibility rows and write the table.")
    names = sorted({proof.row for proof in PROOFS})
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="ROW")
    parser.add_argument("--table", action="store_true", help="write the table, run nothing")
    parser.add_argument("--on", choices=("cpu", "card"), help="only proofs that compute there")
    parser.add_argument("--world", type=int, help="only proofs with this many processes or cards")
    parser.add_argument("--match", default="", help="only proofs whose selection contains this")
    parser.add_argument("--together", action="store_true", help="all in this process, untimed")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for each proof")
    parser.add_argument("--out", type=Path, default=ROWS, help="append the rows to this file")
    parser.add_argument("--commit", help="HEAD, where the tree was copied without its .git")
    options = parser.parse_args()
    options.commit = options.commit or commit_of(ROOT)
    if options.commit is None and not options.table:
        parser.error(f"{ROOT} is not a git checkout; rows name the commit: pass --commit")
    if not any(options.match in proof.test for proof in PROOFS):
        parser.error(f"no proof's selection contains {options.match!r}; see compat_proofs.py")
    return options


def chosen(options: argparse.Namespace) -> list[Proof]:
    """Return the proofs to run; print those that were selected and cannot run here."""
    proofs = []
    for proof in PROOFS:
        place = "card" if uses_cards(proof) else "cpu"
        if proof.row not in options.rows or options.world not in (None, proof.world):
            continue
        if options.match not in proof.test:
            continue
        if (why := why_not(proof)) is not None:
            print(f"{proof.row:14} {proof.test}: not run, {why}")
        elif options.on in (None, place):
            proofs.append(proof)
    return proofs


def main() -> int:
    """Run proofs and store their rows, or only write the table."""
    options, failed = arguments(), 0
    proofs = [] if options.table else chosen(options)
    _, date = new_run()
    together = run_together(proofs) if options.together and proofs else {}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for proof in proofs:
        if options.together and proof not in together:
            continue
        good, seconds = together.get(proof) or run_alone(proof, options.timeout)
        row = row_of(proof, good, seconds, options.commit, date)
        failed += row["result"] == "fail"
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    if options.out == ROWS:
        DOC.write_text(document(stored(), stored(PARALLEL), stored(WINDOW)), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
