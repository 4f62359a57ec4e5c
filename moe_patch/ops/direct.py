"""What eager work need not do: torch's dispatcher where nobody watches, and the same thing twice.

The dispatcher turns some thirty arguments into its own values and back, twice with gradients: a
third of the host's time of a call. Nobody sees the difference where nobody watches operators: there
an operator's own function is called in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

T = TypeVar("T")


def eagerly_cached(function: Callable[..., T]) -> Callable[..., T]:
    """Make a ``functools.cache`` of a pure function for eager work.

    Compilers trace through what is cached, and warn of it: they get the function itself.
    """
    cached = functools.cache(function)

    @functools.wraps(function)
    def call(*args: Any) -> T:
        return function(*args) if torch.compiler.is_compiling() else cached(*args)

    return call


class _Dispatcher(NamedTuple):
    """Private functions of torch, and sets of dispatch keys as bits.

    Attributes:
        thread_keys: the set of keys that this thread adds to every call.
        profiling: returns True while a profiler records.
        is_zero: returns True of a tensor of zeros without memory.
        plain_threads: the sets a thread adds where nothing is traced, transformed, batched or
            intercepted.
    """

    thread_keys: Callable[[], Any]
    profiling: Callable[[], bool]
    is_zero: Callable[[Tensor], bool]
    plain_threads: tuple[int, int]


@functools.cache
def _dispatcher() -> _Dispatcher | None:
    """Look the private names of torch up, once; None if this release lacks one of them."""
    try:
        return _Dispatcher(
            torch._C._dispatch_tls_local_include_set,
            torch._C._autograd._profiler_enabled,
            Tensor._is_zerotensor,
            (_keys("BackendSelect"), _keys("BackendSelect", "ADInplaceOrView")),
        )
    except AttributeError:
        return None


def _keys(*names: str) -> int:
    """Dispatch keys as the bits of a set."""
    bits = 0
    for name in names:
        bits |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return bits


def unwatched(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether the call is plain eager work on plain tensors.

    Not under ``torch.compile``, tracing, a dispatch mode (selective checkpointing, fake tensors,
    counters), a transform of ``torch.func``, batched gradients or the profiler; nor with subclasses
    such as DTensor, and views whose values are not what is stored (``_neg_view``). Never if this
    release of torch does not tell: the operators are slower, and right everywhere.

    Args:
        tensors: of real numbers.
    """
    if torch.compiler.is_compiling():
        return False
    torch_has = _dispatcher()
    if (
        torch_has is None
        or torch_has.thread_keys().raw_repr() not in torch_has.plain_threads
        or torch_has.profiling()
    ):
        return False
    is_zero = torch_has.is_zero
    for tensor in tensors:
        if tensor is None:
            continue
        kind = type(tensor)
        # Of real numbers these two alone are not in memory as they are; asking for keys costs more.
        if (kind is not Tensor and kind is not Parameter) or tensor.is_neg() or is_zero(tensor):
            return False
    return True
