"""Weight gradients: dW_e = sum over the rows n of expert e of left_n ⊗ right_n.

Either side may be gathered from tokens inside the loop over rows. For an expert without rows, the
program writes its accumulator of zeros. The rows of an expert are one range, or one range in each
chunk of a long context.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_patch.kernels.common.device import cdiv, device_of
from moe_patch.kernels.common.gemm_device import RUN, locate_tile
from moe_patch.kernels.common.launcher import Launcher
from moe_patch.kernels.common.tiles import Tile
from moe_patch.kernels.common.versions import hopper_module, known_triton
from moe_patch.kernels.plan.row_tiles import programs
from moe_patch.types import Plan


def outer_sum(
    left: Tensor,
    right: Tensor,
    plan: Plan,
    like_EOI: Tensor,
    tile: Tile,
    *,
    gather_left: bool = False,
    gather_right: bool = False,
    chunks: int = 1,
    sums: tuple[Tensor, bool] | None = None,
) -> Tensor:
    """Return the gradient [E, O, I] in the dtype and strides of ``like_EOI``.

    Args:
        left, right: [N, O] and [N, I] in plan order, or [T, ..] by token if gathered; last axis
            contiguous.
        plan: the plan of the rows.
        like_EOI: the weight that the gradient belongs to.
        tile: m and n are rows and columns of the gradient, k is the number of token rows per step.
        gather_left, gather_right: this side is given by token.
        chunks: number of times that the plan's offsets hold E + 1 values.
        sums: result of :func:`wide_sum`; the gradient is added there, and returned in fp32.
    """
    gathers = {"gather_left": gather_left, "gather_right": gather_right}
    if tile.hopper and known_triton():
        hopper = hopper_module("dw")
        of_all = {"group": tile.group, "chunks": chunks}
        if hopper.supported(left, right, like_EOI, **gathers):
            return hopper.outer_sum(
                left, right, plan, like_EOI, gather_left=gather_left, sums=sums, **of_all
            )
        # For a weight stored as [E, in, out], compute the transposed product.
        like_EIO, swapped = like_EOI.mT, {"gather_left": gather_right, "gather_right": gather_left}
        if hopper.supported(right, left, like_EIO, **swapped):
            grad_EIO = hopper.outer_sum(
                right, left, plan, like_EIO, gather_left=gather_right,
                sums=sums and (sums[0].mT, sums[1]), **of_all,
            )  # fmt: skip
            return grad_EIO.mT
    E, O, I = like_EOI.shape
    grad_EOI, again = sums or (torch.empty_like(like_EOI), False)
    row_tiles, columns = cdiv(O, tile.m), cdiv(I, tile.n)
    _launch(
        (programs(E * row_tiles * columns, tile, device_of(left)),),
        (left, right, grad_EOI, plan.row_of_N, plan.offsets_S), (),
        (E, row_tiles, columns, O, I, plan.slot_of_TK.shape[1], chunks, left.stride(0),
         right.stride(0), *grad_EOI.stride()),
        GATHER_LEFT=gather_left, GATHER_RIGHT=gather_right, CHUNKED=chunks > 1, ADD=again,
        BM=tile.m,
        BN=tile.n, BK=tile.k,
        IN_RUNS=left.dtype == torch.float32, GROUP=tile.group,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return grad_EOI


def wide_sum(
    sums: dict[str, Tensor] | None, name: str, like_EOI: Tensor
) -> tuple[Tensor, bool] | None:
    """Return where a gradient is added up in fp32, and whether something is there already.

    ``sums`` holds these tensors by name and gets a new one; without it, return None.
    """
    if sums is None:
        return None
    again = name in sums
    if not again:
        sums[name] = torch.empty_like(like_EOI, dtype=torch.float32)
    return sums[name], again


@triton.jit
def _dw_kernel(
    left_ptr, right_ptr, grad_ptr, row_ptr, offsets_ptr,
    E, row_tiles, columns, O, I, K, chunks, stride_left, stride_right, stride_ge, stride_go,
    stride_gi,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr, CHUNKED: tl.constexpr, ADD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IN_RUNS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Grid: E x row tiles x column tiles of the gradient, or persistent."""
    per_expert = row_tiles * columns
    for tile in range(tl.program_id(0), E * per_expert, tl.num_programs(0)):
        e = tile // per_expert
        row_tile, column_tile = locate_tile(tile - e * per_expert, row_tiles, columns, GROUP)
        o = row_tile * BM + tl.arange(0, BM)
        i = column_tile * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        if CHUNKED:
            for chunk in range(chunks):
                bounds_ptr = offsets_ptr + chunk * (E + 1) + e
                acc = _add_rows(
                    acc, left_ptr, right_ptr, row_ptr, bounds_ptr, o, i, O, I, K, stride_left,
                    stride_right, GATHER_LEFT, GATHER_RIGHT, BM, BN, BK, IN_RUNS,
                )  # fmt: skip
        else:
            acc = _add_rows(
                acc, left_ptr, right_ptr, row_ptr, offsets_ptr + e, o, i, O, I, K, stride_left,
                stride_right, GATHER_LEFT, GATHER_RIGHT, BM, BN, BK, IN_RUNS,
            )  # fmt: skip
        grad = grad_ptr + e.to(tl.int64) * stride_ge + o.to(tl.int64)[:, None] * stride_go
        stored = (o < O)[:, None] & (i < I)[None, :]
        if ADD:
            acc += tl.load(grad + i[None, :] * stride_gi, mask=stored, other=0.0)
        tl.store(grad + i[None, :] * stride_gi, acc.to(grad_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _add_rows(
    acc, left_ptr, right_ptr, row_ptr, bounds_ptr, o, i, O, I, K, stride_left, stride_right,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, IN_RUNS: tl.constexpr,
):  # fmt: skip
    """Add the outer products of one range of rows to acc; its two bounds are in memory."""
    start = tl.load(bounds_ptr)
    end = tl.load(bounds_ptr + 1)
    if IN_RUNS:
        for n1 in range(start, end, RUN):
            part = tl.zeros((BM, BN), dtype=tl.float32)
            for n0 in range(n1, min(n1 + RUN, end), BK):
                part = _step(
                    part, left_ptr, right_ptr, row_ptr, n0, end, o, i, O, I, K, stride_left,
                    stride_right, GATHER_LEFT, GATHER_RIGHT, BK,
                )  # fmt: skip
            acc += part
    else:
        for n0 in range(start, end, BK):
            acc = _step(
                acc, left_ptr, right_ptr, row_ptr, n0, end, o, i, O, I, K, stride_left,
                stride_right, GATHER_LEFT, GATHER_RIGHT, BK,
            )  # fmt: skip
    return acc


@triton.jit
def _step(
    acc, left_ptr, right_ptr, row_ptr, n0, end, o, i, O, I, K, stride_left, stride_right,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Add the outer products of BK token rows to acc."""
    n = n0 + tl.arange(0, BK)
    left_row = n
    right_row = n
    if GATHER_LEFT or GATHER_RIGHT:
        token = tl.load(row_ptr + n, mask=n < end, other=0) // K
        if GATHER_LEFT:
            left_row = token
        if GATHER_RIGHT:
            right_row = token
    left_at = left_ptr + left_row.to(tl.int64)[:, None] * stride_left + o[None, :]
    right_at = right_ptr + right_row.to(tl.int64)[:, None] * stride_right + i[None, :]
    # Mask both sides past the expert's end: zero times an Inf of the next expert would be NaN.
    left = tl.load(left_at, mask=(n < end)[:, None] & (o < O)[None, :], other=0.0)
    right = tl.load(right_at, mask=(n < end)[:, None] & (i < I)[None, :], other=0.0)
    return tl.dot(left.T, right, acc, input_precision="ieee")


_launch = Launcher(_dw_kernel)
