"""Every error this library raises on purpose.

A message names the module (fully qualified), what was found, what is accepted and what to do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

LOGITS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class MoePatchError(RuntimeError):
    """Root of all errors raised on purpose by moe_patch."""


class UnsupportedModelError(MoePatchError):
    """A model, or one of its MoE blocks, cannot be patched."""


class EntryMismatchError(UnsupportedModelError):
    """A router or block class of the installed transformers is unlike what its entry describes."""


class UnsupportedOptionError(MoePatchError):
    """An option is unknown, has a wrong value, or cannot hold on this model or machine."""


class PatchStateError(MoePatchError):
    """The model's patch state does not allow the call: not patched, patched differently, recorded,
    or its kernels not loaded where that has to be before.
    """


def no_second_derivative(ctx: Any, *_: Any) -> Any:
    """What every backward operator of this library has for a backward."""
    raise UnsupportedOptionError(
        "moe_patch: a second derivative was asked for (backward through a backward that "
        "ran with create_graph=True); accepted: first derivatives; unpatch_model gives "
        "transformers' own modules, which have them"
    )


def refuse_forward_mode(*inputs: Tensor | None, what: str = "experts") -> None:
    """An operator without a forward-mode rule would return a tangent of zero in silence.

    Args:
        inputs: the operator's differentiable inputs.
        what: the operator, for the message.

    Raises:
        UnsupportedOptionError: an input carries a tangent (torch.func.jvp, dual numbers).
    """
    # Tangents exist at a level of forward mode only; to look at each input costs the host more.
    if torch.compiler.is_compiling() or vars(forward_ad).get("_current_level", 0) < 0:
        return
    for t in inputs:
        if t is None or forward_ad.unpack_dual(t).tangent is None:
            continue
        raise UnsupportedOptionError(
            f"moe_patch {what}: a forward-mode derivative was asked for (torch.func.jvp); "
            "accepted: reverse mode (backward, torch.autograd.grad); unpatch_model gives "
            "transformers' own modules, which have it"
        )


def check_logits(logits: Any, where: str, name: str, rows: str = "tokens, experts") -> None:
    """Refuse router logits that are no floating-point matrix.

    Args:
        logits: what a caller gave for them.
        where: the function, for the message.
        name: the argument, for the message.
        rows: the two axes, for the message.

    Raises:
        UnsupportedOptionError: no tensor, another number of axes, or a dtype that holds no logits.
    """
    if not isinstance(logits, Tensor):
        found = f"a {type(logits).__name__}"
    elif logits.dim() != 2 or logits.dtype not in LOGITS:
        found = f"{logits.dtype} of shape {tuple(logits.shape)}"
    else:
        return
    accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in LOGITS)
    raise UnsupportedOptionError(
        f"{where}: {name} is {found}; accepted: a tensor [{rows}] of {accepted}"
    )
