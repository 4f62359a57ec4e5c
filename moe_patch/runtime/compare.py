"""Compare results with those of transformers, with an error limit for each dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.errors import UnsupportedModelError

# The limit for fp64 is loose, because transformers' routers and some experts compute in fp32.
LIMITS = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 2e-2}

# Limit between FP8 products and those of decoded weights: quantised rows give 3 to 5%.
FP8_LIMIT = 8e-2


def limit_for(weight: Tensor) -> float:
    """Return the largest accepted relative error; larger if fp32 products may run in TF32."""
    if weight.dtype == torch.float32 and weight.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        return LIMITS[torch.float16]
    return LIMITS[weight.dtype]


class Direct(nn.Module):
    """Wrapper to run a function of a module under functional_call without its hooks."""

    def __init__(self, module: nn.Module, function: Any) -> None:
        super().__init__()
        self.module = module
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self.module, *args)


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """Return norm(a - b) / norm(b) in fp64; 0 for equal zeros, inf for another a over a zero b."""
    ours, reference = ours.detach().double(), reference.detach().double()
    distance, size = (ours - reference).norm().item(), reference.norm().item()
    return distance / size if size else (0.0 if distance == 0.0 else float("inf"))


def compare(path: str, what: str, ours: Tensor, theirs: Tensor, limit: float) -> None:
    """Raise if the relative difference exceeds ``limit``; the error names the block and ``what``.

    Raises:
        UnsupportedModelError: the shapes differ, or the difference is too large or NaN.
    """
    if ours.shape != theirs.shape:
        raise UnsupportedModelError(
            f"{path}: self-check: {what} has shape {tuple(ours.shape)}, transformers' "
            f"{tuple(theirs.shape)}; the family entry was written for another release"
        )
    error = relative_error(ours, theirs)
    if not error <= limit:
        raise UnsupportedModelError(
            f"{path}: self-check: {what} differs from transformers by {error:.2e} (relative), "
            f"limit {limit:.0e}; report this with the model's config; "
            "self_check=False patches anyway"
        )
