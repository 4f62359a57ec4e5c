"""Split the time of a step into computing, communication and idle time of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the same times as spans that do not overlap, in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """Return the total length of spans, counting overlaps once."""
    return sum(end - start for start, end in union(spans))


def split(compute: list[Span], communication: list[Span]) -> dict[str, float]:
    """Return milliseconds from the first kernel to the last, of spans in microseconds.

    compute: a kernel that is no collective runs. exposed: only a collective runs. hidden: both run.
    idle: nothing runs, so the device waits for the host.
    """
    both = compute + communication
    busy, computing, talking = length(both), length(compute), length(communication)
    total = max(end for _, end in both) - min(start for start, _ in both) if both else 0.0
    parts = {"compute_ms": computing, "exposed_ms": busy - computing}
    parts |= {"hidden_ms": computing + talking - busy, "idle_ms": total - busy}
    return {name: round(value / 1e3, 3) for name, value in parts.items()}


def profiled(step: Callable[[], Any]) -> dict[str, float]:
    """Run a step under torch's profiler and return its :func:`split` on this rank's device."""
    # Recording operators of the host as well would slow the host, and lengthen idle times.
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as found:
        step()
        torch.cuda.synchronize()
    compute, communication = [], []
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            span = (event.time_range.start, event.time_range.end)
            (communication if "nccl" in event.name.lower() else compute).append(span)
    return split(compute, communication)
