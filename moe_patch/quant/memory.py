"""Memory use of a model's experts, now and in 4 or 8 bits."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from moe_patch.formats import fp8, mxfp4, nf4
from moe_patch.formats.packed import READABLE, STORAGES
from moe_patch.formats.tensor import QuantTensor
from moe_patch.patching.discover import discover
from moe_patch.patching.fp8_reason import planned_reason
from moe_patch.quant.stored import stored_method
from moe_patch.quant.surgery import expert_projections


class ExpertsMemory(NamedTuple):
    """Size in bytes of all expert projections of a model.

    Attributes:
        stored: current size.
        quantised: size by storage; mxfp4 only if the checkpoint has it.
        refused: storage -> the first expert that cannot have it, and why.
    """

    stored: int
    quantised: dict[str, int]
    refused: dict[str, str]


def bits_per_value(storage: str) -> float:
    """Return the bits per value of a large weight, scales included."""
    if storage == "nf4":
        return 4 + 8 / nf4.BLOCK + 32 / (nf4.BLOCK * nf4.NESTED_BLOCK)
    return 4 + 8 / mxfp4.BLOCK if storage == "mxfp4" else 8 + 32 / fp8.BLOCK**2


def packed_bytes(shape: tuple[int, int, int], storage: str) -> int:
    """Return the bytes of a weight [E, rows, columns] in a storage, scales included."""
    return shape[0] * expert_bytes(shape, storage) + _common_bytes(shape, storage)


def held_bytes(shape: tuple[int, int, int], storage: str, ranks: int) -> int:
    """Return the bytes that each rank keeps of a weight under FSDP2: E / ranks experts, rounded up.

    Scales of all experts (NF4's second level) are on every rank.
    """
    experts = -(-shape[0] // ranks)
    return experts * expert_bytes(shape, storage) + _common_bytes(shape, storage)


def gathered_bytes(shape: tuple[int, int, int], storage: str, ranks: int) -> int:
    """Return the bytes of a weight that FSDP2 has gathered, padding included."""
    return ranks * -(-shape[0] // ranks) * expert_bytes(shape, storage)


def expert_bytes(shape: tuple[int, int, int], storage: str) -> int:
    """Return the bytes of one expert of a weight [E, rows, columns] and of its own scales."""
    _, rows, columns = shape
    values = rows * columns
    if storage == "mxfp4":
        return values // 2 + values // mxfp4.BLOCK
    if storage == "fp8":
        return values + 4 * -(-rows // fp8.BLOCK) * -(-columns // fp8.BLOCK)
    return values // 2 + values // nf4.BLOCK


def _common_bytes(shape: tuple[int, int, int], storage: str) -> int:
    """Return the bytes of NF4's nested scales, its two tables and its offset."""
    if storage != "nf4":
        return 0
    scales = math.prod(shape) // nf4.BLOCK
    return 4 * -(-scales // nf4.NESTED_BLOCK) + 4 * (256 + 16) + 4


def experts_memory(model: nn.Module) -> ExpertsMemory:
    """Compute the memory use of a model's experts on any device, including meta; allocate nothing.

    Raises:
        UnsupportedModelError: no MoE block, or experts that cannot be quantised, by name.
    """
    stored = 0
    storages = READABLE if stored_method(model.config) == "mxfp4" else STORAGES
    quantised, refused = dict.fromkeys(storages, 0), dict[str, str]()
    for one in expert_projections(model):
        weight = one.stored
        if isinstance(weight, QuantTensor):
            stored += weight.weight.nbytes()
        else:
            stored += weight.numel() * weight.element_size()
        E, rows, columns = weight.shape
        if columns % nf4.BLOCK and quantised.pop("nf4", None) is not None:
            refused["nf4"] = f"{one.where} has rows of {columns}, not a multiple of {nf4.BLOCK}"
        for storage in quantised:
            quantised[storage] += packed_bytes((E, rows, columns), storage)
    return ExpertsMemory(stored, quantised, refused)


def copied_bytes(model: nn.Module, device: torch.device) -> tuple[int, str]:
    """Return the bytes of the transposed copies of ``compute: fp8_copy``, and why some are missing.

    Args:
        model: a model whose experts can be quantised, on any device.
        device: the card; a CPU stands for a Hopper card elsewhere.

    Returns:
        The bytes, and the first experts module that is decoded, with the reason, or "".

    Raises:
        UnsupportedModelError: as :func:`experts_memory`.
    """
    specs = {id(module): found.spec for found in discover(model) for _, module in found.experts}
    total, missing = 0, ""
    for one in expert_projections(model):
        if why := planned_reason(one.module, specs[id(one.module)], device):
            missing = missing or f"{one.path}: {why}"
        else:
            E, rows, columns = one.stored.shape
            total += packed_bytes((E, rows, columns), "fp8")
    return total, missing
