"""MXFP4, the format of gpt-oss checkpoints: e2m1 values, one power of two per 32 values of a row.

A byte holds two values, the earlier one in the low half. By OCP Microscaling Formats 1.0, e2m1 has
the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6. A scale s in e8m0 means 2^(s - 127).

    weight = e2m1[index] * 2^(scale - 127)        exact in fp32, and in bf16
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32


def dequantize(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise packed uint8 [.., columns / 2] with scales uint8 [.., columns / 32]."""
    index = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    blocks = _e2m1(index).unflatten(-1, (-1, BLOCK))
    return (blocks * _e8m0(scales)[..., None]).flatten(-2).to(dtype)


def _e2m1(index: Tensor) -> Tensor:
    """Convert e2m1 to fp32: shift the bits to fp16 and correct the exponent bias."""
    bits = (index & 8).int() << 12 | (index & 7).int() << 9
    return bits.to(torch.int16).view(torch.float16).float() * 2.0**14


def _e8m0(scale: Tensor) -> Tensor:
    """Convert e8m0 to fp32 powers of two; a scale of 0 means 2^-127, which is subnormal."""
    exponent = scale.int()
    return torch.where(exponent == 0, 1 << 22, exponent << 23).view(torch.float32)
