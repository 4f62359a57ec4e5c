"""Run training frameworks' own commands, unpatched and patched, for docs/frameworks.md.

    python scripts/compat/frameworks.py trl sft                     one framework, one mode
    python scripts/compat/frameworks.py axolotl --family deepseek_v3
    python scripts/compat/frameworks.py --table [--write]           the generated part of the page

Each framework has its own environment under --envs, made on first use (gigabytes, ten minutes).
moe_patch comes from this checkout by PYTHONPATH. Everything runs on the CPU, offline.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frameworks_lib import others, recipes
from frameworks_lib.page import page
from frameworks_lib.recipes import STEPS, Framework

ROOT = Path(__file__).resolve().parents[2]
LIB = ROOT / "scripts" / "compat" / "frameworks_lib"
ROWS = ROOT / "benchmarks" / "results" / "frameworks.jsonl"
TORCH = "torch==2.13.0"
LIMIT = 1e-4
MERGE_LIMIT = 1e-5
MISSED = "MERGE INCOMPLETE"  # axolotl's own word
FRAMEWORKS = recipes.FRAMEWORKS | others.FRAMEWORKS
VERSIONS = ("transformers", "peft", "torch")


def environment(envs: Path, name: str) -> Path:
    """Return the environment of a framework; make it if it does not exist."""
    framework, folder = FRAMEWORKS[name], envs / f"fw_{name}"
    if not folder.exists():
        subprocess.run([f"python{framework.python}", "-m", "venv", str(folder)], check=True)
        (folder / "c.txt").write_text(TORCH + "\n")
        pip = [
            str(folder / "bin/python"),
            "-m",
            "pip",
            "install",
            "-q",
            "-c",
            str(folder / "c.txt"),
        ]
        subprocess.run([*pip, TORCH], check=True)
        if framework.alone:
            subprocess.run([*pip, *framework.more], check=True)
            subprocess.run([*pip, "--no-deps", framework.package], check=True)
        else:
            subprocess.run([*pip, framework.package, *framework.more], check=True)
    return folder


def variables(env: Path, work: Path, trace: Path | None) -> dict[str, str]:
    """Return a run's environment variables: offline, one thread, and the trace if requested."""
    paths = [str(ROOT), str(work)]
    if trace is not None:
        paths.insert(0, str(LIB / "site"))
    more = {"MOE_PATCH_TRACE": str(trace)} if trace is not None else {}
    return {
        **os.environ, **more, "PATH": f"{env / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1", "DO_NOT_TRACK": "1", "AXOLOTL_DO_NOT_TRACK": "1",
        "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled", "USE_HF": "1",
        "ACCELERATE_USE_CPU": "true", "HF_HOME": str(work / "hf"),
        "MODELSCOPE_CACHE": str(work / "ms"),
    }  # fmt: skip


def call(
    command: list[str], env: Path, work: Path, log: str, trace: Path | None, more: dict[str, str]
) -> str:  # fmt: skip
    """Run a command in ``work``; its output, which is kept in ``log``.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    command = [str(env / "bin" / command[0]), *command[1:]]
    with open(work / f"{log}.log", "w") as file:
        subprocess.run(
            command, cwd=work, env=variables(env, work, trace) | more, stdout=file,
            stderr=subprocess.STDOUT, timeout=900, check=True,
        )  # fmt: skip
    return (work / f"{log}.log").read_text(errors="replace")


def versions(env: Path, package: str) -> dict[str, str]:
    """Return the versions that an environment holds."""
    names = (package.partition("=")[0], *VERSIONS)
    code = (
        "import sys, json; from importlib.metadata import version; "
        f"print(json.dumps([sys.version.split()[0], *map(version, {names})]))"
    )
    out = subprocess.run(
        [str(env / "bin/python"), "-c", code], check=True, capture_output=True, text=True
    ).stdout
    python, own, *rest = json.loads(out)
    return {"version": own, **dict(zip(VERSIONS, rest, strict=True)), "python": python}


class Stopped(Exception):
    """A run ended early; ``patched`` tells the unpatched run from the other."""

    def __init__(self, patched: bool, log: str) -> None:
        errors = re.findall(
            r"^(?:\[rank0\]: )?((?:[\w.]+\.)?\w*(?:Error|Exception): .+)", log, re.M
        )
        self.reason = errors[-1] if errors else log.strip().splitlines()[-1]
        self.result = "refused" if patched else "not_installable"
        super().__init__(self.reason)


@dataclass(frozen=True)
class Place:
    """The folder of a framework's runs of one family, and how to run them."""

    framework: Framework
    env: Path
    work: Path
    family: str

    def run(self, mode: str, patched: bool) -> tuple[str, list[str]]:
        """Run a mode in a folder and with a trace of its own; (its name, its command).

        Raises:
            Stopped: the command failed.
        """
        run = f"{mode}_{'patched' if patched else 'plain'}"
        trace = self.work / f"{run}_trace"
        for folder in (trace, self.work / run):
            shutil.rmtree(folder, ignore_errors=True)
        trace.mkdir()
        command = self.framework.command(self.work, run, self.family, mode, patched)
        print(f"{self.work.name} {run}: {' '.join(command)[:160]}", file=sys.stderr, flush=True)
        try:
            self.call(command, run, trace)
        except subprocess.CalledProcessError:
            log = (self.work / f"{run}.log").read_text(errors="replace")
            if patched and "moe_patch.errors." not in log:
                raise  # of neither kind: look at the log
            raise Stopped(patched, log) from None
        return run, command

    def call(self, command: list[str], log: str, trace: Path | None = None) -> str:
        return call(command, self.env, self.work, log, trace, dict(self.framework.env))

    def compare(self, *args: str) -> dict[str, Any]:
        out = self.call(["python", str(LIB / "compare.py"), ".", *args], "cmp")
        return json.loads(out.strip().splitlines()[-1])


def place(name: str, family: str, envs: Path, work: Path) -> Place:
    """The folder of a framework's runs, with the tiny model in it."""
    made = Place(FRAMEWORKS[name], environment(envs, name), work / f"{name}_{family}", family)
    if not (made.work / "tiny").exists():
        made.work.mkdir(parents=True, exist_ok=True)
        made.call(["python", str(LIB / "tiny.py"), ".", family], "tiny")
    return made


def trained(at: Place, mode: str) -> dict[str, Any]:
    """Return the row's fields for two trainings, unpatched and patched."""
    plain, _ = at.run(mode, False)
    ours, _ = at.run(mode, True)
    calls = [json.loads(p.read_text()) for p in (at.work / f"{ours}_trace").glob("*.json")]
    layers, steps = 2, STEPS // 2 if mode == "resume" else STEPS
    least = min((min(c.values()) for c in calls), default=0)
    processes = 2 if mode == "two" else 1
    traced = (
        least >= layers * steps and len(calls) == processes
        and not any((at.work / f"{plain}_trace").iterdir())
    )  # fmt: skip
    found = at.compare(plain, ours, mode)
    passed = (
        found["losses_max_rel"] <= LIMIT and found["loss_moved"] > 0.05 and traced
        and found["adapter_loads"] is not False and found["steps"] == STEPS
    )  # fmt: skip
    kept = {key: found[key] for key in ("losses_max_rel", "loss_moved", "adapter_loads")}
    return {**kept, "traced": traced, "result": "pass" if passed else "fail"}


def merged(at: Place, mode: str) -> dict[str, Any]:
    """Return the row's fields for a merge of the adapter that the patched training saved."""
    run, _ = at.run(mode, True)
    found = at.compare("lora_patched", run, "merge")
    passed = found["merged_max_rel"] <= MERGE_LIMIT
    note = f"merged logits {found['merged_max_rel']:.1e} from PEFT's"
    if MISSED in (at.work / f"{run}.log").read_text(errors="replace"):
        note += f"; axolotl says {MISSED}, and its status is 0"
    return {**found, "result": "pass" if passed else "fail", "note": note}


def measure(name: str, mode: str, family: str, envs: Path, work: Path) -> dict[str, Any]:
    """One row: a mode of a framework, unpatched and patched."""
    at = place(name, family, envs, work)
    framework = at.framework
    recipes.PLUGIN = str(ROOT / "moe_patch/integrations/ms_swift/moe_patch_swift.py")
    found: dict[str, Any] = {}
    try:
        found = (merged if mode.startswith("merge") else trained)(at, mode)
    except Stopped as stopped:
        found = {"result": stopped.result, "note": stopped.reason.replace(str(ROOT), ".")}
    command = framework.command(at.work, f"{mode}_patched", family, mode, True)
    shown = [part.removeprefix(f"{ROOT}/") for part in command]
    empty = dict.fromkeys(("losses_max_rel", "loss_moved", "traced", "adapter_loads"))
    return {
        "framework": framework.package.partition("=")[0], **versions(at.env, framework.package),
        "command": " ".join([*(f"{k}={v}" for k, v in framework.env), *shown]),
        "family": family, "mode": mode, "patched": True, **empty, **found,
        "note": found.get("note") or framework.note, "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def commit() -> str:
    """Return the checkout's commit, with a + if the package differs from it."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *args], check=True, capture_output=True, text=True
        ).stdout.strip()

    dirty = git("status", "--porcelain", "--", "moe_patch")
    return git("rev-parse", "--short", "HEAD") + ("+" if dirty else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("framework", nargs="?", choices=FRAMEWORKS)
    parser.add_argument("modes", nargs="*", metavar="MODE", help="default: all of the framework's")
    parser.add_argument("--family", default="qwen3_moe", choices=tuple(recipes.ATTENTION))
    parser.add_argument(
        "--envs", type=Path, default=Path("/tmp"), help="folder of the environments"
    )
    parser.add_argument("--work", type=Path, default=Path("/tmp/frameworks"), help="of the runs")
    parser.add_argument("--table", action="store_true", help="check docs/frameworks.md")
    parser.add_argument("--write", action="store_true", help="with --table: write it")
    args = parser.parse_args()
    if args.table:
        return page(ROWS, ROOT / "docs" / "frameworks.md", args.write)
    if args.framework is None:
        parser.error("name a framework, or --table")
    for mode in args.modes or FRAMEWORKS[args.framework].modes:
        row = measure(args.framework, mode, args.family, args.envs, args.work)
        print(json.dumps(row))
        with ROWS.open("a") as rows:
            rows.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
