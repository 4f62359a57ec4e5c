"""The parts of plan_memory.py and plan_weights.py together, and the search for what fits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from moe_patch.tools import plan_memory as parts
from moe_patch.tools import plan_weights as lasting
from moe_patch.tools.plan_types import Recipe, Sizes

MOST_TOKENS = 1 << 22


@dataclass(frozen=True)
class Plan:
    """Bytes of a training run.

    Attributes:
        weights: by kind.
        parts: everything else by name.
        moments: the sum that is allocated at each moment of a step.
        cached: bytes that the allocator still holds in small pieces when it makes the logits.
    """

    weights: dict[str, int]
    parts: dict[str, int]
    moments: dict[str, int]
    cached: int = 0

    @property
    def allocated(self) -> int:
        """Return the peak of torch's allocator."""
        return max(self.moments.values())

    @property
    def reserved(self) -> int:
        """Return what the allocator takes from the card."""
        peak = max(self.allocated, self.moments["loss"] + self.cached)
        return int(peak * (1 + parts.FRAGMENTATION))

    @property
    def needed(self) -> int:
        """Return the memory that a card needs: reserved by the allocator, and the context."""
        return self.reserved + parts.CONTEXT


def make_plan(sizes: Sizes, recipe: Recipe) -> Plan:
    """Return the bytes by part and the sums at the four moments that can be the peak.

    "loss": everything kept, and the logits. "first backward": the last layer's, all kept, and only
    gradients of earlier forwards. "last backward": the first layer's, all gradients, nothing else
    kept. "step": gradients beside the states. States exist from the second step on.
    """
    b, layers = sizes.itemsize, sizes.layers
    share = recipe.shards
    weights = lasting.resident_bytes(sizes, recipe)
    trained = lasting.trained_bytes(sizes, recipe)
    gradients = trained // share
    each = [parts.kept_bytes(layer, recipe, b) for layer in layers]
    inputs = recipe.tokens * sizes.hidden * b
    last = inputs + recipe.tokens * 4 * (sizes.hidden + 1)  # the norm before the head
    kept = last + (len(layers) * inputs if recipe.checkpointing else sum(each))
    again = max(each) if recipe.checkpointing else 0
    moes = [layer.moe for layer in layers if layer.moe]
    block = max(parts.layer_peak(layer, recipe, b) for layer in layers)
    buffer = max((max(parts.decode_bytes(moe, recipe, b)) for moe in moes), default=0)
    logits = parts.logits_bytes(sizes, recipe)
    found = {
        "adapters": 0 if recipe.full else gradients,
        "gradients": gradients,
        "optimizer": lasting.optimizer_bytes(sizes, recipe) // share,
        "ddp_buckets": trained if recipe.ranks > share else 0,
        "gathered_layers": gathered_bytes(sizes, recipe),
        "kept": kept,
        "one_layer": max(each),
        "block_peak": block,
        "decode_buffer": buffer,
        "logits_peak": logits,
        "context": parts.CONTEXT,
    }
    there = sum(weights.values()) + sum(
        found[name] for name in ("adapters", "optimizer", "ddp_buckets", "gathered_layers")
    )
    earlier = gradients if recipe.accumulation > 1 else 0
    moments = {
        "loss": there + earlier + kept + logits,
        "first backward": there + earlier + kept + again + block,
        "last backward": there + gradients + inputs + max(each) + block,
        "step": there + gradients,
    }
    return Plan(weights, found, moments, parts.cached_bytes(layers, recipe, b))


def gathered_bytes(sizes: Sizes, recipe: Recipe) -> int:
    """Return what FSDP2 gathers: one layer, the next one, and with ``full`` a layer's gradients."""
    if recipe.shards == 1:
        return 0
    return (3 if recipe.full else 2) * lasting.layer_bytes(sizes, recipe)


def most_tokens(sizes: Sizes, recipe: Recipe, memory: int) -> int:
    """Return the largest number of tokens whose plan needs at most ``memory`` bytes; 0 if none."""
    low, high = 0, MOST_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        fits = make_plan(sizes, replace(recipe, tokens=middle)).needed <= memory
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def candidates(recipe: Recipe, choices: dict[str, tuple[Any, ...]]) -> Iterator[Recipe]:
    """Yield recipes, those that give up least first.

    Args:
        recipe: values of all options that the user fixed.
        choices: values of the others, in order of preference; the last key is given up last.
    """
    names = list(choices)
    orders = itertools.product(*(range(len(choices[name])) for name in reversed(names)))
    for order in orders:
        picked = dict(zip(reversed(names), order, strict=True))
        yield replace(recipe, **{name: choices[name][at] for name, at in picked.items()})


def first_fitting(
    sizes: Sizes, recipe: Recipe, choices: dict[str, tuple[Any, ...]], memory: int
) -> tuple[Recipe | None, Recipe]:
    """Return the first candidate that fits, or None, and of those tried the one of least need."""
    least, least_needed = recipe, 0
    for one in candidates(recipe, choices):
        needed = make_plan(sizes, one).needed
        if needed <= memory:
            return one, one
        if not least_needed or needed < least_needed:
            least, least_needed = one, needed
    return None, least
