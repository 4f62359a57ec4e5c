"""Every error this library raises on purpose.

A message names the module (fully qualified), what was found, what is accepted and what to do.
"""

from __future__ import annotations

from typing import Any


class MoePatchError(RuntimeError):
    """Root of all errors raised on purpose by moe_patch."""


class UnsupportedModelError(MoePatchError):
    """A model, or one of its MoE blocks, cannot be patched."""


class UnsupportedOptionError(MoePatchError):
    """An option is unknown, has a wrong value, or cannot hold on this model or machine."""


class PatchStateError(MoePatchError):
    """The model's patch state does not allow the call (not patched, or patched differently)."""


def no_second_derivative(ctx: Any, *_: Any) -> Any:
    """What every backward operator of this library has for a backward."""
    raise UnsupportedOptionError(
        "moe_patch experts: a second derivative was asked for (backward through a backward that "
        "ran with create_graph=True); accepted: first derivatives; unpatch_model gives "
        "transformers' own experts, which have them"
    )
