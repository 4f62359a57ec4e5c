"""Op ``plan``: from expert ids to rows in expert order (a stable sort), with its inverse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench_lib.measure import WrongResultError
from bench_lib.rotating import copies_of
from bench_lib.shapes import Point
from bench_lib.spec import Grads, Impl, Op, Program, Work
from moe_patch.ops.experts import definition
from moe_patch.types import Plan

SEED = 2026


@dataclass
class PlanInputs:
    """Equal copies of the ids, taken in turn so that every call reads its ids from memory."""

    copies: tuple[Tensor, ...]
    dout_TD: None = None
    turn: int = 0

    @property
    def x_TD(self) -> Tensor:
        return self.copies[0]

    def next(self) -> Tensor:
        self.turn = (self.turn + 1) % len(self.copies)
        return self.copies[self.turn]


def make_inputs(point: Point, device: torch.device) -> PlanInputs:
    """Return K distinct experts per token, uniform, int64."""
    s = point.sizes
    generator = torch.Generator(device).manual_seed(SEED)
    ids_TK = torch.rand(point.T, s.E, generator=generator, device=device).topk(s.K).indices
    count = 1 if device.type == "cpu" else copies_of(ids_TK.nbytes)
    return PlanInputs(tuple(ids_TK.clone() for _ in range(count)))


def build(inputs: PlanInputs, point: Point, *, triton: bool) -> Program:
    """Build our kernels, or the definition in torch.

    Raises:
        WrongResultError: the inverse or the offsets differ; rows are compared like any output.
    """
    run: Callable[[Tensor, int], Plan] = definition.build_plan
    if triton:
        from moe_patch.kernels.plan.plan import build_plan as run
    E = point.sizes.E
    found, expected = run(inputs.x_TD, E), definition.build_plan(inputs.x_TD, E)
    for name in Plan._fields:
        if not torch.equal(getattr(found, name), getattr(expected, name)):
            raise WrongResultError(f"{name} is not that of the stable sort")
    return Program(lambda: run(inputs.next(), E).row_of_N, {})


def compare(point: Point, expected: Tensor, out: Tensor, grads: Grads) -> float:
    """Return the share of rows in a wrong place."""
    return float((out != expected).double().mean())


def work(point: Point) -> Work:
    """Return the work: int64 ids read once; int32 rows, slots and offsets written once."""
    return Work(None, point.rows * (8 + 4 + 4) + 4 * (point.sizes.E + 1))


PLAN = Op(
    name="plan",
    shapes=("E128_K8",),
    tokens=(32768,),
    ranks=(None,),
    passes=("fwd",),
    dtypes=("bf16",),
    timer="cudagraph",
    grad=False,
    impls=(
        Impl("moe_patch", partial(build, triton=True), ours=True, needs_cuda=True, compiles="once"),
        Impl("torch", partial(build, triton=False)),
    ),
    required=(),
    make_inputs=make_inputs,
    reference=lambda point, inputs: definition.build_plan(inputs.x_TD, point.sizes.E).row_of_N,
    compare=compare,
    limits={"bf16": 0.0, "fp32": 0.0},
    work=work,
    input_bytes=lambda point: 8 * point.rows,
)
