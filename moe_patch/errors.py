"""All errors that this library raises on purpose.

Each message names the module (fully qualified), what was found, what is accepted and what to do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

LOGITS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class MoePatchError(RuntimeError):
    """Base class of all errors that moe_patch raises on purpose."""


class UnsupportedModelError(MoePatchError):
    """A model, or one of its MoE blocks, cannot be patched."""


class EntryMismatchError(UnsupportedModelError):
    """A router or block class of the installed transformers does not match its family entry."""


class UnsupportedOptionError(MoePatchError):
    """An option is unknown, has a wrong value, or is not supported on this model or machine."""


class PatchStateError(MoePatchError):
    """The model is in a state that does not allow the call.

    Examples: it is not patched, it is patched differently, it is being recorded, or its kernels
    have to be loaded first.
    """


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its class name if the text is empty."""
    return str(error).strip().partition("\n")[0].strip() or type(error).__name__


def no_second_derivative(ctx: Any, *_: Any) -> Any:
    """Backward of a backward operator: raises, because no second derivative exists."""
    raise UnsupportedOptionError(
        "moe_patch: a second derivative was requested (backward through a backward that "
        "ran with create_graph=True); accepted: first derivatives; call unpatch_model to go "
        "back to transformers' own modules, which support second derivatives"
    )


def refuse_forward_mode(*inputs: Tensor | None, what: str = "experts") -> None:
    """Refuse inputs with tangents: without a forward-mode rule the result's tangent would be zero.

    Args:
        inputs: differentiable inputs of the operator.
        what: name of the operator, for the message.

    Raises:
        UnsupportedOptionError: an input carries a tangent (torch.func.jvp, dual numbers).
    """
    # Tangents exist only inside a forward-mode level. Checking the level is cheaper for the host
    # than checking every input.
    if torch.compiler.is_compiling() or vars(forward_ad).get("_current_level", 0) < 0:
        return
    for t in inputs:
        if t is None or forward_ad.unpack_dual(t).tangent is None:
            continue
        raise UnsupportedOptionError(
            f"moe_patch {what}: a forward-mode derivative was requested (torch.func.jvp); "
            "accepted: reverse mode (backward, torch.autograd.grad); call unpatch_model to go "
            "back to transformers' own modules, which support forward mode"
        )


def check_logits(logits: Any, where: str, name: str, rows: str = "tokens, experts") -> None:
    """Refuse router logits that are not a floating-point matrix.

    Args:
        logits: the caller's value.
        where: name of the function, for the message.
        name: name of the argument, for the message.
        rows: names of the two axes, for the message.

    Raises:
        UnsupportedOptionError: not a tensor, not two-dimensional, or not one of the dtypes LOGITS.
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
