"""Per-thread list of launches while a pass is being recorded (kernels/common/recording.py)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple


class Launch(NamedTuple):
    """A direct launch.

    Attributes:
        compiled: the launcher's cache entry of the kernel.
        sizes: the three sizes of the grid.
        operands: tensors and boxes.
        numbers: all other runtime arguments, in the kernel's order.
    """

    compiled: Any
    sizes: tuple[int, ...]
    operands: Sequence[Any]
    numbers: tuple[int | float, ...]


class _Notes(threading.local):
    """A thread's launches, or None if nothing is recorded; None stands for an indirect launch."""

    launches: list[Launch | None] | None = None


NOTES = _Notes()
