"""Checks that a class of the installed transformers has the form that its family entry describes.

A class may return other values, take other arguments or keep its attributes elsewhere in another
release. Then the entry is not for it, which is another matter than a wrong number.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.errors import EntryMismatchError, MoePatchError

# What code raises over attributes, values and shapes unlike those it was written for.
_UNLIKE = (
    AssertionError, AttributeError, LookupError, RuntimeError, StopIteration, TypeError, ValueError
)  # fmt: skip


def mismatch(module: nn.Module, what: str) -> EntryMismatchError:
    """The error for a class that is unlike its family entry."""
    import transformers

    return EntryMismatchError(
        f"{type(module).__module__}.{type(module).__qualname__}: its family entry does not fit "
        f"this class (transformers {transformers.__version__}): {what}; accepted: a release of "
        "transformers that the entry describes, or an entry that describes this one "
        "(register_family)"
    )


@contextmanager
def fitting(module: nn.Module) -> Iterator[None]:
    """Run an entry's code on a class whose own code ran: a failure is the entry's.

    Raises:
        EntryMismatchError: the code inside failed.
    """
    try:
        yield
    except (MoePatchError, torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except _UNLIKE as error:
        said = str(error).strip().partition("\n")[0]
        raise mismatch(
            module, f"the entry's code fails on it ({type(error).__name__}: {said})"
        ) from error


def require_call(module: nn.Module, args: tuple) -> None:
    """Check that a class's forward takes the arguments that its entry calls it with.

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
    """Check that a router returns logits, weights and ids in the places that its entry has them.

    How many experts a token takes is a value, which a comparison of numbers judges.

    Raises:
        EntryMismatchError: another number of values, or another kind of tensor in some place.
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
