"""NF4 with double quantisation, in the layout of bitsandbytes.

In the flattened weight, every 64 values share a scale, which is their largest magnitude. Each value
is the index of the nearest of 16 levels: quantiles of a normal distribution, scaled to [-1, 1]
(Dettmers et al. 2023, QLoRA). A byte holds two indices, the earlier value in the high half.

The scales, minus their mean, are stored in 8 bits: every 256 share a nested scale, which is their
largest magnitude. Each one is the index of the nearest of 256 levels of a dynamic float (Dettmers
2016).

    weight = level[index] * scale        scale = code[absmax] * nested_absmax + offset      all fp32
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64
NESTED_BLOCK = 256
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# Number of values quantised at a time, which limits the fp32 temporaries for any weight size.
_PIECE = 1 << 24


class Nf4Scales(NamedTuple):
    """Scales of one weight.

    Attributes:
        absmax: uint8, one per 64 values.
        nested_absmax: fp32, one per 256 values of ``absmax``.
        code: fp32 [256], the levels of the 8-bit scales, ascending.
        offset: fp32 scalar, mean of the scales.
        levels: fp32 [16], :data:`LEVELS`, stored with the weight as in bitsandbytes. A tensor
            cached per device could belong to a fake mode or to the memory of a CUDA graph.
    """

    absmax: Tensor
    nested_absmax: Tensor
    code: Tensor
    offset: Tensor
    levels: Tensor


def dynamic_code() -> Tensor:
    """Return the 256 levels of a signed 8-bit dynamic float, ascending, fp32 on the CPU."""
    return torch.tensor(_dynamic_levels(), dtype=torch.float32, device="cpu")


@functools.cache
def _dynamic_levels() -> tuple[float, ...]:
    """Return the 256 levels as floats, in ascending order.

    Of seven decades from 1e-6 to 1, decade i has 2^i evenly spaced fractions of either sign: the
    centres of equal cells over [0.1, 1]. Together with 0 and 1 these are 256 levels.
    """
    found = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32, device="cpu")
        centres = (edges[:-1] + edges[1:]) / 2
        positive = (10 ** (decade - 6) * centres).tolist()
        found += positive + [-value for value in positive]
    return tuple(sorted(found))


def quantize(weight: Tensor, device: torch.device) -> tuple[Tensor, Nf4Scales]:
    """Quantise a weight [E, rows, columns] to packed indices [E, rows, columns / 2] and scales.

    Args:
        weight: any floating dtype; columns are a multiple of 64. The weight may be on another
            device: it is moved and quantised in pieces of some million values.
        device: device of the result.
    """
    flat = weight.detach().contiguous().view(-1)
    levels = torch.tensor(LEVELS, dtype=torch.float32, device=device)
    packed = torch.empty(flat.numel() // 2, dtype=torch.uint8, device=device)
    scale = torch.empty(flat.numel() // BLOCK, dtype=torch.float32, device=device)
    for start in range(0, flat.numel(), _PIECE):
        piece = flat[start : start + _PIECE].to(device=device, dtype=torch.float32)
        index, piece_scale = _nearest(piece.view(-1, BLOCK), levels)
        pairs = index.view(-1, 2)
        packed[start // 2 : (start + _PIECE) // 2] = pairs[:, 0] << 4 | pairs[:, 1]
        scale[start // BLOCK : (start + _PIECE) // BLOCK] = piece_scale
    shape = (*weight.shape[:-1], weight.shape[-1] // 2)
    return packed.view(shape), _quantize_scales(scale, levels)


def _quantize_scales(scale: Tensor, levels: Tensor) -> Nf4Scales:
    code = dynamic_code().to(scale.device)
    offset = scale.mean()
    centred = scale - offset
    missing = -len(centred) % NESTED_BLOCK
    padded = torch.nn.functional.pad(centred, (0, missing)).view(-1, NESTED_BLOCK)
    index, nested = _nearest(padded, code)
    return Nf4Scales(index.view(-1)[: len(centred)].clone(), nested, code, offset, levels)


def _nearest(blocks: Tensor, ascending: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest level of each value over its block's largest magnitude, and the latter."""
    largest = blocks.abs().amax(dim=1)
    scaled = blocks * (1.0 / largest.clamp(min=1e-38))[:, None]
    between = (ascending[:-1] + ascending[1:]) / 2
    return torch.bucketize(scaled.clamp_(-1, 1), between, out_int32=True).to(torch.uint8), largest


def decoded_scales(scales: Nf4Scales, first: int = 0, count: int | None = None) -> Tensor:
    """Decode the fp32 scales of blocks ``first`` to ``first + count``."""
    absmax = scales.absmax[first : None if count is None else first + count]
    block = torch.arange(first, first + len(absmax), device=absmax.device) // NESTED_BLOCK
    return scales.code[absmax.long()] * scales.nested_absmax[block] + scales.offset


def dequantize(packed: Tensor, scales: Nf4Scales, dtype: torch.dtype, first: int = 0) -> Tensor:
    """Dequantise a packed tensor [.., columns / 2].

    Args:
        packed, scales: results of :func:`quantize`; ``packed`` may be a contiguous part.
        dtype: dtype of the result, to which the product is rounded once.
        first: index of the part's first block of 64 values.
    """
    byte = packed.reshape(-1)
    index = torch.stack([byte >> 4, byte & 15], dim=1).view(-1, BLOCK)
    value = scales.levels[index.int()]
    scale = decoded_scales(scales, first, len(value))
    return (value * scale[:, None]).to(dtype).view(*packed.shape[:-1], 2 * packed.shape[-1])
