"""Memory that lasts from step to step, from sizes alone: weights, gradients, optimizer states.

Bytes throughout; b is the bytes of a weight's dtype. Nothing here allocates.
"""

from __future__ import annotations

import math
from dataclasses import replace

from moe_patch.quant.memory import gathered_bytes, held_bytes
from moe_patch.tools.plan_types import KINDS, Recipe, Sizes, Weight


def weight_bytes(sizes: Sizes, recipe: Recipe) -> dict[str, int]:
    """Return the bytes of the weights on one rank by kind.

    Expert projections take quant.memory.held_bytes in a packed storage, and a Linear in 4 bits the
    same as one expert in NF4. An embedding in 4 bits has an fp32 scale per 64 values and 16 levels.
    All other weights take b a value, divided by the ranks of FSDP2. Transposed copies of FP8
    experts take as much again, where products are in FP8.
    """
    found = dict.fromkeys(KINDS, 0)
    for one in sizes.weights:
        storage = storage_of(one, recipe)
        if storage == "bf16":
            found[one.kind] += one.numel * one.itemsize
        elif one.kind == "embeddings":
            found[one.kind] += one.numel // 2 + 4 * (one.numel // 64) + 4 * 16
        else:
            E, rows, columns = (1, *one.shape)[-3:]
            copies = 2 if one.kind == "experts" and recipe.copied and not one.decoded else 1
            held = held_bytes((E, rows, columns), storage, recipe.shards)
            found[one.kind] += copies * recipe.shards * held
    return {kind: count // recipe.shards for kind, count in found.items()}


def storage_of(weight: Weight, recipe: Recipe) -> str:
    """Return the storage of a weight, "bf16" if it is not packed."""
    storages = {"experts": recipe.storage, "linear": recipe.linear, "embeddings": recipe.embedding}
    storage = storages.get(weight.kind, "bf16")
    return storage if weight.packable else "bf16"


def layer_bytes(sizes: Sizes, recipe: Recipe) -> int:
    """Return what FSDP2 gathers of the largest layer: its weights and adapters.

    Packed experts take quant.memory.gathered_bytes: they are gathered as bytes.
    """
    by_layer: dict[int, int] = {}
    for one in sizes.weights:
        storage = storage_of(one, recipe)
        count = one.numel * one.itemsize
        if storage != "bf16":
            E, rows, columns = (1, *one.shape)[-3:]
            count = gathered_bytes((E, rows, columns), storage, recipe.shards)
        if not recipe.full:
            count += sum(adapter_tensors(one, recipe.rank)) * recipe.adapter_bytes
        by_layer[one.layer] = by_layer.get(one.layer, 0) + count
    return max((n for layer, n in by_layer.items() if layer >= 0), default=0)


def resident_bytes(sizes: Sizes, recipe: Recipe) -> dict[str, int]:
    """Return the bytes of the weights on the card by kind.

    Offloaded experts take two slots, each as large as any layer's experts (runtime/lanes.py).
    """
    found = weight_bytes(sizes, recipe)
    if recipe.offload:
        layers: dict[int, list[Weight]] = {}
        for one in sizes.weights:
            if one.kind == "experts":
                layers.setdefault(one.layer, []).append(one)
        alone = (replace(sizes, weights=tuple(own)) for own in layers.values())
        largest = max((weight_bytes(one, recipe)["experts"] for one in alone), default=0)
        found["experts"] = 2 * largest
    return found


def adapter_tensors(weight: Weight, rank: int) -> tuple[int, ...]:
    """Return the values of the factors A and B of one weight [.., out, in], R of each an expert."""
    if not weight.adapted:
        return ()
    *experts, rows, columns = weight.shape
    each = rank * math.prod(experts)
    return each * columns, each * rows


def trained_tensors(sizes: Sizes, recipe: Recipe) -> list[tuple[str, int, int]]:
    """Return (kind, values, bytes of a value) of trained tensors: all weights, or the adapters."""
    if recipe.full:
        return [(one.kind, one.numel, one.itemsize) for one in sizes.weights]
    each = recipe.adapter_bytes
    return [("", n, each) for one in sizes.weights for n in adapter_tensors(one, recipe.rank)]


def trained_bytes(sizes: Sizes, recipe: Recipe) -> int:
    """Return the bytes of all trained tensors, which their gradients take once more."""
    return sum(count * each for _, count, each in trained_tensors(sizes, recipe))


def optimizer_bytes(sizes: Sizes, recipe: Recipe) -> int:
    """Return the bytes of the optimiser's states.

    AdamW of torch: two moments in the tensor's dtype. 8-bit AdamW of bitsandbytes: two bytes a
    value and two fp32 scales per 256 values; tensors below 4,096 values and embeddings (by the
    Trainer) have fp32 moments. Plain SGD has no state.
    """
    if recipe.optimizer == "sgd":
        return 0
    if recipe.optimizer == "adamw":
        return 2 * trained_bytes(sizes, recipe)
    total = 0
    for kind, count, _ in trained_tensors(sizes, recipe):
        wide = count < 4096 or kind == "embeddings"
        total += 8 * count if wide else 2 * count + 8 * -(-count // 256)
    return total
