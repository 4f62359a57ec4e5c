"""Measure the time of a training step inside some modules: forwards, recomputes and backwards.

Events at the borders of the modules cut the device's time line into pieces; a stack assigns each
piece. A recompute of a whole layer starts inside the backward of the module that first needs it.
The layer therefore takes the time back until one of the modules begins in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class Meter:
    """Measures the time inside ``modules``, and outside of them in ``layers`` around them."""

    def __init__(
        self, modules: Iterable[nn.Module], layers: Iterable[nn.Module], device: torch.device
    ) -> None:
        self.device = device
        self._stack = [False]
        self._marks: list[tuple[bool, Any]] = []
        self._handles: list[Any] = []
        for inside, group in ((True, modules), (False, layers)):
            for module in group:
                self._watch(module, inside)

    def _watch(self, module: nn.Module, inside: bool) -> None:
        def enter(*arguments: Any) -> None:
            self._mark()
            self._stack.append(inside)

        def leave(*arguments: Any) -> None:
            self._mark()
            self._stack.pop()

        # A recompute stops by an exception once it has all it needs: always call leave.
        self._handles += [
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave, always_call=True),
        ]
        if inside:
            self._handles += [
                module.register_full_backward_pre_hook(enter),
                module.register_full_backward_hook(leave),
            ]

    def _mark(self) -> None:
        if self.device.type == "cuda":
            now: Any = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self._marks.append((self._stack[-1], now))

    def take_ms(self) -> float:
        """Return milliseconds inside since the last call."""
        marks, self._marks = self._marks, []
        if self._stack != [False]:
            raise RuntimeError(f"{len(self._stack) - 1} modules were entered and never left")
        return sum(
            self._between(before, after)
            for (_, before), (inside, after) in zip(marks, marks[1:], strict=False)
            if inside
        )

    def _between(self, before: Any, after: Any) -> float:
        if self.device.type == "cuda":
            after.synchronize()
            return before.elapsed_time(after)
        return 1e3 * (after - before)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
