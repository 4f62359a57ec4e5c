"""Types of an op and an implementation. A new op or peer is one more value of these types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench_lib.shapes import Point, Shape

Grads = dict[str, Tensor]


@dataclass(frozen=True)
class Program:
    """An implementation, built for one point.

    Attributes:
        forward: runs the op once and returns its output; no arguments, no state between calls.
        leaves: the tensors to differentiate, by the op's own names ("x", "w13", ...). They share
            storage with the op's inputs, or hold the same values in the implementation's layout.
        canonical: turns one leaf's gradient into the op's layout; other leaves already have it.
        dout: the gradient that backward starts from, if the output's layout is not the op's.
        result: turns the output into the op's layout, for the check; not timed.
    """

    forward: Callable[[], Tensor]
    leaves: Mapping[str, Tensor]
    canonical: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    dout: Tensor | None = None
    result: Callable[[Tensor], Tensor] = lambda out: out


@dataclass(frozen=True)
class Impl:
    """One contestant.

    Attributes:
        name: its name in rows.
        build: makes a Program from the op's inputs; imports what it needs itself. An ImportError
            there marks the implementation as absent.
        ours: repeated more often in the bitwise check.
        peer: third-party code from the peers folder, run in a process of its own.
        needs_cuda: not even tried elsewhere.
        compiles: kernels to compile ahead: none (""), one set for all sizes ("once"), one per shape
            ("shapes"), or one per shape and number of tokens ("sizes").
        modules: modules that its process imports before its turn on the device.
        why_not: says before a try why it cannot run a point on a device, or returns None.
        covers: whether a row for this point makes sense at all.
    """

    name: str
    build: Callable[[Any, Point], Program]
    ours: bool = False
    peer: bool = False
    needs_cuda: bool = False
    compiles: str = ""
    modules: tuple[str, ...] = ()
    why_not: Callable[[Point, torch.device], str | None] = lambda point, device: None
    covers: Callable[[Point], bool] = lambda point: True


@dataclass(frozen=True)
class Work:
    """The least an op must do at a point, from which floors, ceilings and rates are computed.

    Attributes:
        flops: floating-point operations that count, or None.
        moved_bytes: each input read once and each output written once.
        matmuls: (batch, m, k, n) of the dense batched products that do the same work.
    """

    flops: int | None
    moved_bytes: int
    matmuls: tuple[tuple[int, int, int, int], ...] = ()


def _unused(*arguments: Any) -> Any:
    raise NotImplementedError("an op without a measure of its own defines this")


@dataclass(frozen=True)
class Op:
    """One operation under test.

    Attributes:
        name: the sub-command and the file of the rows.
        shapes, tokens, ranks, passes, dtypes: the default grid.
        timer: "do_bench" (L2 flushed before each call) or "cudagraph" (small ops).
        grad: whether forward records for backward. Training ops do, inference ops do not.
        impls: every contestant, in the order of the rows.
        required: names that must have a row for a claim to count, even if only a skipped one.
        make_inputs: makes the same tensors for every implementation, from a seed.
        reference: expected values in fp64, computed once per set of inputs.
        compare: largest relative error of an output and its gradients against the reference.
        limits: highest relative error accepted, by dtype name.
        work: the least the op must do.
        input_bytes: bytes of the inputs, which every implementation holds.
        measure: measures a whole row in the op's own way; the fields from make_inputs to limits
            and input_bytes are then unused.
        dry_shape: the shape of a dry run.
        warm: compiles ahead the kernels of such a measure.
    """

    name: str
    shapes: tuple[str, ...]
    tokens: tuple[int, ...]
    ranks: tuple[int | None, ...]
    passes: tuple[str, ...]
    dtypes: tuple[str, ...]
    timer: str
    grad: bool
    impls: tuple[Impl, ...]
    required: tuple[str, ...]
    work: Callable[[Point], Work]
    make_inputs: Callable[[Point, torch.device], Any] = _unused
    reference: Callable[[Point, Any], Any] = _unused
    compare: Callable[[Point, Any, Tensor, Grads], float] = _unused
    limits: Mapping[str, float] = field(default_factory=dict)
    input_bytes: Callable[[Point], int] = _unused
    measure: Callable[[Impl, Point, torch.device, Any], dict[str, Any]] | None = None
    warm: Callable[[Impl, Point, torch.device], None] | None = None
    dry_shape: str = "tiny"

    def dtypes_of(self, shape: Shape) -> tuple[str, ...]:
        """Return the dtypes of a shape: its own, unless the op compares dtypes."""
        return (shape.dtype,) if shape.dtype and len(self.dtypes) == 1 else self.dtypes

    def impl(self, name: str) -> Impl:
        """Return the contestant of that name.

        Raises:
            KeyError: there is none; the message lists the existing ones.
        """
        for impl in self.impls:
            if impl.name == name:
                return impl
        raise KeyError(f"op {self.name} has no impl {name!r}; it has {', '.join(self.names())}")

    def names(self) -> tuple[str, ...]:
        return tuple(impl.name for impl in self.impls)
