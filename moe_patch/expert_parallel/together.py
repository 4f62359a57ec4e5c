"""Let ranks fail together, and compare what they hold.

Every function here is collective: each rank of the default group has to call it.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_patch.errors import PatchStateError, UnsupportedModelError


def several() -> bool:
    """Return whether this process is one of several ranks."""
    return dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def together(action: str) -> Iterator[None]:
    """Run a block on every rank; if it raises on one, the others raise too instead of waiting.

    Raises:
        PatchStateError: the block raised on another rank. Its own error stays as it is.
    """
    try:
        yield
    finally:
        own = sys.exc_info()[1]
        reports = _gather(None if own is None else f"{type(own).__name__}: {own}")
        failed = [f"rank {rank}: {said}" for rank, said in enumerate(reports) if said is not None]
        if failed and own is None:
            raise PatchStateError(f"{action} failed on another rank: {'; '.join(failed)}")


def refuse_differences(model: Any, names: list[str]) -> None:
    """Refuse adapters that differ between ranks: their options, names, shapes or values.

    Values are compared by checksum, one tensor at a time on the CPU. Factors that are already
    divided over ranks are compared by shape.

    Raises:
        UnsupportedModelError: names the first difference.
    """
    found: dict[str, Any] = {"options of the adapters": _options(model)}
    parameters = dict(model.named_parameters())
    for name in names:
        found[name] = _described(parameters[name].detach())
    first, *others = _gather(found)
    for rank, other in enumerate(others, 1):
        for key in [*first, *other]:
            if first.get(key) != other.get(key):
                raise UnsupportedModelError(
                    f"adapters differ between ranks: {key} is {other.get(key)} on rank {rank} and "
                    f"{first.get(key)} on rank 0; accepted: equal adapters on all ranks; call "
                    "torch.manual_seed(seed) with one seed and use one LoraConfig, or load the "
                    "same file on every rank"
                )


def adapter_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters that adapters brought or train."""
    return [n for n, p in model.named_parameters() if ".lora_" in n or p.requires_grad]


def _options(model: Any) -> dict[str, str]:
    """Return the options of each adapter as text, without what depends on the process."""
    return {
        name: str({k: sorted(v) if isinstance(v, set) else v for k, v in vars(config).items()})
        for name, config in model.peft_config.items()
    }


def _described(tensor: Tensor) -> tuple[Any, ...]:
    if isinstance(tensor, DTensor):
        return tuple(tensor.shape), str(tensor.dtype)
    content = tensor.cpu().contiguous().view(torch.uint8).numpy()
    return tuple(tensor.shape), str(tensor.dtype), zlib.crc32(content.data)


def _gather(value: Any) -> list[Any]:
    if not several():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
