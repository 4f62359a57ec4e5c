"""Properties of modules and tensors, for patching, debugging and recording.

Other libraries set these marks. They are read by name, so those libraries need not be imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def parameter_of(module: nn.Module, name: str) -> Any:
    """Return an attribute that is usually a parameter, ten times faster than ``getattr``.

    Raises:
        AttributeError: the module has no such attribute.
    """
    found = module._parameters.get(name)
    return getattr(module, name) if found is None else found


def child_of(module: nn.Module, name: str) -> Any:
    """Return an attribute that is usually a module, faster than ``getattr``.

    Raises:
        AttributeError: the module has no such attribute.
    """
    found = module._modules.get(name)
    return getattr(module, name) if found is None else found


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor (FSDP2, tensor parallelism), only partly local."""
    return type(tensor).__name__ == "DTensor"


def has_accelerate_hook(module: nn.Module) -> bool:
    """Return whether accelerate wraps the module's forward to move its weights to the device."""
    return "_hf_hook" in module.__dict__


def is_decorated(module: nn.Module) -> bool:
    """Return whether transformers decorates the forward of the module's class."""
    return hasattr(type(module).forward, "__wrapped__")


def undecorated_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the undecorated forward of the module's class, to be called with the module."""
    forward = type(module).forward
    return getattr(forward, "__wrapped__", forward)
