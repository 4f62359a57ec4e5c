"""Separate grouped products, for experts whose own code runs between them.

Same class name and meaning as in ``moe_patch.ops.experts.grouped``, which is the reference. This
class uses the kernels of the fused operator.
"""

from __future__ import annotations

from torch import Tensor

from moe_patch.kernels.common.device import device_of, on_device_of
from moe_patch.kernels.common.tiles import Tile, pick_tile, resized, rows_bucket
from moe_patch.kernels.experts.dw import outer_sum
from moe_patch.kernels.experts.linear import grouped_linear
from moe_patch.kernels.experts.reduce import expert_sum
from moe_patch.kernels.plan.row_tiles import RowTiles, depth_block
from moe_patch.types import Lora, Plan

# Up to this width, a product uses the tiles for low-rank factors.
_THIN = 64


class Groups:
    """Matrix products over each expert's rows.

    Rows past the last valid one are neither read nor written.

    Args:
        plan: a plan with at least one row.
        like: a tensor with the device and dtype of all operands.
    """

    def __init__(self, plan: Plan, like: Tensor) -> None:
        self.plan, self.tiles = plan, RowTiles(plan)
        self.dtype, self.device = like.dtype, device_of(like)
        self.bucket = rows_bucket(self.tiles.count, self.tiles.num_experts)

    def linear(
        self,
        x_NI: Tensor,
        w_EOI: Tensor,
        b_EO: Tensor | None = None,
        low_rank: tuple[Tensor, Lora] | None = None,
    ) -> Tensor:
        """Compute y_n = W_e x_n + b_e, [N, O]; ``low_rank`` = (u_NR, lora) adds s * B_e u_n."""
        if low_rank is None:
            return self._product(x_NI, w_EOI, b_EO)
        u_NR, lora = low_rank
        return self._product(x_NI, w_EOI, b_EO, (u_NR * lora.scaling, lora.B_EOR))

    def linear_transposed(
        self, dy_NO: Tensor, w_EOI: Tensor, lora: Lora | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the data gradient W_eᵀ dy_n + s * A_eᵀ (B_eᵀ dy_n), and B_eᵀ dy_n or None."""
        w_EIO = w_EOI.transpose(1, 2)
        if lora is None:
            return self._product(dy_NO, w_EIO), None
        p_NR = self._product(dy_NO, lora.B_EOR.transpose(1, 2))
        low_rank = p_NR * lora.scaling, lora.A_ERI.transpose(1, 2)
        return self._product(dy_NO, w_EIO, low_rank=low_rank), p_NR

    def outer_sum(self, dy_NO: Tensor, x_NI: Tensor, like_EOI: Tensor) -> Tensor:
        """Sum dy_n ⊗ x_n per expert, strided like ``like_EOI``; exact zeros for no rows."""
        O, I = like_EOI.shape[1:]
        with on_device_of(dy_NO):
            if O <= _THIN:
                return outer_sum(dy_NO, x_NI, self.plan, like_EOI, self._thin_dw(O))
            if I <= _THIN:
                like_EIO = like_EOI.transpose(1, 2)
                grad_EIO = outer_sum(x_NI, dy_NO, self.plan, like_EIO, self._thin_dw(I))
                return grad_EIO.transpose(1, 2)
            return outer_sum(dy_NO, x_NI, self.plan, like_EOI, self._tile("dw2"))

    def row_sum(self, dy_NO: Tensor, like_EO: Tensor) -> Tensor:
        """Sum dy_n per expert, [E, O], contiguous."""
        with on_device_of(dy_NO):
            return expert_sum(dy_NO, self.plan, like_EO)

    def _product(
        self,
        inputs: Tensor,
        w_EOI: Tensor,
        b_EO: Tensor | None = None,
        low_rank: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        O = w_EOI.shape[1]
        tile = self._tile("down")
        if O <= _THIN:
            tile = resized(self._tile("thin"), n=depth_block(O))
        elif low_rank is not None and tile.flatten:
            tile = resized(tile, hopper=True)
        rows = self.tiles.rows(tile.m)
        with on_device_of(inputs):
            return grouped_linear(
                inputs if inputs.stride(-1) == 1 else inputs.contiguous(),
                rows, w_EOI, b_EO, tile, low_rank=low_rank,
            )  # fmt: skip

    def _thin_dw(self, width: int) -> Tile:
        return resized(self._tile("thin_dw"), m=depth_block(width))

    def _tile(self, op: str) -> Tile:
        capability, shared_memory = self.device.capability, self.device.shared_memory
        return pick_tile(op, self.bucket, self.dtype, capability, shared_memory)
