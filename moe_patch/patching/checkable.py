"""Reasons why a block cannot be compared with transformers at patch time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_patch.formats.tensor import QuantTensor
from moe_patch.formats.weights import foreign_class
from moe_patch.patching.discover import FoundBlock
from moe_patch.runtime.module_patch import is_ours
from moe_patch.runtime.modules import has_accelerate_hook, is_sharded


def why_not(found: FoundBlock, *, packed: bool = False) -> str | None:
    """Say why a block cannot be checked (weights elsewhere, hooks, wrappers), or return None.

    Args:
        found: the block.
        packed: packed experts are no reason, because transformers' forward does not run.
    """
    for module in involved(found):
        if (why := _why_not_module(module)) is not None:
            return why
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            if packed and isinstance(tensor, QuantTensor) and not tensor.is_meta:
                continue
            if (why := _why_not_tensor(tensor)) is not None:
                return why
    return None


def _why_not_module(module: nn.Module) -> str | None:
    own = module.__dict__
    computed = next((name for name, value in own.items() if isinstance(value, Tensor)), None)
    found = {
        "an accelerate hook moves the weights": has_accelerate_hook(module),
        "another library bound a forward": "forward" in own and not is_ours(own["forward"]),
        "FSDP unit": any("FSDP" in cls.__name__ for cls in type(module).__mro__),
        "a parametrization is active": module._modules.get("parametrizations") is not None,
        f"{computed} is computed before each call (pruning, or an older weight norm)": computed,
    }
    return next((why for why, is_so in found.items() if is_so), None)


def _why_not_tensor(tensor: Tensor) -> str | None:
    """Check in this order, because a meta or quantised tensor has no values to read."""
    if tensor.is_meta:
        return "meta weights"
    if isinstance(tensor, QuantTensor):
        return f"experts stored in {tensor.weight.storage}"
    if tensor.is_inference():
        return "weights were made in inference mode"
    if (why := _partition(tensor)) is not None:
        return why
    if (foreign := foreign_class(tensor)) is not None:
        return f"weights stored in {foreign}"
    if tensor.is_floating_point() and tensor.numel() and not _finite(tensor.detach()):
        return "weights hold NaN or Inf"
    return None


def _partition(tensor: Tensor) -> str | None:
    """Say why a tensor is empty or only a part of its parameter; None if it is whole."""
    if hasattr(tensor, "ds_id"):
        return "ZeRO-3 partitioned weights"
    if isinstance(tensor, nn.Parameter) and not tensor.numel():
        return "empty weights: partitioned, and held elsewhere at this moment"
    return "DTensor weights" if is_sharded(tensor) else None


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(torch.linalg.vector_norm(tensor, float("inf"))))


def involved(found: FoundBlock) -> list[nn.Module]:
    """Return the modules that a check of the block runs."""
    modules = [m for _, m in [*found.routers, *found.experts]]
    if found.block is not None and found.spec.checked_as_block:
        modules += found.block.modules()
    return modules
