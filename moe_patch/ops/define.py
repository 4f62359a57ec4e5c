"""Define torch operators: schema, implementation, fake and autograd formula in one call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from moe_patch.errors import no_second_derivative


@functools.cache
def _library(namespace: str) -> torch.library.Library:
    """Return the library of a namespace; it lives as long as the process."""
    return torch.library.Library(namespace, "DEF")


def define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = no_second_derivative,
    setup: Callable[..., Any] | None = None,
) -> None:
    """Define an operator for all devices.

    Args:
        name: "namespace::name" or "namespace::name.overload", found in ``torch.ops``.
        schema: in torch's grammar, without the name: "(Tensor x) -> Tensor".
        run: the implementation; its outputs alias neither its inputs nor each other.
        fake: the fake implementation, which returns tensors of the right shape and dtype.
        backward, setup: the autograd formula, as in ``torch.library.register_autograd``. The
            default raises UnsupportedOptionError; use it for operators that are a backward. Pass
            None for an operator that writes into an input or runs only without gradients.
    """
    namespace, local = name.split("::")
    library = _library(namespace)
    library.define(f"{local}{schema}")
    library.impl(local, run, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=library)
    if backward is not None:
        torch.library.register_autograd(name, backward, setup_context=setup, lib=library)
