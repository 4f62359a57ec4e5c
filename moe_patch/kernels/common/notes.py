"""Where launches are noted while a pass is recorded (kernels/common/recording.py)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple


class Launch(NamedTuple):
    """A direct launch.

    Attributes:
        compiled: the kernel, as the launcher keeps it.
        sizes: of the grid, three.
        operands: tensors and boxes.
        numbers: all others but compile-time arguments, in the kernel's order.
    """

    compiled: Any
    sizes: tuple[int, ...]
    operands: Sequence[Any]
    numbers: tuple[int | float, ...]


class _Notes(threading.local):
    """A thread's launches, None for one that is not direct; None where nothing is recorded."""

    launches: list[Launch | None] | None = None


NOTES = _Notes()
