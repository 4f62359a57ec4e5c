"""Compare results with transformers' own: limits by dtype, and the refusal above them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.errors import UnsupportedModelError

# fp64: transformers' routers and some experts cast to fp32 inside, whatever the model's dtype.
LIMITS = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 2e-2}


def limit_for(weight: Tensor) -> float:
    """The largest relative error accepted; wider where fp32 products may run in TF32."""
    if weight.dtype == torch.float32 and weight.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        return LIMITS[torch.float16]
    return LIMITS[weight.dtype]


class Direct(nn.Module):
    """Runs a function of a module under functional_call without calling the module (no hooks)."""

    def __init__(self, module: nn.Module, function: Any) -> None:
        super().__init__()
        self.module = module
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self.module, *args)


def compare(path: str, what: str, ours: Tensor, theirs: Tensor, limit: float) -> None:
    """Refuse a relative difference above ``limit``, naming the block and what differs."""
    if ours.shape != theirs.shape:
        raise UnsupportedModelError(
            f"{path}: self-check: {what} has shape {tuple(ours.shape)}, transformers' "
            f"{tuple(theirs.shape)}; the family entry was written for another release"
        )
    norm = theirs.double().norm()
    error = (
        (ours.double() - theirs.double()).norm() / norm.clamp(min=torch.finfo(torch.float64).tiny)
    ).item()
    if not error <= limit:
        raise UnsupportedModelError(
            f"{path}: self-check: {what} differs from transformers by {error:.2e} (relative), "
            f"limit {limit:.0e}; report this with the model's config; "
            "self_check=False patches anyway"
        )
