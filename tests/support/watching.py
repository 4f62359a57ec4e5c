"""Modes that watch operators, which then go through torch's dispatcher (ops/direct.py)."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Watching(TorchDispatchMode):
    """The operators of this library that were called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "moe_patch":
            self.called.append(func.name().removeprefix("moe_patch::"))
        return func(*args, **(kwargs or {}))
