"""Facts about modules and tensors that patching, debugging and recording share.

Other libraries leave these marks. They are read by name, so that nothing needs to be imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def parameter_of(module: nn.Module, name: str) -> Any:
    """Return an attribute that mostly is a parameter, at a tenth of the time of ``getattr``.

    Raises:
        AttributeError: the module has none of that name.
    """
    found = module._parameters.get(name)
    return getattr(module, name) if found is None else found


def child_of(module: nn.Module, name: str) -> Any:
    """Return an attribute that mostly is a module, likewise."""
    found = module._modules.get(name)
    return getattr(module, name) if found is None else found


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor (FSDP2, tensor parallelism): only a part lies here."""
    return type(tensor).__name__ == "DTensor"


def has_accelerate_hook(module: nn.Module) -> bool:
    """Return whether accelerate wraps the module's forward, to move its weights to the device."""
    return "_hf_hook" in module.__dict__


def is_decorated(module: nn.Module) -> bool:
    """Return whether a decorator of transformers wraps the forward of the module's class."""
    return hasattr(type(module).forward, "__wrapped__")


def undecorated_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of the module's class, called with the module, without its decorator."""
    forward = type(module).forward
    return getattr(forward, "__wrapped__", forward)
