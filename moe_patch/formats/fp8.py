"""FP8 e4m3 with one fp32 scale per 128 x 128 block, the format of DeepSeek and Qwen checkpoints.

A weight is its e4m3 value times ``scale_inv[row // 128, column // 128]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
DTYPE = torch.float8_e4m3fn


def quantize(weight: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Quantise a weight [E, rows, columns] to e4m3 values and fp32 scales.

    The scales are [E, rows / 128, columns / 128], rounded up: blocks at the edges may be smaller.
    The function works expert by expert, so its fp32 temporaries are the size of one expert. The
    weight may be on another device.
    """
    E, rows, columns = weight.shape
    values = torch.empty(weight.shape, dtype=DTYPE, device=device)
    scales = torch.empty(E, -(-rows // BLOCK), -(-columns // BLOCK), device=device)
    for e in range(E):
        wide = weight[e].detach().to(device=device, dtype=torch.float32)
        padded = torch.nn.functional.pad(wide, (0, -columns % BLOCK, 0, -rows % BLOCK)).abs()
        blocks = padded.view(scales.shape[1], BLOCK, scales.shape[2], BLOCK)
        scales[e] = blocks.amax(dim=(1, 3)).clamp(min=1e-12) / torch.finfo(DTYPE).max
        values[e] = (wide / spread(scales[e], rows, columns)).to(DTYPE)
    return values, scales


def spread(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Repeat scales [.., rows / 128, columns / 128] for every element, [.., rows, columns]."""
    wide = scales.repeat_interleave(BLOCK, dim=-2).repeat_interleave(BLOCK, dim=-1)
    return wide[..., :rows, :columns]


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply values by their scales; round the product to ``dtype`` once."""
    return (values.to(torch.float32) * spread(scales, *values.shape[-2:])).to(dtype)
