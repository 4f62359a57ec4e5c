"""Quantise rows to FP8 e4m3, with one scale per row and 128 columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_patch.kernels.common.device import cdiv
from moe_patch.kernels.common.e4m3_scale import GROUP, row_scale
from moe_patch.kernels.common.launcher import Launcher

_ROWS, _GROUPS = 8, 4


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return (values [n, width] in e4m3, scales [n, width / 128] in fp32).

    Args:
        rows: [n, width], last axis contiguous; the width is a multiple of 128.
    """
    n, width = rows.shape
    groups = width // GROUP
    values = rows.new_empty(n, width, dtype=torch.float8_e4m3fn)
    scales = rows.new_empty(n, groups, dtype=torch.float32)
    _launch(
        (cdiv(n, _ROWS), cdiv(groups, _GROUPS)),
        (rows, values, scales),
        (n,), (groups, rows.stride(0)),
        ROWS=_ROWS, GROUPS=_GROUPS, SIZE=GROUP, num_warps=4,
    )  # fmt: skip
    return values, scales


@triton.jit(do_not_specialize=["n"])
def _quantise_rows_kernel(
    rows_ptr, values_ptr, scales_ptr, n, groups, stride,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(n, ROWS), cdiv(groups, GROUPS)): ROWS x GROUPS scales per program."""
    at = tl.arange(0, ROWS * GROUPS)
    row = (tl.program_id(0) * ROWS + at // GROUPS).to(tl.int64)
    group = tl.program_id(1) * GROUPS + at % GROUPS
    exists = (row < n) & (group < groups)
    column = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    value = tl.load(rows_ptr + row[:, None] * stride + column, mask=exists[:, None], other=0.0)
    value = value.to(tl.float32)
    scale, inverse = row_scale(tl.max(tl.abs(value), axis=1))
    quantised = (value * inverse[:, None]).to(values_ptr.dtype.element_ty)
    width = groups * SIZE
    tl.store(values_ptr + row[:, None] * width + column, quantised, mask=exists[:, None])
    tl.store(scales_ptr + row * groups + group, scale, mask=exists)


_launch = Launcher(_quantise_rows_kernel)
