"""Checks of a finished run: equal losses without the patch, and an adapter that loads anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from moe_patch.runtime.compare import relative_error
from moe_patch.train.config import ModelConfig
from moe_patch.train.data import TokenBlocks

# Relative difference of logits of W + s*B*A, computed in one product or in two, through all layers.
# Both differ only by rounding in the weight dtype, which in 16 bits also decides near ties.
LOGITS_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# A wrong gradient shows at every step, and early. Rounding shows in any two equal runs as well. It
# sometimes flips a near tie of a router, so take the median of the early steps. Over many steps the
# weights drift apart a little.
EARLY_STEPS = 10
SAME_NUMBER = 1e-6
EARLY_LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
ALL_STEPS_LIMIT = {torch.float32: 1e-2, torch.bfloat16: 5e-2, torch.float16: 5e-2}


@dataclass(frozen=True)
class Check:
    """One check: the name of the comparison, the largest relative difference and its limit."""

    name: str
    difference: float
    limit: float

    @property
    def passed(self) -> bool:
        """Return whether the difference is within the limit; False for NaN."""
        return self.difference <= self.limit

    def __str__(self) -> str:
        verdict = "ok" if self.passed else "FAILED"
        return f"{self.name}: {self.difference:.1e} relative (limit {self.limit:.0e}) {verdict}"


def _relative(patched: dict[int, float], unpatched: dict[int, float]) -> tuple[list[int], Tensor]:
    """Return the steps that both curves have, and their relative differences in fp64."""
    steps = sorted(patched.keys() & unpatched.keys())
    ours, theirs = (torch.tensor([r[s] for s in steps]).double() for r in (patched, unpatched))
    return steps, (ours - theirs).abs() / theirs.abs()


def first_apart(patched: dict[int, float], unpatched: dict[int, float]) -> str:
    """Say in one line from which step on the two losses are no longer equal."""
    steps, differences = _relative(patched, unpatched)
    apart = [s for s, d in zip(steps, differences.tolist(), strict=True) if not d <= SAME_NUMBER]
    if not apart:
        return f"losses equal to {SAME_NUMBER:.0e} at all {len(steps)} steps"
    return (
        f"losses equal to {SAME_NUMBER:.0e} before step {apart[0]}; from there on rounding has "
        "changed an expert choice or grown through the optimizer"
    )


def compare_losses(
    patched: dict[int, float], unpatched: dict[int, float], dtype: torch.dtype
) -> list[Check]:
    """Compare two loss curves at common steps: the median of the early ones, the worst of all."""
    steps, differences = _relative(patched, unpatched)
    if not steps:
        return [Check("losses, no common step", float("nan"), 0.0)]
    early = differences[:EARLY_STEPS]
    # Both reductions propagate NaN.
    return [
        Check(
            f"losses, steps {steps[0]}-{steps[len(early) - 1]}, median",
            early.median().item(),
            EARLY_LIMIT[dtype],
        ),
        Check(
            f"losses, steps {steps[0]}-{steps[-1]}, largest",
            differences.max().item(),
            ALL_STEPS_LIMIT[dtype],
        ),
    ]


def check_logits(
    reference: Tensor,
    reloaded: Tensor,
    dtype: torch.dtype,
    what: str = "logits, reloaded and unpatched",
) -> Check:
    """Compare two logits tensors: norm of the difference over the norm of the first, in fp64."""
    return Check(what, relative_error(reloaded, reference), LOGITS_LIMIT[dtype])


def probe_logits(model: Any, blocks: TokenBlocks, rows: int = 4) -> Tensor:
    """Return logits of the first ``rows`` examples in eval mode, on the CPU."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=blocks.ids_NL[:rows].to(device)).logits.cpu()
    model.train(was_training)
    return logits


def reload_unpatched(folder: Path, model: ModelConfig, device: torch.device) -> Any:
    """Load the saved result without moe_patch, with the adapter merged into the weights.

    Args:
        folder: holds ``adapter`` or ``model``, and ``base`` for a model built from a config.
        model: says where the base is otherwise, and its dtype.
        device: device for the result.
    """
    dtype = "auto" if model.dtype == "auto" else getattr(torch, model.dtype)
    kwargs: dict[str, Any] = {"dtype": dtype}
    if model.attn_implementation is not None:
        kwargs["attn_implementation"] = model.attn_implementation
    adapter = folder / "adapter"
    if not adapter.is_dir():
        return AutoModelForCausalLM.from_pretrained(folder / "model", **kwargs).to(device)
    base = folder / "base" if model.path is None else model.path
    loaded = AutoModelForCausalLM.from_pretrained(base, **kwargs).to(device)
    return PeftModel.from_pretrained(loaded, adapter).merge_and_unload()
