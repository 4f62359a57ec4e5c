"""Timers and memory meters. Every number in a row comes from one of these."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bench_lib.rotating import copies_of

Run = Callable[[], object]

# Minimum number of calls behind a median, whatever one costs.
MIN_SAMPLES = 5
HOST_REPEATS = 30
HOST_LIMIT_S = 0.1
CPU_WARMUP_S = 0.3
CPU_MIN_RUNS = 5
# The timer unrolls all calls of the measured time into one graph.
MAX_GRAPH_MS = 20.0
# Everything runs this long before it is timed, at the clock that it keeps in training. About 0.7 s
# after a load begins, the mean power reaches the card's limit. The clock then falls to 1110 MHz for
# 0.2 s before it settles at 1500 (H200); a shorter wait would measure that fall as well.
SETTLE_S = 2.0
SETTLE_CALLS = 5
PLAIN_WARMUP = 10
# Enough calls of a few ms for the clock to swing once around what the power limit allows.
PLAIN_CALLS = 60
PLAIN_FLUSH_BYTES = 64 << 20


def _cpu_median_ms(run: Run, rep_ms: float) -> float:
    """Return median wall time, from ``rep_ms`` of measured time and at least a few runs."""
    started = time.perf_counter()
    run()
    while time.perf_counter() - started < min(CPU_WARMUP_S, rep_ms / 1e3):
        run()
    times: list[float] = []
    while len(times) < CPU_MIN_RUNS or sum(times) < rep_ms:
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def _one_ms(run: Run, device: torch.device) -> float:
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def wait(device: torch.device) -> None:
    """Wait until a CUDA device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def settle(run: Run, device: torch.device) -> None:
    """Keep the card under a call's load until its clock has settled."""
    until = time.monotonic() + SETTLE_S
    while time.monotonic() < until:
        for _ in range(SETTLE_CALLS):
            run()
        torch.cuda.synchronize(device)


def median_ms(run: Run, timer: str, device: torch.device, rep_ms: float) -> float:
    """Return the median time of one call in milliseconds.

    Args:
        run: the call; its result is dropped.
        timer: "do_bench" (device time between events, L2 flushed before each call) or "cudagraph"
            (device time of replays, without launch gaps). On a CPU both mean wall time.
        device: the device it runs on.
        rep_ms: how long to measure (a graph: at most 20 ms).
    """
    if device.type == "cpu":
        return _cpu_median_ms(run, rep_ms)
    from triton import testing

    if timer == "cudagraph":
        return testing.do_bench_cudagraph(run, rep=min(rep_ms, MAX_GRAPH_MS), return_mode="median")
    if timer == "do_bench":
        one_ms = _one_ms(run, device)
        settle(run, device)
        rep_ms = max(rep_ms, MIN_SAMPLES * one_ms)
        return testing.do_bench(run, warmup=rep_ms / 8, rep=rep_ms, return_mode="median")
    raise ValueError(f"timer is {timer!r}; accepted: do_bench, cudagraph")


def plain_ms(run: Run, device: torch.device) -> float:
    """Return the median of sixty calls in the shortest correct loop, to check :func:`median_ms`.

    On CUDA the clock settles before, as for :func:`median_ms`.
    """
    if device.type == "cpu":
        for _ in range(PLAIN_WARMUP):
            run()
        return _cpu_median_ms(run, 0.0)
    settle(run, device)
    return statistics.median(plain_times(run, device))


def plain_times(run: Run, device: torch.device, synced: bool = False) -> list[float]:
    """Return milliseconds of each of sixty calls on CUDA, after ten others.

    Each call lies between two events, and a buffer a little larger than the L2 is written before
    it. ``synced`` lets the device become idle before each call.
    """
    for _ in range(PLAIN_WARMUP):
        run()
    flush = torch.empty(PLAIN_FLUSH_BYTES, dtype=torch.uint8, device=device)
    pairs = []
    for _ in range(PLAIN_CALLS):
        flush.zero_()
        if synced:
            torch.cuda.synchronize(device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in pairs]


def host_us_and_peak(
    run: Run, input_bytes: int, device: torch.device
) -> tuple[float | None, int | None]:
    """Return (microseconds until one eager call returns, highest allocation during a call).

    The time is the median of a few calls on an idle device. The allocation counts as if only the
    inputs had existed before. Both are None on a CPU, where a call returns when it is done.
    """
    if device.type == "cpu":
        return None, None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device)
    returned: list[float] = []
    started = time.perf_counter()
    while len(returned) < MIN_SAMPLES or (
        len(returned) < HOST_REPEATS and time.perf_counter() - started < HOST_LIMIT_S
    ):
        start = time.perf_counter()
        run()
        returned.append(1e6 * (time.perf_counter() - start))
        torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - allocated + input_bytes
    return statistics.median(returned), peak


def saved_bytes(forward: Callable[[], Tensor], inputs: list[Tensor], device: torch.device) -> int:
    """Return the bytes held from forward to backward beyond the inputs.

    Counts distinct storages that autograd saved, without the inputs. A function may also keep
    tensors that autograd does not see. On CUDA, therefore, the growth of allocated memory without
    the output replaces the sum if it is larger.
    """
    known = {t.untyped_storage().data_ptr() for t in inputs}
    held: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage.nbytes()
        # A node that saves its own output would keep itself alive, and the leaf's end of the graph
        # with it, on the current stream. Capturing a backward through that leaf would then fail.
        return tensor.detach()

    on_cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_cuda else 0
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = forward()
    saved = sum(held.values())
    if on_cuda and out.untyped_storage().data_ptr() not in held:
        grown = torch.cuda.memory_allocated(device) - before - out.untyped_storage().nbytes()
        saved = max(saved, grown)
    return saved


def copy_floor_ms(moved_bytes: int, timer: str, device: torch.device, rep_ms: float) -> float:
    """Return the time of a device copy that moves ``moved_bytes`` in all (half read, half written).

    The timer of small ops does not flush the cache, so several copies take turns there.
    """
    half = max(1, moved_bytes // 2)
    count = copies_of(moved_bytes) if timer == "cudagraph" else 1
    sources = torch.empty(count, half, dtype=torch.uint8, device=device).random_()
    targets = torch.empty_like(sources)
    turns = itertools.cycle(zip(sources, targets, strict=True))

    def copy() -> None:
        source, target = next(turns)
        target.copy_(source)

    return median_ms(copy, timer, device, rep_ms)


def matmul_ms(
    product: tuple[int, int, int, int],
    dtype: torch.dtype,
    timer: str,
    device: torch.device,
    rep_ms: float,
) -> float:
    """Return the time of one dense batched product (batch, m, k, n) on random data."""
    batch, m, k, n = product
    left = torch.randn(batch, m, k, device=device, dtype=dtype)
    right = torch.randn(batch, k, n, device=device, dtype=dtype)
    out = torch.empty(batch, m, n, device=device, dtype=dtype)
    return median_ms(partial(torch.bmm, left, right, out=out), timer, device, rep_ms)
