"""Check that a class of the installed transformers fits its family entry.

In another release a class may return other values, take other arguments or rename its attributes.
The entry then does not describe that class. This is not the same as a wrong result.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.errors import EntryMismatchError, MoePatchError, first_line

# Exceptions that code raises when attributes, values or shapes are not what it was written for.
_UNLIKE = (
    AssertionError, AttributeError, LookupError, RuntimeError, StopIteration, TypeError, ValueError
)  # fmt: skip


def mismatch(module: nn.Module, what: str) -> EntryMismatchError:
    """Return the error for a class that its family entry does not fit."""
    import transformers

    return EntryMismatchError(
        f"{type(module).__module__}.{type(module).__qualname__}: its family entry does not fit "
        f"this class (transformers {transformers.__version__}): {what}; accepted: a release of "
        "transformers that the entry describes, or an entry that describes this one "
        "(register_family)"
    )


@contextmanager
def fitting(module: nn.Module) -> Iterator[None]:
    """Blame the entry if its code fails on a class whose own code has just run.

    Raises:
        EntryMismatchError: the code inside failed.
    """
    try:
        yield
    except (MoePatchError, torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except _UNLIKE as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        raise mismatch(module, f"the entry's code fails on it ({said})") from error


def require_call(module: nn.Module, args: tuple) -> None:
    """Check that a class's forward accepts the arguments that its entry passes.

    Raises:
        EntryMismatchError: it takes others.
    """
    signature = inspect.signature(type(module).forward)
    try:
        signature.bind(module, *args)
    except TypeError as error:
        raise mismatch(
            module, f"its forward takes {signature}, the entry calls it with {len(args)} tensors"
        ) from error


def require_form(module: nn.Module, theirs: Any, ours: tuple) -> None:
    """Check that a router returns logits, weights and ids in the positions its entry says.

    The number of experts per token is not checked here: comparing the values covers it.

    Raises:
        EntryMismatchError: the number of values differs, or the kind of tensor in some position.
    """
    theirs = theirs if isinstance(theirs, (tuple, list)) else (theirs,)
    found, described = _form(theirs), _form(ours)
    if found != described:
        raise mismatch(module, f"it returns {_spell(theirs)}, its entry {_spell(ours)}")


def _form(values: Any) -> list[tuple]:
    kinds: list[tuple] = []
    for place, value in enumerate(values):
        if place > 2:
            kinds.append(())
        elif not isinstance(value, Tensor):
            kinds.append((type(value),))
        else:
            shape = value.shape if place == 0 else value.shape[:-1]
            kinds.append((value.is_floating_point(), value.dim(), tuple(shape)))
    return kinds


def _spell(values: Any) -> str:
    named = (
        f"{str(v.dtype).removeprefix('torch.')} {tuple(v.shape)}"
        if isinstance(v, Tensor)
        else type(v).__name__
        for v in values
    )
    return f"({', '.join(named)})"
