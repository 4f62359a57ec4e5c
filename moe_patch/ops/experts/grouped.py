"""Grouped products on the torch backend: one matrix product per expert over its slice of rows.

Uses torch's grouped_mm where it supports the operands: aligned to 16 bytes, in bf16 on CUDA
(without a host sync) or on a CPU. Otherwise loops over the experts that have rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_patch.formats.packed import PackedWeight
from moe_patch.types import Lora, Plan


class Groups:
    """Matrix products over each expert's rows.

    Rows past the last valid one belong to no expert. Outputs there are zero or unspecified and must
    not be read; the plan's slots never point there.
    """

    def __init__(self, plan: Plan, like: Tensor) -> None:
        self.offsets_S, self.rows = plan.offsets_S, plan.row_of_N.shape[0]
        # On a CPU grouped_mm runs the same products one by one, with less overhead in between.
        self.on_cuda = like.is_cuda
        self.native = (
            like.dtype == torch.bfloat16 and hasattr(torch.nn.functional, "grouped_mm")
            if like.is_cuda
            else _cpu_supports(like.dtype)
        )

    def linear(
        self,
        x_NI: Tensor,
        w_EOI: Tensor,
        b_EO: Tensor | None = None,
        low_rank: tuple[Tensor, Lora] | None = None,
    ) -> Tensor:
        """Compute y_n = W_e x_n + b_e, [N, O]; ``low_rank`` = (u_NR, lora) adds s * B_e u_n."""
        y_NO = self._product(x_NI, w_EOI)
        if low_rank is not None:
            u_NR, lora = low_rank
            y_NO = y_NO.add_(self._product(u_NR, lora.B_EOR), alpha=lora.scaling)
        if b_EO is not None:
            self._add_bias(y_NO, b_EO)
        return y_NO

    def linear_transposed(
        self,
        dy_NO: Tensor,
        w_EOI: Tensor,
        lora: Lora | None = None,
        p_NR: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the data gradient W_eᵀ dy_n + s * A_eᵀ p_n, and p_n = B_eᵀ dy_n if there is LoRA.

        Pass ``p_NR`` if it was already computed.
        """
        dx_NI = self._product(dy_NO, w_EOI.transpose(1, 2))
        if lora is None:
            return dx_NI, None
        if p_NR is None:
            p_NR = self._product(dy_NO, lora.B_EOR.transpose(1, 2))
        dx_NI = dx_NI.add_(self._product(p_NR, lora.A_ERI.transpose(1, 2)), alpha=lora.scaling)
        return dx_NI, p_NR

    def outer_sum(self, dy_NO: Tensor, x_NI: Tensor, like_EOI: Tensor) -> Tensor:
        """Sum dy_n ⊗ x_n per expert, strided like ``like_EOI``; exact zeros for no rows."""
        aligned = self.native and _aligned(dy_NO, x_NI)
        if aligned and not self.on_cuda and like_EOI.is_contiguous() and 0 not in self._counts[:-1]:
            return torch.nn.functional.grouped_mm(dy_NO.T, x_NI, offs=self.offsets_S[1:])
        dw_EOI = torch.empty_like(like_EOI)
        if aligned and self.on_cuda:
            dw_EOI.copy_(torch.nn.functional.grouped_mm(dy_NO.T, x_NI, offs=self.offsets_S[1:]))
            return dw_EOI.masked_fill_((self.offsets_S.diff() == 0)[:, None, None], 0.0)
        lefts, rights = self._split(dy_NO.T, dim=1), self._split(x_NI)
        for count, left, right, dw_OI in self._each(lefts, rights, dw_EOI.unbind(0)):
            if count == 0:
                dw_OI.zero_()
            else:
                torch.mm(left, right, out=dw_OI)
        return dw_EOI

    def row_sum(self, dy_NO: Tensor, like_EO: Tensor) -> Tensor:
        """Sum dy_n per expert, [E, O], contiguous."""
        db_EO = like_EO.new_zeros(like_EO.shape)
        for count, dy, db_O in self._each(self._split(dy_NO), db_EO.unbind(0)):
            if count:
                torch.sum(dy, dim=0, out=db_O)
        return db_EO

    def _product(self, x_NI: Tensor, w_EOI: Tensor | PackedWeight) -> Tensor:
        if self.native and isinstance(w_EOI, Tensor) and _aligned(x_NI, w_EOI):
            return torch.nn.functional.grouped_mm(
                x_NI, w_EOI.transpose(1, 2), offs=self.offsets_S[1:]
            )
        y_NO = x_NI.new_empty(x_NI.shape[0], w_EOI.shape[1])
        ys, experts = self._split(y_NO), range(w_EOI.shape[0])
        # Dequantise packed weights one expert at a time, never all of them at once.
        packed = isinstance(w_EOI, PackedWeight)
        weights: Any = experts if packed else w_EOI.transpose(1, 2).unbind(0)  # type: ignore[union-attr]
        for count, x, w, y in self._each(self._split(x_NI), weights, ys):
            if count:
                torch.mm(x, w_EOI[w].T if packed else w, out=y)
        ys[-1].zero_()
        return y_NO

    def _add_bias(self, y_NO: Tensor, b_EO: Tensor) -> None:
        for count, y, b_O in self._each(self._split(y_NO), b_EO.unbind(0)):
            if count:
                y.add_(b_O)

    @functools.cached_property
    def _counts(self) -> list[int]:
        """Number of rows of each expert, then of no expert; on a GPU this synchronises."""
        ends = [*self.offsets_S.tolist(), self.rows]
        return [end - start for start, end in itertools.pairwise(ends)]

    def _split(self, rows: Tensor, dim: int = 0) -> Sequence[Tensor]:
        """Split into the rows of each expert and those of no expert, in one call instead of E."""
        return rows.split_with_sizes(self._counts, dim)

    def _each(self, *of_experts: Iterable[Any]) -> Iterable[tuple[Any, ...]]:
        """Iterate over experts: its number of rows, then its item of each argument."""
        return zip(self._counts[:-1], *of_experts, strict=False)


@functools.cache
def _cpu_supports(dtype: torch.dtype) -> bool:
    """Return whether grouped_mm supports a dtype on a CPU; tried once per process."""
    grouped_mm = getattr(torch.nn.functional, "grouped_mm", None)
    if grouped_mm is None or dtype not in (torch.float32, torch.bfloat16):
        return False
    x, w, ends = torch.ones(1, 8, dtype=dtype), torch.ones(1, 8, 8, dtype=dtype), torch.ones(1)
    try:
        grouped_mm(x, w, offs=ends.int())
    except RuntimeError:  # an older torch
        return False
    return True


def _aligned(*operands: Tensor) -> bool:
    """Return whether grouped_mm accepts these: a unit stride, all else in multiples of 16 bytes."""
    return all(_aligned_operand(one) for one in operands)


def _aligned_operand(operand: Tensor) -> bool:
    size = operand.element_size()
    strides = operand.stride()
    if 1 not in strides[-2:]:
        return False
    pitches = [stride for stride in strides if stride != 1]
    counts = [*pitches, *operand.shape[-2:]]
    return operand.data_ptr() % 16 == 0 and all(count * size % 16 == 0 for count in counts)
