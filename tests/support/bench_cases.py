"""Shared parts of the benchmark's tests: points, a valid row, a dry run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import bench
import pytest
import torch
from bench_lib.shapes import Point

ROOT = Path(__file__).resolve().parents[2]
NEEDS_GROUPED_MM = pytest.mark.skipif(
    not hasattr(torch.nn.functional, "grouped_mm"),
    reason="the benchmark's peers need grouped_mm: torch 2.10",
)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TINY = Point("tiny", 16, "fwd+bwd", "fp32")
TINY_LORA = dataclasses.replace(TINY, R=4)
# The contract for readers of the files, repeated here on purpose.
FIELDS = {
    "run", "date", "commit", "card", "torch", "triton", "transformers", "op", "impl", "shape", "D",
    "F", "E", "K", "T", "R", "dtype", "pass", "median_ms", "host_us", "tflops", "ceiling_tflops",
    "floor_ms", "saved_bytes", "peak_bytes", "rel_err", "bitwise",
}  # fmt: skip
# Fields logged since the benchmark repeats itself; older rows lack them.
LOGGED = {
    "machine", "plain_ms", "sm_mhz", "sm_mhz_min", "mem_mhz", "power_w", "temperature_c",
    "throttle",
}  # fmt: skip
MODEL_FIELDS = {"moe_ms", "tokens_per_s"}
BLOCK_FIELDS = {"kernel_ms"}


def dry_run(op: str, out: Path | None, *more: str) -> int:
    """Return the exit status of a dry run of one op."""
    where = [] if out is None else ["--out", str(out)]
    return bench.main([op, "--dry-run", "--commit", COMMIT, *where, *more])


def logged_row(**changes) -> dict:
    """Return a valid row of the current format, with changes."""
    log = {
        "machine": "0a1b2c3d-4e5f6071", "plain_ms": 2.1, "sm_mhz": 1980, "sm_mhz_min": 1755,
        "mem_mhz": 3201, "power_w": 690.5, "temperature_c": 61, "throttle": "power_cap",
    }  # fmt: skip
    return good_row(**log | changes)


def good_row(**changes) -> dict:
    """Return a valid row, with changes."""
    row = {
        "run": "r1", "date": "2026-11-27T23:00:00Z", "commit": COMMIT, "card": "card",
        "torch": "2.13.0", "triton": None, "transformers": "5.24.0", "op": "experts",
        "impl": "moe_patch:recompute", "shape": "olmoe", "D": 2048, "F": 1024, "E": 64, "K": 8,
        "T": 4096, "R": None, "dtype": "bf16", "pass": "fwd", "median_ms": 2.0, "host_us": 90.5,
        "tflops": 300.0, "ceiling_tflops": 600.0, "floor_ms": 0.5, "saved_bytes": 0,
        "peak_bytes": 5, "rel_err": 3e-3, "bitwise": True,
    }  # fmt: skip
    return row | changes
