"""The options of the experts operators as one string: torch spends time on each argument.

A string of words rather than a tuple, which no operator of torch takes. Floats travel by
themselves: where shapes are dynamic, compilers make symbols of them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from moe_patch.types import Glu


class Options(NamedTuple):
    """What :func:`spell_options` wrote."""

    kind: str
    gated: bool
    interleaved: bool
    backend: str
    batch_invariant: bool
    storage: str


def spell_options(glu: Glu, backend: str, batch_invariant: bool, storage: str) -> str:
    """The options in words; ``storage`` is :func:`moe_patch.formats.operands.plain_weights`'s."""
    activation = f"{glu.kind} {glu.gated:d} {glu.interleaved:d}"
    return f"{activation} {backend} {batch_invariant:d} {storage}"


@functools.cache
def read_options(spelled: str) -> Options:
    """The inverse of :func:`spell_options`."""
    kind, gated, interleaved, backend, invariant, storage = spelled.split(" ", 5)
    return Options(kind, gated == "1", interleaved == "1", backend, invariant == "1", storage)


@functools.cache
def read_glu(spelled: str, alpha: float, limit: float) -> Glu:
    """The activation: its words and its numbers."""
    options = read_options(spelled)
    return Glu(options.kind, options.gated, options.interleaved, alpha, limit)


def with_scales(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The last arguments of ``experts``, whose scales only the overload for packed weights has."""
    return args if isinstance(args[-1], list) else (*args, [])
