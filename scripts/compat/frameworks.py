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
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from frameworks_lib import recipes
from frameworks_lib.page import page
from frameworks_lib.recipes import FRAMEWORKS, STEPS

ROOT = Path(__file__).resolve().parents[2]
LIB = ROOT / "scripts" / "compat" / "frameworks_lib"
ROWS = ROOT / "benchmarks" / "results" / "frameworks.jsonl"
TORCH = "torch==2.13.0"
LIMIT = 1e-4
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


def call(command: list[str], env: Path, work: Path, log: str, trace: Path | None = None) -> str:
    """Run a command in ``work``; return its output, which ``log`` keeps as well.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    command = [str(env / "bin" / command[0]), *command[1:]]
    with open(work / f"{log}.log", "w") as file:
        subprocess.run(
            command, cwd=work, env=variables(env, work, trace), stdout=file,
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


def measure(name: str, mode: str, family: str, envs: Path, work: Path) -> dict[str, Any]:
    """Return one row: a mode of a framework, unpatched and patched."""
    framework, env = FRAMEWORKS[name], environment(envs, name)
    work = work / f"{name}_{family}"
    if not (work / "tiny").exists():
        work.mkdir(parents=True, exist_ok=True)
        call(["python", str(LIB / "tiny.py"), ".", family], env, work, "tiny")
    recipes.PLUGIN = str(ROOT / "moe_patch/integrations/ms_swift/moe_patch_swift.py")
    commands = {}
    for patched in (False, True):
        run = f"{mode}_{'patched' if patched else 'plain'}"
        trace = work / f"{run}_trace"
        for folder in (trace, work / run):
            shutil.rmtree(folder, ignore_errors=True)
        trace.mkdir()
        commands[run] = framework.command(work, run, family, mode, patched)
        print(
            f"{name} {family} {run}: {' '.join(commands[run])[:160]}", file=sys.stderr, flush=True
        )
        call(commands[run], env, work, run, trace)
    plain, ours = commands
    calls = [json.loads(p.read_text()) for p in (work / f"{ours}_trace").glob("*.json")]
    layers, steps = 2, STEPS // 2 if mode == "resume" else STEPS
    least = min((min(c.values()) for c in calls), default=0)
    traced = least >= layers * steps and not any((work / f"{plain}_trace").iterdir())
    out = call(["python", str(LIB / "compare.py"), ".", plain, ours, mode], env, work, "cmp")
    found = json.loads(out.strip().splitlines()[-1])
    passed = (
        found["losses_max_rel"] <= LIMIT and found["loss_moved"] > 0.05 and traced
        and found["adapter_loads"] is not False and found["steps"] == STEPS
    )  # fmt: skip
    shown = [part.removeprefix(f"{ROOT}/") for part in commands[ours]]
    return {
        "framework": framework.package.partition("=")[0], **versions(env, framework.package),
        "command": " ".join(shown), "family": family, "mode": mode, "patched": True,
        "result": "pass" if passed else "fail",
        **{key: found[key] for key in ("losses_max_rel", "loss_moved")}, "traced": traced,
        "adapter_loads": found["adapter_loads"], "commit": commit(),
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
