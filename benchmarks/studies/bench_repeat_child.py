#!/usr/bin/env python3
"""Run one variant of :file:`bench_repeat.py`: time our experts in one of many ways."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

import torch  # noqa: E402
from bench_lib import child, clocks, timers  # noqa: E402
from bench_lib.measure import Bounds, Settings, run_pass  # noqa: E402
from bench_lib.ops import OPS  # noqa: E402
from bench_lib.shapes import Point  # noqa: E402

DEVICE = torch.device("cuda", 0)
OURS = "moe_patch"
CASES = (
    ("experts", "qwen3_30b", None),
    ("experts", "olmoe", None),
    ("lora", "qwen3_30b", 16),
    ("lora", "olmoe", 16),
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to time.

    Attributes:
        checked: run the harness (reference, check, repeats, memory) or only the inputs.
        timer: "harness", "plain" (20 calls in a queue) or "synced" (device idle before each).
        bounds: how long dense products and copies are timed first (the harness: 200 ms).
        peers, tokens: other implementations and sizes that run before, in the same process.
        buffer: the timer's buffer: "own" (unchanged), "first" (before the inputs), "small", "none",
            "pool" (outside the allocator's common pool).
        settle_s: how long the harness runs before it times; None keeps its own value.
        empty, collect: whether the cache is emptied, and garbage collected, before.
        rest_s, heat_s: idle time, and time under load, before.
        env: environment variables of the process.
    """

    checked: bool = True
    timer: str = "harness"
    bounds: float = 50.0
    peers: tuple[str, ...] = ()
    tokens: tuple[int, ...] = (16384,)
    buffer: str = "own"
    settle_s: float | None = None
    empty: bool = False
    collect: bool = True
    rest_s: float = 0.0
    heat_s: float = 0.0
    env: tuple[tuple[str, str], ...] = ()


_FRESH = Variant(checked=False, timer="plain", bounds=0.0)
_AS_IS = Variant()
_PEERS = ("hf_grouped_mm", "torch_grouped_mm_early")


def _but(base: Variant, **changed: Any) -> Variant:
    return dataclasses.replace(base, **changed)


# The most important come first; the plain process runs again in the middle and at the end.
VARIANTS = {
    "plain_1": _FRESH,
    "harness_1": _but(_AS_IS, bounds=200.0),
    "harness_among_peers": _but(_AS_IS, peers=_PEERS, tokens=(4096, 16384)),
    "fresh_harness_timer": _but(_FRESH, timer="harness"),
    "buffer_pool": _but(_AS_IS, buffer="pool"),
    "empty_before": _but(_AS_IS, empty=True),
    "buffer_first": _but(_AS_IS, buffer="first"),
    "plain_2": _FRESH,
    "among_peers_empty": _but(_AS_IS, peers=_PEERS, tokens=(4096, 16384), empty=True),
    "buffer_none": _but(_AS_IS, buffer="none"),
    "buffer_small": _but(_AS_IS, buffer="small"),
    "harness_2": _AS_IS,
    "plain_hot_2s": _but(_FRESH, heat_s=2.0),
    "no_bounds": _but(_AS_IS, bounds=0.0),
    "settle_none": _but(_AS_IS, settle_s=0.0),
    "settle_quarter": _but(_AS_IS, settle_s=0.25),
    "rest_2s": _but(_AS_IS, rest_s=2.0),
    "gc_off": _but(_AS_IS, collect=False),
    "plain_synced": _but(_FRESH, timer="synced"),
    "expandable": _but(_AS_IS, env=(("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)),
    "plain_3": _FRESH,
}  # fmt: skip


class Probe:
    """Replaces the harness's timer: times as a variant says, and keeps the results."""

    def __init__(self, variant: Variant, log: Path) -> None:
        self.variant, self.log, self.seen = variant, log, {}
        self._median_ms, self._times = timers.median_ms, []
        from triton import testing

        self._do_bench, testing.do_bench = testing.do_bench, self._keep

    def _keep(self, run: Callable[[], object], **arguments: Any) -> float:
        self._times = self._do_bench(run, **arguments | {"return_mode": "all"})
        return statistics.median(self._times)

    def _timed(self, run: Callable[[], object], timer: str, rep_ms: float) -> list[float]:
        if timer != "harness":
            return timers.plain_times(run, DEVICE, timer == "synced")
        self._median_ms(run, "do_bench", DEVICE, rep_ms)
        return self._times

    def _prepare(self, run: Callable[[], object]) -> None:
        variant = self.variant
        torch.cuda.synchronize()
        if variant.empty:
            child.release(DEVICE)
        time.sleep(variant.rest_s)
        until = time.monotonic() + variant.heat_s
        while time.monotonic() < until:
            for _ in range(10):
                run()
            torch.cuda.synchronize()

    def _one(self, run: Callable[[], object], timer: str, rep_ms: float) -> dict[str, Any]:
        stats, since = torch.cuda.memory_stats(), time.monotonic()
        times = self._timed(run, timer, rep_ms)
        until, after = time.monotonic(), torch.cuda.memory_stats()
        time.sleep(2 * clocks.PERIOD_S)
        quarters = statistics.quantiles(times, n=4)
        return {
            "ms": statistics.median(times), "quarters": [quarters[0], quarters[2]],
            "least": min(times), "most": max(times), "calls": len(times), "took_s": until - since,
            "device_allocs": after["num_device_alloc"] - stats["num_device_alloc"],
            "segments": after["segment.all.current"],
            "reserved_gib": after["reserved_bytes.all.current"] / 2**30,
            "split_gib": after["inactive_split_bytes.all.current"] / 2**30,
            "before": clocks.summary(clocks.read_samples(self.log, since - 0.1, since)),
            "clocks": clocks.summary(clocks.read_samples(self.log, since, until)),
        }  # fmt: skip

    def median_ms(self, run: Callable[[], object], timer: str, device: Any, rep_ms: float) -> float:
        """Replace :func:`timers.median_ms` for our own calls."""
        self._prepare(run)
        found = self._one(run, self.variant.timer, rep_ms)
        issued = time.perf_counter()
        run()
        found["host_us"] = 1e6 * (time.perf_counter() - issued)
        found["plain_after"] = self._one(run, "plain", rep_ms)
        self.seen = found
        return found["ms"]


def _set_buffer(kind: str) -> None:
    """Make another buffer for Triton's timer."""
    if kind == "own":
        return
    from triton.runtime import driver

    torch.cuda.init()
    nbytes = {"first": 256 << 20, "pool": 256 << 20, "small": 64 << 20, "none": 1}[kind]
    pool = torch.cuda.MemPool() if kind == "pool" else None
    with torch.cuda.use_mem_pool(pool) if pool else contextlib.nullcontext():
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    # The pool lives as long as the function that references it.
    driver.active.get_empty_cache_for_benchmark = lambda _pool=pool: buffer


def measure_variant(name: str, log: Path, cases: list[int]) -> None:
    """Print a JSON line per point."""
    variant = VARIANTS[name]
    _set_buffer(variant.buffer)
    if variant.settle_s is not None:
        timers.SETTLE_S = variant.settle_s
    if not variant.collect:
        gc.disable()
    probe, cache = Probe(variant, log), None
    for index in cases:
        op_name, shape, R = CASES[index]
        op, settings = OPS[op_name], Settings()
        if cache is None or cache.op is not op:
            cache = child.Cache(op, DEVICE, settings)
        for T in variant.tokens:
            point = Point(shape, T, "fwd+bwd", "bf16", R)
            _bounds(variant, op, point)
            timers.median_ms, probe.seen = probe.median_ms, {}
            fields = _ours(variant, op, point, cache, settings, probe)
            timers.median_ms = probe._median_ms
            row = {"variant": name, "op": op_name, "shape": shape, "T": T, **probe.seen, **fields}
            print(json.dumps(row), flush=True)
            for peer in variant.peers if op_name == "experts" else ():
                child.perform(op, child.Task(peer, point), cache, settings)


def _bounds(variant: Variant, op: Any, point: Point) -> None:
    if variant.bounds:
        known, timers.SETTLE_S = timers.SETTLE_S, 1.25e-3 * variant.bounds
        Bounds(op, DEVICE, Settings(rep_ms=variant.bounds)).at(point)
        timers.SETTLE_S = known


def _ours(
    variant: Variant, op: Any, point: Point, cache: child.Cache, settings: Settings, probe: Probe
) -> dict[str, Any]:
    if variant.checked:
        found = child.perform(op, child.Task(OURS, point), cache, settings)
        return {name: found.get(name) for name in ("skipped", "rel_err", "bitwise")}
    inputs, _ = cache.load(point, with_reference=False)
    program = cache.program(op.impl(OURS), point)
    probe.median_ms(
        lambda: run_pass(op, point, program, inputs.dout_TD), "", DEVICE, settings.rep_ms
    )
    return {}


def main(name: str, log: Path, cases: str) -> None:
    """Import, report that, and measure once told to."""
    for op in (OPS["experts"], OPS["lora"]):
        impls = [impl for impl in (OURS, *VARIANTS[name].peers) if impl in op.names()]
        child.preload(op, tuple(child.Task(impl, None) for impl in impls))
    print("ready", flush=True)
    if sys.stdin.readline():
        gc.freeze()
        measure_variant(name, log, [int(case) for case in cases.split(",")])
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
