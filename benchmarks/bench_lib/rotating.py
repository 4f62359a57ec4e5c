"""Inputs too small to leave the L2 cache between calls: equal copies, taken in turn.

A graph of many calls over one 8 MB tensor would read it from L2. With copies that together exceed
the cache, every call reads its input from memory, and still computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench_lib.spec import Program

ROTATED_BYTES = 200_000_000
# For inputs so small that this many copies fit in the cache, memory does not determine the time.
MAX_COPIES = 1024


def copies_of(nbytes: int) -> int:
    """Return how many copies of ``nbytes`` take turns."""
    return min(MAX_COPIES, max(2, -(-ROTATED_BYTES // max(1, nbytes))))


@dataclass
class RotatingInputs:
    """Copies of an op's floating-point inputs, and the gradient that backward starts from.

    Attributes:
        copies: one dict of leaves per copy, equal in value.
        dout_TD: gradient of the routing weights.
        fixed: inputs that are not differentiated and stay the same.
        turn: the copy that the next call reads.
    """

    copies: tuple[dict[str, Tensor], ...]
    dout_TD: Tensor
    fixed: dict[str, Tensor] = field(default_factory=dict)
    turn: int = 0

    @property
    def x_TD(self) -> Tensor:
        return next(iter(self.copies[0].values()))

    @property
    def ids_TK(self) -> Tensor:
        """No op here has ids."""
        return torch.empty(0, device=self.x_TD.device)

    def tensors(self) -> dict[str, Tensor]:
        named = {f"{name}{i}": t for i, copy in enumerate(self.copies) for name, t in copy.items()}
        return named | self.fixed

    def program(self, run: Callable[[dict[str, Tensor]], Tensor]) -> Program:
        """Return a program that runs on the next copy at every call."""

        def forward() -> Tensor:
            self.turn = (self.turn + 1) % len(self.copies)
            return run(self.copies[self.turn])

        return Program(forward, CurrentLeaves(self))


class CurrentLeaves(Mapping[str, Tensor]):
    """The leaves of the copy that the last forward read."""

    def __init__(self, inputs: RotatingInputs) -> None:
        self.inputs = inputs

    def __getitem__(self, name: str) -> Tensor:
        return self.inputs.copies[self.inputs.turn][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inputs.copies[0])

    def __len__(self) -> int:
        return len(self.inputs.copies[0])


def rotate(leaves: dict[str, Tensor], dout_TD: Tensor, **fixed: Tensor) -> RotatingInputs:
    """Make enough copies of ``leaves`` to fill the cache several times; one on a CPU."""
    total = sum(t.nbytes for t in leaves.values())
    count = 1 if dout_TD.device.type == "cpu" else copies_of(total)
    copies = tuple({n: t.clone().requires_grad_() for n, t in leaves.items()} for _ in range(count))
    return RotatingInputs(copies, dout_TD, fixed)
