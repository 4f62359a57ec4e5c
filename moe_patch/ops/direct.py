"""Decide when an operator's own function may be called in its place, without torch's dispatcher.

The dispatcher turns some thirty arguments into its own values and back, twice with gradients: a
third of the host's time of a call. Nobody sees the difference where nobody watches operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter


class _Dispatcher(NamedTuple):
    """Private functions of torch, and sets of dispatch keys as bits.

    Attributes:
        thread_keys: the set of keys that this thread adds to every call.
        profiling: returns True while a profiler records.
        tensor_keys: the set of keys of a tensor.
        plain_threads: the sets a thread adds where nothing is traced, transformed, batched or
            intercepted.
        not_as_stored: keys of tensors whose values the dispatcher computes before a kernel may
            read their memory.
    """

    thread_keys: Callable[[], Any]
    profiling: Callable[[], bool]
    tensor_keys: Callable[[Tensor], Any]
    plain_threads: tuple[int, int]
    not_as_stored: int


@functools.cache
def _dispatcher() -> _Dispatcher | None:
    """Look the private names of torch up, once; None if this release lacks one of them."""
    try:
        return _Dispatcher(
            torch._C._dispatch_tls_local_include_set,
            torch._C._autograd._profiler_enabled,
            torch._C._dispatch_keys,
            (_keys("BackendSelect"), _keys("BackendSelect", "ADInplaceOrView")),
            _keys("Negative", "Conjugate", "ZeroTensor"),
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
    """
    if torch.compiler.is_compiling():
        return False
    torch_has = _dispatcher()
    return (
        torch_has is not None
        and torch_has.thread_keys().raw_repr() in torch_has.plain_threads
        and not torch_has.profiling()
        and all(t is None or _as_stored(t, torch_has) for t in tensors)
    )


def _as_stored(tensor: Tensor, torch_has: _Dispatcher) -> bool:
    plain = type(tensor) is Tensor or type(tensor) is Parameter
    return plain and not torch_has.tensor_keys(tensor).raw_repr() & torch_has.not_as_stored
