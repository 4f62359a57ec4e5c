"""Inputs of op ``quantised``: a LoRA layer whose frozen experts are stored in 4 or 8 bits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from bench_lib import moe_layer
from bench_lib.shapes import Point
from moe_patch.formats.packed import PackedWeight, pack


@dataclass(frozen=True)
class QuantInputs(moe_layer.LayerInputs):
    """A layer with packed experts; ``w13_EHD`` and ``w2_EDF`` are their dequantised bf16 values.

    Attributes:
        packed13, packed2: the packed weights, or None if the point's dtype is a plain one.
    """

    packed13: PackedWeight | None = None
    packed2: PackedWeight | None = None


def make_inputs(point: Point, device: torch.device) -> QuantInputs:
    """Return the layer of op lora with its experts quantised and dequantised again."""
    layer = moe_layer.make_layer(point, device, train_base=False)
    values = {f.name: getattr(layer, f.name) for f in dataclasses.fields(layer)}
    if point.dtype not in ("nf4", "fp8"):
        return QuantInputs(**values)
    for field, name in (("w13_EHD", "packed13"), ("w2_EDF", "packed2")):
        packed = pack(values[field], point.dtype, device, where=field)
        for e in range(packed.shape[0]):
            values[field][e] = packed[e]
        values[name] = packed
    return QuantInputs(**values)


def weight_bytes(point: Point) -> int:
    """Return the bytes of the experts' storage, scales included."""
    s = point.sizes
    count = 3 * s.E * s.D * s.F
    if point.dtype == "nf4":
        # Half a byte per value, a byte per 64, four bytes per 64 * 256; code and offset are small.
        return count // 2 + count // 64 + count // 4096
    if point.dtype == "fp8":
        return count + 4 * (count // 128**2)
    return count * point.torch_dtype.itemsize
