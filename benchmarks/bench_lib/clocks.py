#!/usr/bin/env python3
"""Sample clocks, power and throttle reasons of a card while something is timed.

A separate process reads them from the driver's library (NVML) and writes a line per sample; whoever
timed something reads the lines afterwards. The process that issues work is therefore never delayed,
and only the driver has to be installed. This file imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PERIOD_S = 0.02
LIBRARY = "libnvidia-ml.so.1"
# Constants of nvml.h: kinds of clock, and the sensor.
SM_CLOCK, MEMORY_CLOCK, GPU_SENSOR = 1, 2, 0
# Bits of the clocks' event reasons, by name; the bit of an idle card is left out.
REASONS = {
    0x2: "application_clocks",
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
    0x100: "display_clocks",
}
FIELDS = ("sm_mhz", "sm_mhz_min", "mem_mhz", "power_w", "temperature_c", "throttle")
UNKNOWN: dict[str, Any] = dict.fromkeys(FIELDS)


class NvmlError(RuntimeError):
    """The driver's library refused a call."""


class Card:
    """One card, by its name in the driver's library.

    Raises:
        OSError: the library is not installed.
        NvmlError: there is no such card.
    """

    def __init__(self, uuid: str) -> None:
        self._library = ctypes.CDLL(LIBRARY)
        self._handle = ctypes.c_void_p()
        self._do("nvmlInit_v2")
        self._do("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))

    def _do(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise NvmlError(f"{name} returned {status}")

    def _get(self, name: str, *arguments: Any, kind: type = ctypes.c_uint) -> int | None:
        value = kind()
        try:
            self._do(name, self._handle, *arguments, ctypes.byref(value))
        except NvmlError:
            return None
        return value.value

    def sample(self) -> dict[str, int | float | None]:
        """Return the current readings; None for readings that card or driver do not offer."""
        return {
            "at": time.monotonic(),
            "sm": self._get("nvmlDeviceGetClockInfo", SM_CLOCK),
            "memory": self._get("nvmlDeviceGetClockInfo", MEMORY_CLOCK),
            "milliwatts": self._get("nvmlDeviceGetPowerUsage"),
            "millijoules": self._get(
                "nvmlDeviceGetTotalEnergyConsumption", kind=ctypes.c_ulonglong
            ),
            "celsius": self._get("nvmlDeviceGetTemperature", GPU_SENSOR),
            "reasons": self._get(
                "nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong
            ),
        }


def read_samples(path: Path, since: float, until: float, skip: int = 0) -> list[dict[str, Any]]:
    """Return the samples of an interval of ``time.monotonic()``, skipping the first bytes."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(skip)
        lines = file.read().splitlines(keepends=True)
    samples = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return [sample for sample in samples if since <= sample["at"] <= until]


def _known(samples: list[dict[str, Any]], name: str) -> list[Any]:
    return [sample[name] for sample in samples if sample[name] is not None]


def _power_w(samples: list[dict[str, Any]]) -> float | None:
    """Return mean power from the energy counter's first to last step, else from the readings."""
    counted = [s for s in samples if s["millijoules"] is not None]
    steps = [
        b for a, b in zip(counted, counted[1:], strict=False) if b["millijoules"] > a["millijoules"]
    ]
    if len(steps) > 1:
        used = steps[-1]["millijoules"] - steps[0]["millijoules"]
        return round(1e-3 * used / (steps[-1]["at"] - steps[0]["at"]), 1)
    read = _known(samples, "milliwatts")
    return round(1e-3 * statistics.mean(read), 1) if read else None


def summary(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row's fields (:data:`FIELDS`) from samples of its timing; None if unknown."""
    if not samples:
        return dict(UNKNOWN)
    sm, memory = _known(samples, "sm"), _known(samples, "memory")
    warmth, reasons = _known(samples, "celsius"), _known(samples, "reasons")
    seen = [name for bit, name in REASONS.items() if any(value & bit for value in reasons)]
    return {
        "sm_mhz": int(statistics.median(sm)) if sm else None,
        "sm_mhz_min": min(sm) if sm else None,
        "mem_mhz": int(statistics.median(memory)) if memory else None,
        "power_w": _power_w(samples),
        "temperature_c": max(warmth) if warmth else None,
        "throttle": (",".join(seen) or "none") if reasons else None,
    }


@contextlib.contextmanager
def watched(log: str | None) -> Iterator[dict[str, Any]]:
    """Yield a row's fields for the time of the block; they are filled when it ends.

    Args:
        log: the file that a :func:`sampler` writes, or None.
    """
    seen, since = dict(UNKNOWN), time.monotonic()
    path = None if log is None else Path(log)
    skip = path.stat().st_size if path is not None and path.exists() else 0
    yield seen
    if path is not None:
        seen |= summary(read_samples(path, since, time.monotonic(), skip))


@contextlib.contextmanager
def sampler(uuid: str | None, path: Path) -> Iterator[None]:
    """Sample a card into a file while the block runs; do nothing without a uuid."""
    if uuid is None:
        yield
        return
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), uuid, str(path), str(PERIOD_S)],
        stdin=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main(uuid: str, path: Path, period_s: float) -> int:
    """Write samples until the process that started this one has ended."""
    parent = os.getppid()
    try:
        card = Card(uuid)
    except (OSError, NvmlError) as error:
        print(f"clocks are not logged: {error}", file=sys.stderr)
        return 0
    with path.open("a", encoding="utf-8") as file:
        while os.getppid() == parent:
            print(json.dumps(card.sample()), file=file, flush=True)
            time.sleep(period_s)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])))
