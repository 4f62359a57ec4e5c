"""Every error this library raises on purpose.

A message names the module (fully qualified), what was found, what is accepted and what to do.
"""


class MoePatchError(RuntimeError):
    """Root of all errors raised on purpose by moe_patch."""


class UnsupportedModelError(MoePatchError):
    """A model, or one of its MoE blocks, cannot be patched."""


class UnsupportedOptionError(MoePatchError):
    """An option is unknown, has a wrong value, or cannot hold on this model or machine."""


class PatchStateError(MoePatchError):
    """The model's patch state does not allow the call (not patched, or patched differently)."""
