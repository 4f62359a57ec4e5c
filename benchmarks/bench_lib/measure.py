"""Measure one implementation at one point: correctness, repeatability, memory and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench_lib import clocks, timers
from bench_lib.shapes import Point
from bench_lib.spec import Grads, Impl, Op, Program


@dataclass(frozen=True)
class Settings:
    """The thoroughness of a run.

    Attributes:
        repeats: passes in the bitwise check of our own implementations.
        peer_repeats: the same for everyone else.
        rep_ms: how long each timing measures; at least :data:`timers.MIN_SAMPLES` calls.
        clocks: the file of clocks and power that is read after each timing, or None.
        plain: time by :func:`timers.plain_ms`, and check nothing.
        bounds: time the floors and ceilings too.
    """

    repeats: int = 40
    peer_repeats: int = 3
    rep_ms: float = 200.0
    clocks: str | None = None
    plain: bool = False
    bounds: bool = True


class WrongResultError(RuntimeError):
    """An implementation's result is further from the reference than the op allows."""


def run_pass(
    op: Op, point: Point, program: Program, dout_TD: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run one pass; return the output and, with backward, the gradients in leaf order."""
    if not op.grad:
        with torch.no_grad():
            return program.forward(), ()
    out = program.forward()
    if not point.backward:
        return out, ()
    dout = dout_TD if program.dout is None else program.dout
    return out, torch.autograd.grad(out, tuple(program.leaves.values()), dout)


def canonical_grads(program: Program, grads: tuple[Tensor, ...]) -> Grads:
    """Return gradients by leaf name, in the op's layout."""
    named = dict(zip(program.leaves, grads, strict=False))
    return {
        name: program.canonical[name](grad) if name in program.canonical else grad
        for name, grad in named.items()
    }


def repeatable(op: Op, point: Point, program: Program, dout_TD: Tensor, repeats: int) -> bool:
    """Return whether ``repeats`` passes all give the same bits, output and gradients."""
    out, grads = run_pass(op, point, program, dout_TD)
    first = (out.detach().clone(), *(grad.clone() for grad in grads))
    for _ in range(repeats - 1):
        out, grads = run_pass(op, point, program, dout_TD)
        if not all(torch.equal(a, b) for a, b in zip(first, (out, *grads), strict=True)):
            return False
    return True


def check(op: Op, point: Point, program: Program, inputs: Any, expected: Any) -> float:
    """Return the relative error of one pass.

    Raises:
        WrongResultError: it is above the op's limit for the dtype, or NaN.
    """
    out, grads = run_pass(op, point, program, inputs.dout_TD)
    result = program.result(out.detach())
    error = op.compare(point, expected, result, canonical_grads(program, grads))
    limit = op.limits[point.dtype]
    if not error <= limit:
        raise WrongResultError(f"relative error {error:.2e} is above the limit {limit:.0e}")
    return error


def measure(
    op: Op,
    impl: Impl,
    point: Point,
    program: Program,
    inputs: Any,
    expected: Any,
    settings: Settings,
    bitwise: bool | None = None,
) -> dict[str, Any]:
    """Return the measured fields of one row; check the result before timing anything.

    Args:
        op, impl, point: what to measure, and where.
        program: the implementation, built for the point.
        inputs, expected: for the point's size.
        settings: how thorough.
        bitwise: whether passes repeat, if that is already known.

    Raises:
        WrongResultError: see :func:`check`.
    """
    device = inputs.x_TD.device
    found: dict[str, Any] = {"rel_err": check(op, point, program, inputs, expected)}
    if bitwise is None:
        repeats = settings.repeats if impl.ours else settings.peer_repeats
        bitwise = repeatable(op, point, program, inputs.dout_TD, repeats)
    found["bitwise"] = bitwise

    def call() -> object:
        return run_pass(op, point, program, inputs.dout_TD)

    found["saved_bytes"] = None
    if op.grad:
        known = [*inputs.tensors().values(), inputs.ids_TK, *program.leaves.values()]
        found["saved_bytes"] = timers.saved_bytes(program.forward, known, device)
    before = op.input_bytes(point)
    found["host_us"], found["peak_bytes"] = timers.host_us_and_peak(call, before, device)
    with clocks.watched(settings.clocks) as seen:
        found["median_ms"] = timers.median_ms(call, op.timer, device, settings.rep_ms)
    return found | seen


def measure_plain(op: Op, point: Point, program: Program, inputs: Any) -> dict[str, Any]:
    """Return the time in a process that does nothing but these calls."""
    return {
        "median_ms": timers.plain_ms(
            lambda: run_pass(op, point, program, inputs.dout_TD), inputs.x_TD.device
        )
    }


class Bounds:
    """Floors and ceilings; a product that several points need is timed once."""

    def __init__(self, op: Op, device: torch.device, settings: Settings) -> None:
        self.op, self.device, self.settings = op, device, settings
        self.known_ms: dict[tuple, float] = {}

    def at(self, point: Point) -> dict[str, float | None]:
        """Return the copy floor and the matmul ceiling of a point, in milliseconds."""
        work, timer = self.op.work(point), self.op.timer
        if self.device.type == "cpu" or not self.settings.bounds:
            return {"floor_ms": None, "ceiling_ms": None}
        for product in work.matmuls:
            key = (*product, point.torch_dtype)
            if key not in self.known_ms:
                self.known_ms[key] = timers.matmul_ms(
                    product, point.torch_dtype, timer, self.device, self.settings.rep_ms
                )
        times = [self.known_ms[*product, point.torch_dtype] for product in work.matmuls]
        floor_ms = None
        if work.moved_bytes:
            floor_ms = timers.copy_floor_ms(
                work.moved_bytes, timer, self.device, self.settings.rep_ms
            )
        return {"floor_ms": floor_ms, "ceiling_ms": sum(times) if times else None}
