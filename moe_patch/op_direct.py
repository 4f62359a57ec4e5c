"""Whether an operator's own function may be called in its place, without torch's dispatcher.

The dispatcher turns some thirty arguments into its own values and back, twice with gradients: a
third of the host's time of a call. Nobody sees the difference where nobody watches operators.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter


def unwatched(tensors: Iterable[Tensor | None]) -> bool:
    """Whether the call is plain eager work on plain tensors.

    Not under ``torch.compile``, a dispatch mode (selective checkpointing, fake tensors, counters),
    a transform of ``torch.func`` or the profiler, nor with subclasses such as DTensor.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._autograd._profiler_enabled()
    ) and all(t is None or type(t) is Tensor or type(t) is Parameter for t in tensors)
