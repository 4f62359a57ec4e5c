"""The row: one JSON object per (run, impl, shape, T, pass, dtype, R), checked before writing."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import platform
import re
import subprocess
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
OURS = "moe_patch"

OPS = (
    "routing", "product_key", "plan", "experts", "lora", "block", "decode", "model", "quantised",
    "signals", "fp8",
)  # fmt: skip
IMPLS = (
    "moe_patch", "torch", "torch_compile", "hf_eager", "hf_batched_mm", "hf_grouped_mm",
    "torch_grouped_mm_early", "scattermoe", "liger", "sonicmoe", "peft", "axolotl_lora",
    "split_lora", "peft_liger", "peft_scattermoe", "all_pairs_loop", "dequant_grouped_mm",
    "te_router",
)  # fmt: skip
SHAPE_NAME = re.compile(
    r"(qwen3_30b|olmoe|mixtral|glm45_air|dsv3_e64|cpu_e64|tiny|tiny128"
    r"|qwen3_30b_12L_(4x4096|1x16384)(_ckpt)?|E\d+_K\d+(_G\d+)?|P\d+_K\d+)"
)
DTYPES = ("bf16", "fp16", "fp32", "nf4", "fp8")
PASSES = ("fwd", "fwd+bwd")
DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
COMMIT = re.compile(r"[0-9a-f]{40}(\+dirty)?")

_TEXT = ("run", "date", "commit", "card", "torch", "op", "impl", "shape", "dtype", "pass")
_VERSION_OR_NULL = ("triton", "transformers")
_SIZE_OR_NULL = ("D", "F", "E", "K", "R")
_NUMBER_OR_NULL = (
    "median_ms", "host_us", "tflops", "ceiling_tflops", "floor_ms", "saved_bytes", "peak_bytes",
    "rel_err",
)  # fmt: skip
# Older rows lack all of these.
_LOGGED_TEXT = ("machine", "throttle")
_LOGGED_NUMBER = ("sm_mhz", "sm_mhz_min", "mem_mhz", "power_w", "temperature_c", "plain_ms")
LOGGED = (*_LOGGED_TEXT, *_LOGGED_NUMBER)
FIELDS = (*_TEXT, *_VERSION_OR_NULL, *_SIZE_OR_NULL, "T", *_NUMBER_OR_NULL, "bitwise")
MODEL_FIELDS = ("moe_ms", "tokens_per_s")
BLOCK_FIELDS = ("kernel_ms",)
OF_OP = {"model": MODEL_FIELDS, "block": BLOCK_FIELDS}
KEY = ("run", "impl", "shape", "T", "pass", "dtype", "R")


class RowError(ValueError):
    """A row that must not be written, or rows that must not be compared."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _type_faults(row: Row) -> Iterable[str]:
    for name in _TEXT:
        if not isinstance(row[name], str) or not row[name]:
            yield f"{name} is {row[name]!r}, not a text"
    for name in _VERSION_OR_NULL:
        if row[name] is not None and not isinstance(row[name], str):
            yield f"{name} is {row[name]!r}, neither a version nor null"
    for name in (*_SIZE_OR_NULL, "T"):
        if (row[name] is None and name == "T") or not isinstance(row[name], int | None):
            yield f"{name} is {row[name]!r}, not an integer"
    extra = (*MODEL_FIELDS, *BLOCK_FIELDS, *_LOGGED_NUMBER)
    for name in (*_NUMBER_OR_NULL, *(n for n in extra if n in row)):
        if row[name] is not None and (not _is_number(row[name]) or row[name] < 0):
            yield f"{name} is {row[name]!r}, neither a finite number >= 0 nor null"
    if row.get("machine", "old") == "" or not isinstance(row.get("machine", ""), str):
        yield f"machine is {row['machine']!r}, not a text"
    if not isinstance(row.get("throttle"), str | None):
        yield f"throttle is {row['throttle']!r}, neither a text nor null"
    if not isinstance(row["bitwise"], bool | None):
        yield f"bitwise is {row['bitwise']!r}, not true, false or null"


def _vocabulary_faults(row: Row) -> Iterable[str]:
    allowed = (("op", OPS), ("dtype", DTYPES), ("pass", PASSES))
    for name, values in allowed:
        if row[name] not in values:
            yield f"{name} is {row[name]!r}; accepted: {', '.join(values)}"
    base, _, variant = row["impl"].partition(":")
    if base not in IMPLS or (variant and base != "moe_patch"):
        yield f"impl is {row['impl']!r}; accepted: {', '.join(IMPLS)} and moe_patch:VARIANT"
    for name, pattern in (("shape", SHAPE_NAME), ("date", DATE), ("commit", COMMIT)):
        if not pattern.fullmatch(row[name]):
            yield f"{name} is {row[name]!r}, which does not match {pattern.pattern}"


def _meaning_faults(row: Row) -> Iterable[str]:
    if "skipped" in row:
        if not row["skipped"] or not isinstance(row["skipped"], str):
            yield "skipped gives no reason"
        if row["median_ms"] is not None:
            yield "a skipped row has a median_ms"
        return
    if row["median_ms"] is None:
        yield "median_ms is null and skipped does not say why"
    ours = row["impl"].partition(":")[0] == "moe_patch"
    if ours and row["op"] in ("experts", "lora"):
        for name in ("rel_err", "bitwise"):
            if row[name] is None:
                yield f"{name} is null on one of our own rows of op {row['op']}"
    if row["op"] == "model" and any(row[name] is None for name in MODEL_FIELDS):
        yield f"op model needs {' and '.join(MODEL_FIELDS)}"


def check_row(row: Row) -> Row:
    """Return the row itself, if it may be written.

    Raises:
        RowError: names every field that is missing, unknown or wrong.
    """
    expected = {*FIELDS, *OF_OP.get(row.get("op", ""), ())}
    # A row has all of the newer fields, or none.
    expected |= {*LOGGED} if row.keys() & {*LOGGED} else set()
    faults = [f"{name} is missing" for name in sorted(expected - row.keys())]
    faults += [f"{name} is unknown" for name in sorted(row.keys() - expected - {"skipped"})]
    if not faults:
        faults += _type_faults(row)
    if not faults:
        faults += [*_vocabulary_faults(row), *_meaning_faults(row)]
    if faults:
        raise RowError(f"bad row for impl {row.get('impl')!r}: {'; '.join(faults)}")
    return row


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Check every row, then append all of them, one JSON object per line."""
    lines = [json.dumps(check_row(row)) + "\n" for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(lines)


def read_rows(path: Path) -> list[Row]:
    """Return all rows of a file, checked."""
    with path.open(encoding="utf-8") as file:
        return [check_row(json.loads(line)) for line in file if line.strip()]


def new_run() -> tuple[str, str]:
    """Return (run id, date), one pair per invocation, shared by every row of it."""
    return uuid.uuid4().hex[:12], datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def commit_of(root: Path) -> str | None:
    """Return HEAD, "+dirty" if a tracked file other than a result differs; None without git."""
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    changed = subprocess.run(
        [*git, "status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return head.stdout.strip() + ("+dirty" if changed.stdout.strip() else "")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(
            r"^model name\s*:\s*(.+)$", info.read_text(encoding="utf-8"), re.MULTILINE
        )
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def card_uuid(device: str) -> str | None:
    """Return the driver's name of the card; None on a CPU."""
    if device != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def machine(device: str) -> Row:
    """Return where a run took place; a CPU's "card" includes the number of threads."""
    if device == "cuda":
        card = torch.cuda.get_device_name()
    else:
        card = f"CPU: {_cpu_name()}, {torch.get_num_threads()} threads"
    return {
        "card": card,
        "machine": f"{_hashed(card_uuid(device) or 'cpu')}-{_hashed(platform.node())}",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
    }
