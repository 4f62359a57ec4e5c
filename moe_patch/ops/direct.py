"""Whether an operator's own function may be called in its place, without torch's dispatcher.

The dispatcher turns some thirty arguments into its own values and back, twice with gradients: a
third of the host's time of a call. Nobody sees the difference where nobody watches operators.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter


def _keys(*names: str) -> int:
    """Dispatch keys as the bits of a set."""
    bits = 0
    for name in names:
        bits |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return bits


# What a thread adds to every call where nothing is traced, transformed, batched or intercepted.
_PLAIN_THREADS = {_keys("BackendSelect"), _keys("BackendSelect", "ADInplaceOrView")}
# What the dispatcher does for a tensor before a kernel may read its memory.
_NOT_AS_STORED = _keys("Negative", "Conjugate", "ZeroTensor")


def unwatched(tensors: Iterable[Tensor | None]) -> bool:
    """Whether the call is plain eager work on plain tensors.

    Not under ``torch.compile``, tracing, a dispatch mode (selective checkpointing, fake tensors,
    counters), a transform of ``torch.func``, batched gradients or the profiler; nor with subclasses
    such as DTensor, and views whose values are not what is stored (``_neg_view``).
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._dispatch_tls_local_include_set().raw_repr() in _PLAIN_THREADS
        and not torch._C._autograd._profiler_enabled()
        and all(t is None or _as_stored(t) for t in tensors)
    )


def _as_stored(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor or type(tensor) is Parameter
    return plain and not torch._C._dispatch_keys(tensor).raw_repr() & _NOT_AS_STORED
