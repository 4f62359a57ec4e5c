"""Definition of the experts in FP8, in plain torch; the FP8 kernels follow it.

Weights are e4m3 with one scale per 128 x 128 block. The rows that they multiply are quantised to
e4m3 with one scale per row and 128 columns: x once per token, and a. With transposed copies, dout
and dh are quantised too. Products and sums of the quantised values are in the wide
dtype: fp64 for fp64 inputs, else fp32. Low-rank terms read the rows that are not quantised. Without
copies, backward is that of the decoded weights.

Rows are in plan order, as in ops/experts/torch_backend.py, which has the formulas.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_patch.formats import fp8
from moe_patch.formats.packed import PackedWeight
from moe_patch.ops.experts.activations import gated_activation, gated_activation_backward
from moe_patch.ops.experts.rows import gather_sum, row_weights, rows_to_slots, tokens_of
from moe_patch.types import Glu, Lora, Plan

# Smallest magnitude that sets a scale: scale and inverse are then normal fp32.
_TINY = 2.0**-100
_LARGEST = torch.finfo(fp8.DTYPE).max


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return (e4m3 values [n, width], fp32 scales [n, width / 128]).

    The largest magnitude of a group becomes 448, the largest e4m3. The arithmetic is fp32 for every
    dtype. NaN stays NaN, and an infinite value makes its group NaN.
    """
    n, width = rows.shape
    groups = rows.float().view(n, width // fp8.BLOCK, fp8.BLOCK)
    largest = groups.abs().nan_to_num(0.0, torch.inf).amax(-1).clamp(min=_TINY)
    # A number over a tensor would be the tensor's reciprocal times the number on some devices.
    inverse = torch.full_like(largest, _LARGEST) / largest
    values = (groups * inverse.unsqueeze(-1)).to(fp8.DTYPE)
    return values.view(n, width), largest * (1 / _LARGEST)


def dequantise_rows(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply values by their scales."""
    return values.to(dtype) * scales.to(dtype).repeat_interleave(fp8.BLOCK, dim=-1)


class Fp8Rows(NamedTuple):
    """Intermediate rows of a call, in plan order.

    Attributes:
        h_NH, a_NF, u13_NR, u2_NR: as in ops/experts/torch_backend.py, in the dtype of x.
        out_TD: the output.
    """

    h_NH: Tensor
    a_NF: Tensor
    u13_NR: Tensor
    u2_NR: Tensor
    out_TD: Tensor


class Fp8Gradients(NamedTuple):
    """Gradients of a call with transposed copies, in the dtype of x, or that of the weights."""

    x: Tensor
    weights: Tensor
    lora13_A: Tensor | None
    lora13_B: Tensor | None
    lora2_A: Tensor | None
    lora2_B: Tensor | None


class Fp8Experts:
    """Experts in FP8 for one plan.

    Args:
        plan: the plan.
        w13, w2: weights stored in fp8, [E, out, in].
        glu: the activation.
        lora13, lora2: low-rank factors.
    """

    def __init__(
        self,
        plan: Plan,
        w13: PackedWeight,
        w2: PackedWeight,
        glu: Glu,
        lora13: Lora | None = None,
        lora2: Lora | None = None,
    ) -> None:
        self.plan, self.w13, self.w2, self.glu = plan, w13, w2, glu
        self.lora13, self.lora2 = lora13, lora2
        self.bounds = plan.offsets_S.tolist()

    def forward(self, x_TD: Tensor, weights_TK: Tensor) -> Fp8Rows:
        """Compute the output and the rows that backward reads, in the dtype of x."""
        token_N = tokens_of(self.plan)
        x_ND = dequantise_rows(*quantise_rows(x_TD), _wide(x_TD))[token_N]
        u13_NR = self._thin(x_TD[token_N], self.lora13)
        h_NH = self._linear(x_ND, self.w13, u13_NR, self.lora13).to(x_TD.dtype)
        a_NF = gated_activation(h_NH, self.glu)
        u2_NR = self._thin(a_NF, self.lora2)
        quantised_NF = dequantise_rows(*quantise_rows(a_NF), _wide(x_TD))
        y_ND = self._linear(quantised_NF, self.w2, u2_NR, self.lora2).to(x_TD.dtype)
        out_TD = gather_sum(y_ND, self.plan.slot_of_TK, weights_TK).to(x_TD.dtype)
        return Fp8Rows(h_NH, a_NF, u13_NR, u2_NR, out_TD)

    def backward(
        self, dout_TD: Tensor, x_TD: Tensor, weights_TK: Tensor, rows: Fp8Rows
    ) -> Fp8Gradients:
        """Compute the gradients with transposed copies; dout and dh are quantised."""
        plan, wide, dtype = self.plan, _wide(x_TD), x_TD.dtype
        token_N, w_N1 = tokens_of(plan), row_weights(weights_TK, plan).unsqueeze(1)
        dout_ND = dout_TD[token_N]
        q_NR = self._passed(dout_ND, self.lora2)
        quantised = dequantise_rows(*quantise_rows(dout_TD), wide)[token_N]
        da_NF = self._transposed(quantised, self.w2, q_NR, self.lora2)
        a_NF, dh_NH = gated_activation_backward(rows.h_NH, da_NF, w_N1, self.glu)
        dh_NH = dh_NH.to(dtype)
        p_NR = self._passed(dh_NH, self.lora13)
        quantised = dequantise_rows(*quantise_rows(dh_NH), wide)
        dx_ND = self._transposed(quantised, self.w13, p_NR, self.lora13).to(dtype)
        dw_N = (da_NF.to(wide) * a_NF.to(wide)).sum(-1)
        wa_NF, wu2_NR = ((w_N1 * each.to(wide)).to(dtype) for each in (a_NF, rows.u2_NR))
        return Fp8Gradients(
            gather_sum(dx_ND, plan.slot_of_TK, None).to(dtype),
            rows_to_slots(dw_N, plan),
            self._outer(p_NR, x_TD[token_N], self.lora13),
            self._outer(dh_NH, rows.u13_NR, self.lora13),
            self._outer(q_NR, wa_NF, self.lora2),
            self._outer(dout_ND, wu2_NR, self.lora2),
        )

    def _by_expert(self, rows: Tensor, width: int, function: object) -> Tensor:
        out = rows.new_zeros(rows.shape[0], width, dtype=_wide(rows))
        for e, (start, end) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            out[start:end] = function(e, slice(start, end))  # type: ignore[operator]
        return out

    def _linear(self, rows: Tensor, w: PackedWeight, u_NR: Tensor, lora: Lora | None) -> Tensor:
        def one(e: int, at: slice) -> Tensor:
            out = rows[at] @ _values(w, e, rows.dtype).T
            return out if lora is None else out + u_NR[at].to(out) @ lora.B_EOR[e].to(out).T

        return self._by_expert(rows, w.shape[1], one)

    def _transposed(self, rows: Tensor, w: PackedWeight, p: Tensor, lora: Lora | None) -> Tensor:
        def one(e: int, at: slice) -> Tensor:
            out = rows[at] @ _values(w, e, rows.dtype)
            return out if lora is None else out + p[at].to(out) @ lora.A_ERI[e].to(out)

        return self._by_expert(rows, w.shape[2], one)

    def _thin(self, rows: Tensor, lora: Lora | None) -> Tensor:
        """Compute s A rows, in the rows' dtype; empty without factors."""
        if lora is None:
            return rows.new_empty(rows.shape[0], 0)
        A, scaling, wide = lora.A_ERI, lora.scaling, _wide(rows)
        found = self._by_expert(
            rows, A.shape[1], lambda e, at: rows[at].to(wide) @ A[e].to(wide).T * scaling
        )
        return found.to(rows.dtype)

    def _passed(self, rows: Tensor, lora: Lora | None) -> Tensor:
        """Compute s Bᵀ rows, in the rows' dtype; empty without factors."""
        if lora is None:
            return rows.new_empty(rows.shape[0], 0)
        B, scaling, wide = lora.B_EOR, lora.scaling, _wide(rows)
        found = self._by_expert(
            rows, B.shape[2], lambda e, at: rows[at].to(wide) @ B[e].to(wide) * scaling
        )
        return found.to(rows.dtype)

    def _outer(self, left: Tensor, right: Tensor, lora: Lora | None) -> Tensor | None:
        """Sum left ⊗ right over each expert's rows: scaling is already in the rows."""
        if lora is None:
            return None
        wide = _wide(left)
        spans = zip(self.bounds, self.bounds[1:], strict=False)
        return torch.stack(
            [left[start:end].to(wide).T @ right[start:end].to(wide) for start, end in spans]
        ).to(left.dtype)


def _values(w: PackedWeight, e: int, dtype: torch.dtype) -> Tensor:
    """Return one expert's weight without rounding it."""
    wide = fp8.spread(w.scales[0][e].to(dtype), *w.packed.shape[-2:])
    return w.packed[e].to(dtype) * wide


def _wide(rows: Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)
