"""Shortcuts for plain eager execution: skip torch's dispatcher, and cache pure functions.

The dispatcher boxes and unboxes some thirty arguments, twice with gradients. That takes a third of
a call's time on the host. In plain eager execution nothing observes operators, so the operator's
own function is called directly.
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
    """Cache a pure function with ``functools.cache`` in eager mode.

    Under a compiler the function itself runs: Dynamo traces through a cached function and warns.
    """
    cached = functools.cache(function)

    @functools.wraps(function)
    def call(*args: Any) -> T:
        return function(*args) if torch.compiler.is_compiling() else cached(*args)

    return call


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast unless the dtype is right: checking it is ten times cheaper than a no-op ``to``."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


class _Dispatcher(NamedTuple):
    """Private functions of torch, and sets of dispatch keys as bits.

    Attributes:
        thread_keys: returns the keys that this thread adds to every call.
        profiling: returns True while a profiler records.
        is_zero: returns True for a ZeroTensor, which has no memory.
        plain_threads: the key sets of a thread in which nothing is traced, transformed, batched or
            intercepted.
    """

    thread_keys: Callable[[], Any]
    profiling: Callable[[], bool]
    is_zero: Callable[[Tensor], bool]
    plain_threads: tuple[int, int]


@functools.cache
def _dispatcher() -> _Dispatcher | None:
    """Look up torch's private names, once; return None if this release lacks one of them."""
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
    """Return the dispatch key set of these keys, as bits."""
    bits = 0
    for name in names:
        bits |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return bits


def is_plain_eager(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether this call is plain eager execution on plain tensors.

    False under ``torch.compile``, tracing, a dispatch mode (selective checkpointing, fake tensors,
    counters), a ``torch.func`` transform, batched gradients or the profiler. False for tensor
    subclasses such as DTensor, and for views whose values differ from their memory (``_neg_view``).
    Always False if this torch release lacks the private functions: the operators are slower, but
    correct everywhere.

    Args:
        tensors: the tensors of the call, real-valued.
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
        # Real tensors differ from their memory only by a negative bit or as a ZeroTensor. Reading
        # the tensor's dispatch keys would cost more.
        if (kind is not Tensor and kind is not Parameter) or tensor.is_neg() or is_zero(tensor):
            return False
    return True
