"""Aims of this library beside the newest rows: met, missed or not measured.

Aims are for one H100; another card of its kind that was measured too has lines of its own. Each
ratio is taken within one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_lib.newest import OURS, Line, lines_of, median
from bench_lib.ops import OPS

# The measure of a line, given all lines of its op.
Measure = Callable[[Line, Sequence[Line]], float | None]


@dataclass(frozen=True)
class Aim:
    """One line of the table.

    Attributes:
        what: the quantity.
        op: the op whose rows have it.
        at: selects the lines it is about.
        measure: the quantity at a line, or None.
        wanted: the bound.
        at_least: whether more is better.
    """

    what: str
    op: str
    at: Callable[[Line], bool]
    measure: Measure
    wanted: float
    at_least: bool = True

    def met(self, value: float) -> bool:
        return value >= self.wanted if self.at_least else value <= self.wanted


def over(*impls: str) -> Measure:
    """Return a measure: our speedup over the fastest of some implementations."""

    def measure(line: Line, lines: Sequence[Line]) -> float | None:
        found = [ratio for impl in impls if (ratio := line.faster(impl)) is not None]
        return min(found) if found else None

    return measure


def share(line: Line, lines: Sequence[Line]) -> float | None:
    """Return our share of the rate of dense batched products."""
    return line.quotient((OURS, "tflops"), (OURS, "ceiling_tflops"))


def floors(line: Line, lines: Sequence[Line]) -> float | None:
    """Return our time in copies of the same bytes."""
    return line.quotient((OURS, "median_ms"), (OURS, "floor_ms"))


def peak(line: Line, lines: Sequence[Line]) -> float | None:
    """Return our peak memory over that of the leanest peer."""
    peers = [impl for impl in line.by_impl if not impl.startswith(OURS)]
    peaks = [line.number(impl, "peak_bytes") for impl in peers]
    known = [value for value in peaks if value is not None]
    own = line.number(OURS, "peak_bytes")
    return own / min(known) if known and own is not None else None


def slower(impl: str) -> Measure:
    """Return a measure: our time over that of an implementation."""

    def measure(line: Line, lines: Sequence[Line]) -> float | None:
        ratio = line.faster(impl)
        return None if ratio is None else 1 / ratio

    return measure


def times_frozen_base(line: Line, lines: Sequence[Line]) -> float | None:
    """Return the time of a LoRA pass over that of the frozen base alone, in the same run."""
    return _of_twin(line, lines, R=None, dtype=line.dtype)


def times_bf16(line: Line, lines: Sequence[Line]) -> float | None:
    """Return the time of a pass over quantised experts over one over bf16, in the same run."""
    return _of_twin(line, lines, R=line.R, dtype="bf16")


def _of_twin(line: Line, lines: Sequence[Line], **changed: object) -> float | None:
    point = (line.shape, line.T, line.passes)
    for twin in lines:
        same = (twin.shape, twin.T, twin.passes) == point
        if same and all(getattr(twin, name) == value for name, value in changed.items()):
            found = median(_over_twin(line, twin))
            if found is not None:
                return found
    return None


def _over_twin(line: Line, twin: Line) -> Iterator[float]:
    base_ms = {run[OURS]["run"]: run[OURS]["median_ms"] for run in twin.runs}
    for run in line.runs:
        own, base = run[OURS]["median_ms"], base_ms.get(run[OURS]["run"])
        if own is not None and base is not None:
            yield own / base


def plan_us(line: Line, lines: Sequence[Line]) -> float | None:
    """Return our time in microseconds."""
    own = line.time(OURS)
    return None if own is None else 1e3 * own


def moe_time_saved(line: Line, lines: Sequence[Line]) -> float | None:
    """Return the share of the time in MoE blocks that the patch saves."""
    left = line.quotient((OURS, "moe_ms"), ("peft", "moe_ms"))
    return None if left is None else 1 - left


def _at(shape: str, *tokens: int, passes: str = "fwd+bwd", **more: object) -> Callable:
    def chosen(line: Line) -> bool:
        same = all(getattr(line, name) == value for name, value in more.items())
        return line.shape == shape and line.T in tokens and line.passes == passes and same

    return chosen


def _experts() -> Iterator[Aim]:
    long = {"qwen3_30b": 2.4, "olmoe": 2.2, "glm45_air": 1.65, "dsv3_e64": 1.4, "mixtral": 1.15}
    hf, triton, cute = over("hf_grouped_mm"), over("scattermoe"), over("sonicmoe")
    for shape, wanted in long.items():
        yield Aim("over hf_grouped_mm", "experts", _at(shape, 16384, 32768), hf, wanted)
    for shape, wanted in {"qwen3_30b": 1.5, "olmoe": 1.45}.items():
        yield Aim("over hf_grouped_mm", "experts", _at(shape, 4096), hf, wanted)
    for shape in long:
        for passes, wanted in (("fwd", 0.80), ("fwd+bwd", 0.78)):
            at = _at(shape, 32768, passes=passes)
            yield Aim("share of bmm", "experts", at, share, wanted)
    for shape in long:
        for passes in ("fwd", "fwd+bwd"):
            at = _at(shape, 4096, 16384, 32768, passes=passes)
            yield Aim("over sonicmoe", "experts", at, cute, 0.9)
            yield Aim("over scattermoe", "experts", at, triton, 1.0)
    yield Aim("over sonicmoe", "experts", _at("qwen3_30b", 32768), cute, 1.04)
    for shape in long:
        at = _at(shape, 4096, 16384, 32768)
        yield Aim("peak memory over the leanest", "experts", at, peak, 1.02, at_least=False)


def _lora() -> Iterator[Aim]:
    peers = over(*OPS["lora"].required)
    wanted = {
        ("qwen3_30b", 16384): 2.5, ("qwen3_30b", 4096): 2.0, ("olmoe", 16384): 2.2,
        ("olmoe", 4096): 1.7, ("glm45_air", 16384): 1.8, ("mixtral", 16384): 1.25,
    }  # fmt: skip
    for (shape, T), bound in wanted.items():
        yield Aim("over the fastest peer", "lora", _at(shape, T, R=16), peers, bound)
    for shape in ("qwen3_30b", "olmoe", "glm45_air", "mixtral"):
        at = _at(shape, 16384, R=16)
        yield Aim("share of bmm", "lora", at, share, 0.65)
        yield Aim("times the frozen base", "lora", at, times_frozen_base, 1.35, at_least=False)


def _models() -> Iterator[Aim]:
    for batch, wanted in (("4x4096", 1.4), ("1x16384", 1.2)):
        for ckpt in ("", "_ckpt"):
            at = _at(f"qwen3_30b_12L_{batch}{ckpt}", 16384, R=16)
            yield Aim("step over peft", "model", at, over("peft"), wanted)
            yield Aim("time in MoE blocks saved", "model", at, moe_time_saved, 0.6)


def _quantised() -> Iterator[Aim]:
    peer = over("dequant_grouped_mm")
    wanted = {
        ("qwen3_30b", 16384): 2.0, ("qwen3_30b", 4096): 1.7, ("glm45_air", 16384): 1.3,
        ("glm45_air", 4096): 1.3,
    }  # fmt: skip
    for (shape, T), bound in wanted.items():
        for dtype in ("nf4", "fp8"):
            at = _at(shape, T, dtype=dtype)
            yield Aim("over dequant_grouped_mm", "quantised", at, peer, bound)
            yield Aim("times bf16", "quantised", at, times_bf16, 1.5, at_least=False)


def _small() -> Iterator[Aim]:
    best = over("hf_batched_mm", "hf_grouped_mm")
    yield Aim("over the faster of HF's", "decode", lambda line: True, best, 1.0)
    near, far = ("E64_K8", "E128_K8"), ("E512_K10", "E256_K8_G8")
    for shape in (*near, *far):
        at, wanted = _at(shape, 32768, passes="fwd"), 1.5 if shape in near else 2.5
        yield Aim("copy floors", "routing", at, floors, wanted, at_least=False)
        yield Aim("over torch", "routing", _at(shape, 32768), over("torch"), 5.0)
        yield Aim("over torch.compile", "routing", _at(shape, 32768), over("torch_compile"), 2.0)
    loop = over("all_pairs_loop")
    for P, short in ((64, 2.0), (128, 4.0), (256, 10.0)):
        for K in (16, 32):
            for T, wanted in ((32768, 10.0), (1024, short)):
                at = _at(f"P{P}_K{K}", T, passes="fwd")
                yield Aim("over all_pairs_loop", "product_key", at, loop, wanted)
    yield Aim("µs", "plan", lambda line: True, plan_us, 30.0, at_least=False)
    at = _at("qwen3_30b", 16384)
    yield Aim("recording over not", "signals", at, slower("moe_patch:off"), 1.05, at_least=False)


def all_aims() -> list[Aim]:
    """Return every aim, by op."""
    return [*_experts(), *_lora(), *_models(), *_quantised(), *_small()]


def table(results: Path, aims: Sequence[Aim]) -> Iterator[list[str]]:
    """Yield op, quantity, place, card, bound, value and verdict for aims that have rows."""
    ops = dict.fromkeys(aim.op for aim in aims)
    lines = {op: lines_of(op, results, each_card=True) for op in ops}
    for aim in aims:
        for line in lines[aim.op]:
            value = aim.measure(line, lines[aim.op]) if aim.at(line) else None
            if value is not None:
                where = f"{line.shape}, T = {line.T}, {line.passes}"
                where += "" if line.dtype in ("bf16", "fp32") else f", {line.dtype}"
                bound = f"{'≥' if aim.at_least else '≤'} {aim.wanted:g}"
                verdict = "met" if aim.met(value) else "**missed**"
                yield [aim.op, aim.what, where, line.card, bound, _shown(aim, value), verdict]


def _shown(aim: Aim, value: float) -> str:
    """Format with two decimals, or as many as distinguish a value from the bound that it misses."""
    digits = 2
    while not aim.met(value) and float(f"{value:.{digits}f}") == aim.wanted:
        digits += 1
    return f"{value:.{digits}f}"
