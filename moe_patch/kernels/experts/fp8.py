"""The products of a call in FP8, for experts stored in FP8, on Hopper.

x, a, dout and dh are quantised once, with a scale per row and 128 columns
(:mod:`moe_patch.ops.experts.fp8_definition` defines the results). Low-rank terms stay in 16 bits.
The gradients dh and dx need weights that are contiguous along another axis. So they are computed in
FP8 only if the weights bring transposed copies.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from moe_patch.formats import fp8
from moe_patch.formats.fp8_scope import why_not_in_scope
from moe_patch.formats.packed import PackedWeight
from moe_patch.kernels.common.device import Device, cdiv
from moe_patch.kernels.common.versions import hopper_module, whole_rank, why_no_fp8
from moe_patch.kernels.experts.dh import HiddenGradients
from moe_patch.kernels.packed.rows import quantise_rows
from moe_patch.kernels.plan.row_tiles import RowTiles
from moe_patch.types import ExpertWeights, Glu

LowRank = tuple[Tensor, Tensor]
_GROUP_OF_TILES = 8
_ROWS, _COLUMNS = 128, 256
# Limit on rows of descriptors that clip at any row (kernels/hopper/common.py).
_MOST_COUNT = 1 << 30


def why_not_fp8(
    capability: tuple[int, int],
    dtype: torch.dtype,
    shape: tuple[int, int],
    glu: Glu,
    *,
    biased: bool,
    transposed: bool,
) -> str:
    """Return why experts stored in FP8 are decoded although FP8 products were requested, or "".

    Args: as of :func:`moe_patch.formats.fp8_scope.why_not_in_scope`.
    """
    scope = why_not_in_scope(capability, dtype, shape, glu, biased=biased, transposed=transposed)
    return scope or why_no_fp8()


def fp8_products(
    tiles: RowTiles, x_TD: Tensor, w: ExpertWeights, glu: Glu, device: Device
) -> Fp8Products | None:
    """Return the products of a call in FP8, or None if they were not requested or do not apply.

    Args:
        tiles, x_TD, w, glu, device: of the call.
    """
    w13: Any = w.w13_EHD
    if not isinstance(w13, PackedWeight) or not w13.in_fp8:
        return None
    biased = w.b13_EH is not None or w.b2_ED is not None
    shape = w13.shape[1], w13.shape[2]
    if why_not_fp8(
        device.capability, x_TD.dtype, shape, glu, biased=biased, transposed=w13.transposed
    ):
        return None
    if tiles.count >= _MOST_COUNT or not all(map(_is_loadable, (w13, w.w2_EDF))):
        return None
    return Fp8Products(tiles, x_TD, w, glu)


def _is_loadable(w: Any) -> bool:
    """Return whether TMA can load a packed weight."""
    return w.packed.is_contiguous() and w.packed.data_ptr() % 16 == 0


class Fp8Products:
    """Products of one call, with the quantised rows that pass between them."""

    def __init__(self, tiles: RowTiles, x_TD: Tensor, w: ExpertWeights, glu: Glu) -> None:
        self.tiles, self.rows = tiles, tiles.rows(_ROWS)
        self.x_TD, self.glu = x_TD, glu
        self.w13: Any = w.w13_EHD
        self.w2: Any = w.w2_EDF
        self.a_NF: LowRank | None = None
        self.dh_NH: LowRank | None = None

    @property
    def has_copies(self) -> bool:
        return len(self.w13.scales) == 3

    @functools.cached_property
    def _x(self) -> LowRank:
        return quantise_rows(self.x_TD)

    def up(self, low_rank: LowRank | None, *, save_h: bool, save_a: bool) -> tuple[Tensor, Tensor]:
        """Compute (h_NH, a_NF) in 16 bits; an output that is not saved is empty."""
        N, (H, F) = self.rows.count, (self.w13.shape[1], self.w2.shape[2])
        h_NH = self.x_TD.new_empty((N, H) if save_h else 0)
        a_NF = self.x_TD.new_empty((N, F) if save_a else 0)
        self.a_NF = self._values(N, F)
        hopper_module("fp8_up").up(
            self._x, self.rows, (self.w13.packed, self.w13.scales[0]), self.glu, h_NH, a_NF,
            self.a_NF, _loadable(whole_rank(low_rank)), _GROUP_OF_TILES,
        )  # fmt: skip
        return h_NH, a_NF

    def down(self, low_rank: LowRank | None) -> Tensor:
        """Compute y_ND from the quantised a of :meth:`up`."""
        assert self.a_NF is not None
        return self._linear(self.a_NF, (self.w2.packed, self.w2.scales[0]), whole_rank(low_rank))

    def hidden_gradients(
        self,
        dout_TD: Tensor,
        weights_TK: Tensor,
        h_NH: Tensor,
        low_rank: LowRank | None,
        *,
        wa: bool,
        overwrite_h: bool,
    ) -> HiddenGradients:
        """Compute the gradients through the activation, as kernels/experts/dh.py describes."""
        N, F = h_NH.shape[0], self.w2.shape[2]
        into = HiddenGradients(
            h_NH if overwrite_h else torch.empty_like(h_NH),
            h_NH.new_empty((N, F) if wa else 0),
            h_NH.new_empty((N, cdiv(F, _COLUMNS)), dtype=torch.float32),
        )
        self.dh_NH = self._values(N, 2 * F)
        hopper_module("fp8_dh").hidden_gradients(
            quantise_rows(dout_TD), self.rows, self.w2.scales[1:], weights_TK, h_NH, self.glu,
            into, self.dh_NH, _loadable(whole_rank(low_rank, axis=1)), _GROUP_OF_TILES,
        )  # fmt: skip
        return into

    def input_gradient(self, low_rank: LowRank | None) -> Tensor:
        """Compute the rows of dx, [N, D], from the quantised dh of :meth:`hidden_gradients`."""
        assert self.dh_NH is not None
        return self._linear(self.dh_NH, self.w13.scales[1:], whole_rank(low_rank))

    def _linear(
        self, rows_NI: LowRank, w_EOI: tuple[Tensor, Tensor], low_rank: LowRank | None
    ) -> Tensor:
        out_NO = self.x_TD.new_empty(self.rows.count, w_EOI[0].shape[1])
        hopper_module("fp8_linear").grouped_linear(
            rows_NI, self.rows, w_EOI, out_NO, _loadable(low_rank), _GROUP_OF_TILES
        )
        return out_NO

    def _values(self, count: int, width: int) -> LowRank:
        values = self.x_TD.new_empty(count, width, dtype=fp8.DTYPE)
        return values, self.x_TD.new_empty(count, width // fp8.BLOCK, dtype=torch.float32)


def _loadable(low_rank: LowRank | None) -> LowRank | None:
    """Return rows and factor that TMA can load: a contiguous axis, and 16-byte units."""
    if low_rank is None:
        return None
    u_NR, factor = low_rank
    common = hopper_module("common")
    if not any(common.copies_boxes(factor, axis=axis) for axis in (1, 2)):
        factor = factor.contiguous()
    return u_NR, factor
