"""Separate kernel for a = act(h), for products that cannot evaluate it in their epilogue."""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from moe_patch.kernels.common.device import approximate, cdiv
from moe_patch.kernels.common.glu import glu_constants, glu_forward
from moe_patch.kernels.common.launcher import Constants, Launcher
from moe_patch.types import Glu

_COLUMNS = 1024


def activation(h_NH: Tensor, glu: Glu) -> Tensor:
    """Compute a_NF from contiguous h_NH, in its dtype, as the up kernel's epilogue does."""
    N, H = h_NH.shape
    F = H // 2 if glu.gated else H
    a_NF = h_NH.new_empty(N, F)
    _launch((N, cdiv(F, _COLUMNS)), (h_NH, a_NF), (), (F,), _constants(glu, approximate(h_NH)))
    return a_NF


@functools.cache
def _constants(glu: Glu, fast: bool) -> Constants:
    return Constants(**glu_constants(glu, fast=fast), COLUMNS=_COLUMNS)


@triton.jit
def _activation_kernel(
    h_ptr, a_ptr, F,
    KIND: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, CLAMPED: tl.constexpr, FAST: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (N, cdiv(F, COLUMNS))."""
    n = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    H = 2 * F if GATED else F
    at_gate = 2 * f if INTERLEAVED else f
    gate = tl.load(h_ptr + n * H + at_gate, mask=f < F, other=0.0).to(tl.float32)
    up = gate
    if GATED:
        at_up = at_gate + (1 if INTERLEAVED else F)
        up = tl.load(h_ptr + n * H + at_up, mask=f < F, other=0.0).to(tl.float32)
    a = glu_forward(gate, up, KIND, GATED, ALPHA, LIMIT, CLAMPED, FAST)
    tl.store(a_ptr + n * F + f, a.to(a_ptr.dtype.element_ty), mask=f < F)


_launch = Launcher(_activation_kernel)
