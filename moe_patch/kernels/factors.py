"""What low-rank factors take beside the products."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_patch.kernels.sizes import cdiv, next_power_of_2
from moe_patch.types import Plan

_ROWS = 128


def weighted(rows_NR: Tensor, plan: Plan, weights_TK: Tensor) -> Tensor:
    """Rows in plan order, each times its routing weight, in their dtype; zeros past the last one.

    Args:
        rows_NR, weights_TK: contiguous.
        plan: where each row sits.
    """
    N, R = rows_NR.shape
    out_NR = rows_NR.new_empty(N, R)
    _weighted_kernel[(cdiv(N, _ROWS),)](
        rows_NR, weights_TK, plan.row_of_N, out_NR, N, R,
        BN=_ROWS, BR=min(next_power_of_2(R), 64), num_warps=4,
    )  # fmt: skip
    return out_NR


@triton.jit
def _weighted_kernel(
    rows_ptr, weights_ptr, row_ptr, out_ptr, N, R, BN: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """Grid (cdiv(N, BN),)."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.load(row_ptr + n, mask=n < N, other=-1)
    weight = tl.load(weights_ptr + row, mask=row >= 0, other=0.0).to(tl.float32)[:, None]
    for r0 in range(0, R, BR):
        r = r0 + tl.arange(0, BR)[None, :]
        at = n.to(tl.int64)[:, None] * R + r
        value = tl.load(rows_ptr + at, mask=(row >= 0)[:, None] & (r < R), other=0.0)
        value = weight * value.to(tl.float32)
        tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (r < R))
