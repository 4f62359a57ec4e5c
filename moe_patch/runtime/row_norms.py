"""Per-row norms for an experts module whose own code runs between grouped products.

The experts operator does not see the rows there. Tensor hooks read the gradients of h and y
instead, and the outer-product identity gives the norm over the parameters:

    ||dL/dW2_e|| = ||dy|| ||a||        ||dL/dW13_e|| = ||dh|| ||x||        biases: ||dy||, ||dh||
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_patch.ops.experts.definition import build_plan
from moe_patch.ops.experts.op import Signals
from moe_patch.ops.experts.rows import rows_to_slots

Step = Callable[[Tensor], Tensor]


class RowNorms:
    """Wrapper of an experts module's gate and post-expert norm that fills a :class:`Signals`.

    Args:
        signals: receives the norms; the values for the low-rank factors stay 0.
        x_TD, ids_TK: inputs of the experts.
        experts: number of experts.
        biased: both projections have a bias.
    """

    def __init__(
        self, signals: Signals, x_TD: Tensor, ids_TK: Tensor, experts: int, biased: bool
    ) -> None:
        self.signals = signals
        self.biased = biased
        self.plan = build_plan(ids_TK, experts)
        token_N = self.plan.row_of_N.clamp(min=0) // ids_TK.shape[1]
        self.x_N = _row_norm(x_TD.detach()).index_select(0, token_N)
        self.a_N = self.x_N
        self.out_N = self.x_N
        self.dy_N = self.x_N

    def gate(self, own: Step) -> Step:
        """Wrap the module's activation, h_NH -> a_NF."""

        def run(h_NH: Tensor) -> Tensor:
            if h_NH.requires_grad:
                h_NH.register_hook(self._at_h)
            a_NF = own(h_NH)
            self.a_N = _row_norm(a_NF.detach())
            return a_NF

        return run

    def post(self, own: Step | None) -> Step:
        """Wrap the module's post-expert norm, y_ND -> y_ND; None if it has no norm."""

        def run(y_ND: Tensor) -> Tensor:
            out_ND = y_ND if own is None else own(y_ND)
            self.signals.act_norm_TK = rows_to_slots(_row_norm(out_ND.detach()), self.plan)
            if y_ND.requires_grad:
                out_ND.register_hook(self._at_out)
                y_ND.register_hook(self._at_y)
            return out_ND

        return run

    def _at_out(self, grad_ND: Tensor) -> None:
        self.out_N = _row_norm(grad_ND.detach())

    def _at_y(self, grad_ND: Tensor) -> None:
        self.dy_N = _row_norm(grad_ND.detach())

    @torch.no_grad()
    def _at_h(self, grad_NH: Tensor) -> None:
        """Write the norms: this hook runs last, since the gradient reaches out, then y, then h."""
        dh_N = _row_norm(grad_NH.detach())
        squares_N = (self.dy_N * self.a_N).square() + (dh_N * self.x_N).square()
        if self.biased:
            squares_N = squares_N + self.dy_N.square() + dh_N.square()
        rows = (self.out_N, squares_N.sqrt(), torch.zeros_like(dh_N))
        self.signals.grads_3TK.copy_(torch.stack([rows_to_slots(row, self.plan) for row in rows]))


def _row_norm(rows: Tensor) -> Tensor:
    wide = torch.promote_types(rows.dtype, torch.float32)
    return torch.linalg.vector_norm(rows, dim=-1, dtype=wide)
