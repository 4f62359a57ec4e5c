"""Ranks by projection for a number of trainable parameters: ``lora_targets(model, budget=N)``.

Attention, shared experts and routers get rank R, and experts R / K, at least 1. A token passes K
experts, so its path has about the same rank everywhere. Schulman et al., "LoRA Without Regret"
(Thinking Machines Lab, 2025), give each expert the total rank over the number of active experts. No
rank exceeds the smaller side of its weight, and ranks above 8 are multiples of 8, because kernels
on Hopper pad others. R is the largest that fits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from moe_patch.errors import UnsupportedOptionError
from moe_patch.patching.discover import FoundBlock
from moe_patch.runtime.spec import read

# The library's recipes scale every adapter by two, as its shipped training files do.
ALPHA = 2
LARGEST = 1 << 16
STEP = 8


class Projection(NamedTuple):
    """One name of a target, and its weights: numbers of a single rank, and the smallest side.

    ``share`` divides the rank: the number of active experts, or 1.
    """

    name: str
    each: int
    least: int
    share: int

    def rank(self, whole: int) -> int:
        rank = max(1, min(whole // self.share, self.least))
        return rank if rank < STEP else rank - rank % STEP

    def count(self, whole: int) -> int:
        return self.each * self.rank(whole)


def rank_arguments(
    model: nn.Module, targets: dict[str, list[str]], blocks: list[FoundBlock], budget: int
) -> dict[str, Any]:
    """Return ``r``, ``lora_alpha``, ``rank_pattern`` and ``alpha_pattern`` for PEFT.

    Args:
        model: the model that the targets are of.
        targets: as lora_targets returns them.
        blocks: its MoE blocks.
        budget: the largest number of trainable parameters.

    Raises:
        UnsupportedOptionError: rank 1 everywhere already exceeds the budget.
    """
    found = projections(model, targets, blocks)
    least = sum(one.count(1) for one in found)
    if budget < least:
        raise UnsupportedOptionError(
            f"lora_targets: budget is {budget:,}, but rank 1 of these {len(found)} projections "
            f"takes {least:,} parameters; accepted: {least:,} or more, or fewer parts"
        )
    low, high = 1, LARGEST
    while low < high:
        middle = (low + high + 1) // 2
        fits = sum(one.count(middle) for one in found) <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    ranks = {one.name: one.rank(low) for one in found}
    # Newer releases of PEFT warn that a pattern of a parameter matched no module; it does apply.
    common = ranks[next(iter([*targets["target_parameters"], *ranks]))]
    pattern = {name: rank for name, rank in ranks.items() if rank != common}
    return {
        "r": common,
        "lora_alpha": ALPHA * common,
        "rank_pattern": pattern,
        "alpha_pattern": {name: ALPHA * rank for name, rank in pattern.items()},
    }


def projections(
    model: nn.Module, targets: dict[str, list[str]], blocks: list[FoundBlock]
) -> list[Projection]:
    """Return the targets with their sizes; each stands for the weights of all layers."""
    shares = {}
    for block in blocks:
        for path, _ in block.experts:
            shares[path] = _active(block)
    sizes: dict[str, list[tuple[int, int, int, int]]] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and (name := _match(path, targets["target_modules"])):
            rows, columns = module.out_features, module.in_features  # 4-bit weights are flat
            sizes.setdefault(name, []).append((1, rows, columns, 1))
        for own, parameter in module.named_parameters(recurse=False):
            if name := _match(f"{path}.{own}", targets["target_parameters"]):
                *experts, rows, columns = parameter.shape
                share = shares.get(path, 1)
                sizes.setdefault(name, []).append((*(experts or [1]), rows, columns, share))
    return [
        Projection(
            name,
            sum(E * (rows + columns) for E, rows, columns, _ in found),
            min(min(rows, columns) for _, rows, columns, _ in found),
            max(share for *_, share in found),
        )
        for name, found in sizes.items()
    ]


def _match(path: str, names: list[str]) -> str | None:
    return next((n for n in names if path == n or path.endswith(f".{n}")), None)


def _active(block: FoundBlock) -> int:
    """Return the number of experts that a token passes, K, or 1 if no config has it."""
    for chooser, spec in block.choosers:
        source = spec.params.get("top_k")
        if source is not None and read(chooser, source) is not None:
            return int(read(chooser, source))
    return 1
