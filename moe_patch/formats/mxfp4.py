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


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise fp32 [.., columns] to uint8 [.., columns / 2] and scales uint8 [.., columns / 32].

    The scale's exponent is that of the block's largest magnitude, minus 2. The 2 is the exponent of
    the format's largest value, 6 = 1.5 * 2^2 (OCP Microscaling Formats 1.0, section 6.3). If the
    largest magnitude exceeds 7 after scaling, clipping to 6 would cost more than rounding. The
    exponent is then one higher. Ties go to the even code.
    """
    blocks = weight.unflatten(-1, (-1, BLOCK))
    _, exponent = torch.frexp(blocks.abs().amax(-1))
    scale = (exponent - 3).clamp(-127, 125)
    peak = torch.ldexp(blocks.abs().amax(-1), -scale)
    scale = torch.where(peak > 7, scale + 1, scale)
    scaled = torch.ldexp(blocks, -scale[..., None])
    code = _nearest(scaled.abs()) | (torch.signbit(scaled) << 3)
    pairs = code.flatten(-2).unflatten(-1, (-1, 2)).to(torch.uint8)
    return pairs[..., 0] | (pairs[..., 1] << 4), (scale + 127).to(torch.uint8)


def _nearest(magnitude: Tensor) -> Tensor:
    """Return the index 0 .. 7 of the nearest magnitude; a midpoint goes to the even index."""
    middles = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    index = torch.zeros(magnitude.shape, dtype=torch.int64, device=magnitude.device)
    for code, middle in enumerate(middles):
        index += magnitude > middle if code % 2 == 0 else magnitude >= middle
    return index
