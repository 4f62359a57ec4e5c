"""Grouped products on the torch backend: one matrix product per expert over its slice of rows.

On CPU (and wherever torch's own grouped_mm does not serve) this is a loop over experts that own
rows; on CUDA with bf16 operands of 16-byte rows it is torch's grouped_mm, without a host sync.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from moe_patch.formats.packed import PackedWeight
from moe_patch.types import Lora, Plan


class Groups:
    """The rows of each expert, and the products over them.

    Rows past the last valid one belong to nobody: outputs there are zero or unspecified, and no
    consumer may read them (the plan's slots never point there).
    """

    def __init__(self, plan: Plan, like: Tensor) -> None:
        self.offsets_S = plan.offsets_S
        self.native = (
            like.is_cuda
            and like.dtype == torch.bfloat16
            and hasattr(torch.nn.functional, "grouped_mm")
        )

    def linear(
        self,
        x_NI: Tensor,
        w_EOI: Tensor,
        b_EO: Tensor | None = None,
        low_rank: tuple[Tensor, Lora] | None = None,
    ) -> Tensor:
        """y_n = W_e x_n + b_e, plus s * B_e u_n for ``low_rank`` = (u_NR, lora); [N, O]."""
        y_NO = self._product(x_NI, w_EOI)
        if low_rank is not None:
            u_NR, lora = low_rank
            y_NO = y_NO.add_(self._product(u_NR, lora.B_EOR), alpha=lora.scaling)
        if b_EO is not None:
            self._add_bias(y_NO, b_EO)
        return y_NO

    def linear_transposed(
        self, dy_NO: Tensor, w_EOI: Tensor, lora: Lora | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The data gradient W_eᵀ dy_n + s * A_eᵀ (B_eᵀ dy_n), and B_eᵀ dy_n when there is LoRA."""
        dx_NI = self._product(dy_NO, w_EOI.transpose(1, 2))
        if lora is None:
            return dx_NI, None
        p_NR = self._product(dy_NO, lora.B_EOR.transpose(1, 2))
        dx_NI = dx_NI.add_(self._product(p_NR, lora.A_ERI.transpose(1, 2)), alpha=lora.scaling)
        return dx_NI, p_NR

    def outer_sum(self, dy_NO: Tensor, x_NI: Tensor, like_EOI: Tensor) -> Tensor:
        """sum_n dy_n ⊗ x_n per expert, laid out like ``like_EOI``; exact zeros without rows."""
        dw_EOI = torch.empty_like(like_EOI)
        if self.native and _aligned(dy_NO, x_NI):
            dw_EOI.copy_(torch.nn.functional.grouped_mm(dy_NO.T, x_NI, offs=self.offsets_S[1:]))
            return dw_EOI.masked_fill_((self.offsets_S.diff() == 0)[:, None, None], 0.0)
        for e, (start, end) in enumerate(self._bounds):
            if start == end:
                dw_EOI[e].zero_()
            else:
                torch.mm(dy_NO[start:end].T, x_NI[start:end], out=dw_EOI[e])
        return dw_EOI

    def row_sum(self, dy_NO: Tensor, like_EO: Tensor) -> Tensor:
        """sum_n dy_n per expert, [E, O], contiguous."""
        db_EO = like_EO.new_zeros(like_EO.shape)
        for e, (start, end) in enumerate(self._bounds):
            if start != end:
                torch.sum(dy_NO[start:end], dim=0, out=db_EO[e])
        return db_EO

    def _product(self, x_NI: Tensor, w_EOI: Tensor) -> Tensor:
        if self.native and _aligned(x_NI, w_EOI):
            return torch.nn.functional.grouped_mm(
                x_NI, w_EOI.transpose(1, 2), offs=self.offsets_S[1:]
            )
        y_NO = x_NI.new_empty(x_NI.shape[0], w_EOI.shape[1])
        bounds = self._bounds
        for e, (start, end) in enumerate(bounds):
            if start != end:
                torch.mm(x_NI[start:end], w_EOI[e].T, out=y_NO[start:end])
        y_NO[bounds[-1][1] :].zero_()
        return y_NO

    def _add_bias(self, y_NO: Tensor, b_EO: Tensor) -> None:
        for e, (start, end) in enumerate(self._bounds):
            if start != end:
                y_NO[start:end].add_(b_EO[e])

    @functools.cached_property
    def _bounds(self) -> list[tuple[int, int]]:
        """(start, end) of each expert's rows; on a device this waits for it."""
        return list(itertools.pairwise(self.offsets_S.tolist()))


def _aligned(*operands: Tensor | PackedWeight) -> bool:
    """What torch's grouped_mm asks for: one unit stride, all else in multiples of 16 bytes.

    Packed weights are dequantised expert by expert, never as the stack that it would need.
    """
    return all(isinstance(one, Tensor) and _aligned_operand(one) for one in operands)


def _aligned_operand(operand: Tensor) -> bool:
    size = operand.element_size()
    strides = operand.stride()
    if 1 not in strides[-2:]:
        return False
    pitches = [stride for stride in strides if stride != 1]
    counts = [*pitches, *operand.shape[-2:]]
    return operand.data_ptr() % 16 == 0 and all(count * size % 16 == 0 for count in counts)
