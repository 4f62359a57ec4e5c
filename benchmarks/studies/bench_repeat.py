#!/usr/bin/env python3
"""Find what makes the benchmark slower than a plain process that times the same calls.

    python benchmarks/studies/bench_repeat.py --out DIR --limit 330

Every variant runs in its own process (bench_repeat_child.py): all import ahead together, and each
measures alone. It times our experts, forward and backward, at a few points by its own timer. The
plain timer follows at once, with nothing changed in memory. One JSON row per variant and point goes
to DIR/bench_repeat.jsonl, with clocks, power and the allocator's activity.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from bench_repeat_child import CASES, OURS, ROOT, VARIANTS, clocks

CHILD = Path(__file__).with_name("bench_repeat_child.py")
CHILD_S = 90
# Variants that are also timed with adapters.
WITH_LORA = ("plain_1", "harness_1", "harness_among_peers", "fresh_harness_timer", "plain_3")
ALL_CASES = "0,1,2,3"
MODEL_T = 16384


def _start(name: str, log: Path, cases: str) -> subprocess.Popen:
    env = os.environ | dict(VARIANTS[name].env)
    command = [sys.executable, str(CHILD), name, str(log), cases]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)


def _results(process: subprocess.Popen) -> list[dict[str, Any]]:
    try:
        text, _ = process.communicate("go\n", timeout=CHILD_S)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def as_it_is(out: Path) -> list[dict[str, Any]]:
    """Return the rows of ``bench.py`` itself at the same points."""
    rows = []
    for op, more in (("experts", (OURS, "hf_grouped_mm")), ("lora", (OURS, "--R", "16"))):
        file = out / f"bench_{op}.jsonl"
        command = [sys.executable, str(ROOT / "scripts/bench.py"), op, "--out", str(file)]
        command += ["--shapes", "qwen3_30b", "olmoe", "--T", str(MODEL_T), "--commit", "0" * 40]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([*command, "--impls", *more], timeout=CHILD_S, stdout=subprocess.DEVNULL)
        for row in map(json.loads, file.read_text().splitlines() if file.exists() else ()):
            if row["impl"] == OURS and row["pass"] == "fwd+bwd":
                point = {"op": op, "shape": row["shape"], "T": row["T"]}
                found = {"ms": row["median_ms"], "host_us": row["host_us"]}
                rows.append({"variant": "bench.py", **point, **found})
    return rows


def _line(row: dict[str, Any], base: float) -> str:
    after, seen = row.get("plain_after", {}), row.get("clocks", {})
    return (
        f"  {row['variant']:20} {row['ms']:7.3f} = {row['ms'] / base:.3f}; plain after it "
        f"{after.get('ms', 0):.3f}; {row.get('least', 0):.2f} to {row.get('most', 0):.2f}; SM "
        f"{seen.get('sm_mhz')} (least {seen.get('sm_mhz_min')}) MHz, {seen.get('power_w')} W, "
        f"{seen.get('throttle')}; allocs {row.get('device_allocs')}, {row.get('segments')} "
        f"segments; host {row.get('host_us') or 0:.0f} us"
    )


def report(rows: list[dict[str, Any]]) -> str:
    """Return a table, and the variants that are within 2% of the plain process."""
    lines = []
    for op, shape, _ in CASES:
        point = (op, shape, MODEL_T)
        here = [r for r in rows if (r["op"], r["shape"], r["T"]) == point and r.get("ms")]
        plain = [r["ms"] for r in here if r["variant"] in ("plain_1", "plain_2", "plain_3")]
        if not plain:
            continue
        base = statistics.median(plain)
        lines.append(f"{op} {shape}: plain {base:.3f} ms ({min(plain):.3f} to {max(plain):.3f})")
        lines += [_line(row, base) for row in here]
        near = [r["variant"] for r in here if r["ms"] < 1.02 * base]
        far = [r["variant"] for r in here if r["ms"] >= 1.02 * base]
        lines.append(f"  within 2%: {', '.join(near)}; beyond: {', '.join(far) or 'none'}")
    return "\n".join(lines)


def main() -> int:
    """Run every variant in turn, as long as time remains."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--limit", type=float, default=330.0, help="seconds in all")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--skip-bench", action="store_true", help="leave bench.py itself out")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    until, log, rows = time.monotonic() + args.limit, args.out / "clocks.log", []
    log.unlink(missing_ok=True)
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    # The first process compiles; its times are discarded.
    waiting = [("compile", _start("plain_1", log, ALL_CASES))]
    for name in args.variants:
        waiting.append((name, _start(name, log, ALL_CASES if name in WITH_LORA else "0,1")))
    with clocks.sampler(uuid, log), (args.out / "bench_repeat.jsonl").open("w") as file:
        for _, process in waiting:
            process.stdout.readline()
        print(f"imported; {until - time.monotonic():.0f} s left", flush=True)
        for index, (name, process) in enumerate(waiting):
            if time.monotonic() > until:
                process.kill()
                continue
            started = time.monotonic()
            found = _results(process)
            times = ", ".join(f"{row.get('ms', 0):.3f}" for row in found)
            print(f"{name}: {time.monotonic() - started:.1f} s, {times} ms", flush=True)
            if index == 3 and not args.skip_bench:
                found += as_it_is(args.out)
            if name != "compile":
                rows += found
                file.writelines(json.dumps(row) + "\n" for row in found)
                file.flush()
    print(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
