"""Make DistributedDataParallel leave experts to each rank that are packed or in host memory.

DDP broadcasts every parameter when it wraps a model, which packed experts do not support, and needs
all on one device. Such experts are frozen, and equal on all ranks that loaded the same checkpoint.
DDP reads the names to leave out from ``_ddp_params_and_buffers_to_ignore`` of the model that it
wraps, and ``_ddp_ignored`` from the parameters.
"""

from __future__ import annotations

from torch import nn

from moe_patch.formats.tensor import QuantTensor
from moe_patch.patching.offload import held_parameters

IGNORED, MARK = "_ddp_params_and_buffers_to_ignore", "_ddp_ignored"
_OURS = "_moe_patch_ddp_ignored"


def leave_packed_out(model: nn.Module) -> None:
    """Add such experts to the names that DDP ignores, beside those of other libraries.

    Args:
        model: the model that DDP (or a Trainer) will wrap, adapters included. Names of an earlier
            call that no longer exist are dropped.
    """
    readmit_packed(model)
    apart = _apart(model)
    if not apart:
        return
    given = model.__dict__.get(IGNORED)
    ours = [name for name in apart if name not in (given or ())]
    model.__dict__[_OURS] = (given is not None, ours)
    model.__dict__[IGNORED] = [*(given or ()), *ours]
    for name in ours:
        apart[name].__dict__[MARK] = True


def readmit_packed(model: nn.Module) -> None:
    """Undo :func:`leave_packed_out` on this model; names of other libraries stay."""
    existed, ours = model.__dict__.pop(_OURS, (True, []))
    if not ours:
        return
    left = [name for name in model.__dict__[IGNORED] if name not in ours]
    if left or existed:
        model.__dict__[IGNORED] = left
    else:
        del model.__dict__[IGNORED]
    for p in _apart(model).values():
        p.__dict__.pop(MARK, None)


def _apart(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are packed or in host memory, by all their names."""
    held = held_parameters(model)
    named = model.named_parameters(remove_duplicate=False)
    return {name: p for name, p in named if isinstance(p, QuantTensor) or id(p) in held}
