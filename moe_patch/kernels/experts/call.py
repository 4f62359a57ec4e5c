"""One call of the experts: operands, tiles, and the products of forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from moe_patch.formats.packed import PackedWeight
from moe_patch.kernels.common.activation import activation
from moe_patch.kernels.common.chunks import COLUMNS, LEAST
from moe_patch.kernels.common.device import device_of
from moe_patch.kernels.common.tiles import Tile, pick_tile, resized, rows_bucket
from moe_patch.kernels.experts.dh import HiddenGradients, hidden_gradients
from moe_patch.kernels.experts.dh_epilogue import hidden_gradients_from
from moe_patch.kernels.experts.dw import outer_sum
from moe_patch.kernels.experts.factors import factor_backward, laid_like, rank_innermost
from moe_patch.kernels.experts.fp8 import Fp8Products, fp8_products
from moe_patch.kernels.experts.linear import grouped_linear
from moe_patch.kernels.experts.reduce import combine
from moe_patch.kernels.experts.up import up
from moe_patch.kernels.packed.linear import decoding_tile, packed_linear
from moe_patch.kernels.packed.parts import PACKED_OPS, PackedParts, Part
from moe_patch.kernels.plan.plan import plan_and_tiles
from moe_patch.kernels.plan.row_tiles import RowTiles, depth_block
from moe_patch.types import ExpertWeights, Glu, Lora


def align_rows(
    ids_TK: Tensor, num_experts: int, x_TD: Tensor, batch_invariant: bool = False
) -> RowTiles:
    """Build the plan of a call, tiled for the up projection."""
    device = device_of(x_TD)
    bucket = _bucket(ids_TK.numel(), num_experts, batch_invariant)
    tile = pick_tile("up", bucket, x_TD.dtype, device.capability, device.shared_memory)
    plan, table = plan_and_tiles(ids_TK, num_experts, tile.m)
    return RowTiles(plan, {tile.m: table})


def _bucket(rows: int, num_experts: int, batch_invariant: bool) -> str:
    # Another tile may sum in another order. Batch invariance requires the same tiles everywhere.
    return "many" if batch_invariant else rows_bucket(rows, num_experts)


class Call:
    """Operands of one call, and the products that forward and backward use."""

    def __init__(
        self,
        tiles: RowTiles,
        x_TD: Tensor,
        w: ExpertWeights,
        glu: Glu,
        lora13: Lora | None,
        lora2: Lora | None,
        batch_invariant: bool = False,
        rows: int | None = None,
    ) -> None:
        self.tiles, self.plan = tiles, tiles.plan
        self.sums: dict[str, Tensor] | None = None  # fp32 weight gradients of earlier chunks
        # Decides tiles and kernels, and so the order of sums; a chunk takes the rows of all tokens.
        self.rows = tiles.count if rows is None else rows
        self.x_TD, self.w, self.glu = x_TD, w, glu
        self.dtype, self.device = x_TD.dtype, device_of(x_TD)
        self.lora13, self.lora2 = lora13, lora2
        self.batch_invariant = batch_invariant
        self.bucket = _bucket(self.rows, tiles.num_experts, batch_invariant)

    def tile(self, op: str) -> Tile:
        capability, shared_memory, _ = self.device
        tile = pick_tile(op, self.bucket, self.dtype, capability, shared_memory)
        # A part has only some experts, so most tiles within the bound are empty. A persistent
        # kernel starts no programs for them.
        packed = op in PACKED_OPS and isinstance(self.w.w2_EDF, PackedWeight)
        return resized(tile, persistent=True) if packed else tile

    @functools.cached_property
    def _fp8(self) -> Fp8Products | None:
        return fp8_products(self.tiles, self.x_TD, self.w, self.glu, self.device)

    @functools.cached_property
    def _packed(self) -> PackedParts:
        return PackedParts(self.tiles, self.x_TD.dtype)

    @functools.cached_property
    def _b13_EOR(self) -> Tensor:
        assert self.lora13 is not None
        return rank_innermost(self.lora13.B_EOR)

    @functools.cached_property
    def _b2_EOR(self) -> Tensor:
        assert self.lora2 is not None
        return rank_innermost(self.lora2.B_EOR)

    def up(
        self,
        u13_NR: Tensor | None,
        *,
        save_h: bool,
        save_a: bool,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute (h_NH, a_NF); an output that is not saved is empty.

        Args:
            u13_NR: result of :meth:`inputs_of_B13`.
            save_h, save_a: outputs to write.
            into: existing outputs; a product that decodes its weights allocates its own.
        """
        low_rank = None if u13_NR is None else (u13_NR, self._b13_EOR)
        if self._fp8 is not None:
            # The down projection reads a in e4m3, so only low-rank factors need it in 16 bits.
            save_a = save_a and self.lora2 is not None
            return self._fp8.up(low_rank, save_h=save_h, save_a=save_a)
        if (decoding := self._decoding_tile(self.w.w13_EHD)) is not None:
            return self._decoded_up(decoding, low_rank, save_h=save_h, save_a=save_a)
        tile, found = self.tile("up"), into
        for part in self.parts(self.w.w13_EHD):
            found = up(
                self.x_TD, part.rows(tile.m), part.w_EOI, part.own(self.w.b13_EH), self.glu, tile,
                low_rank=part.low_rank(low_rank), save_h=save_h, save_a=save_a, into=found,
            )  # fmt: skip
        assert found is not None
        return found

    def _decoded_up(
        self,
        tile: Tile,
        low_rank: tuple[Tensor, Tensor] | None,
        *,
        save_h: bool,
        save_a: bool,
    ) -> tuple[Tensor, Tensor]:
        w13: Any = self.w.w13_EHD
        rows = self.tiles.rows(tile.m)
        h_NH = packed_linear(
            self._gathered(self.x_TD), rows, w13, self.w.b13_EH, tile, low_rank=low_rank
        )
        nothing = h_NH.new_empty(0)
        return h_NH if save_h else nothing, activation(h_NH, self.glu) if save_a else nothing

    def _gathered(self, source_TD: Tensor) -> Tensor:
        """Gather rows into plan order, for descriptors; the copy is cheap."""
        return source_TD.index_select(0, self.plan.row_of_N.clamp(min=0) // self.tiles.top_k)

    def _decoding_tile(self, w_EOI: Tensor | PackedWeight) -> Tile | None:
        """Return the tile of the kernel that decodes packed weights itself, or None for others."""
        if not isinstance(w_EOI, PackedWeight) or self.batch_invariant:
            return None
        return decoding_tile(w_EOI, self.x_TD.dtype, self.device, self.rows)

    def down(self, a_NF: Tensor, u2_NR: Tensor | None) -> Tensor:
        """Compute y_ND; ``u2_NR`` is the result of :meth:`inputs_of_B2`."""
        low_rank = None if u2_NR is None else (u2_NR, self._b2_EOR)
        if self._fp8 is not None:
            return self._fp8.down(low_rank)
        return self._linear("down", a_NF, self.w.w2_EDF, self.w.b2_ED, low_rank)

    def hidden_gradients(
        self,
        dout_TD: Tensor,
        weights_TK: Tensor,
        h_NH: Tensor,
        low_rank: tuple[Tensor, Tensor] | None,
        *,
        dh: bool,
        wa: bool,
        partial: bool,
        overwrite_h: bool = False,
        wa_NF: Tensor | None = None,
    ) -> HiddenGradients:
        """Compute gradients through the down projection and the activation, as dh.py describes."""
        if dh and self._fp8 is not None and self._fp8.has_copies:
            return self._fp8.hidden_gradients(
                dout_TD, weights_TK, h_NH, low_rank, wa=wa, overwrite_h=overwrite_h
            )
        if (decoding := self._decoding_tile(self.w.w2_EDF)) is not None:
            w_EFD: Any = self.w.w2_EDF.transpose(1, 2)
            rows, da_NF = self.tiles.rows(decoding.m), h_NH
            if dh or partial:
                factor = None if low_rank is None else (low_rank[0], low_rank[1].transpose(1, 2))
                # Keep da in fp32, as the accumulators of the fused kernel do.
                da_NF = packed_linear(
                    self._gathered(dout_TD), rows, w_EFD, None, decoding,
                    low_rank=factor, dtype=torch.float32,
                )  # fmt: skip
            else:
                da_NF = h_NH.new_zeros(h_NH.shape[0], w_EFD.shape[1])
            return hidden_gradients_from(
                da_NF, rows, weights_TK, h_NH, self.glu, dh=dh, wa=wa, partial=partial,
                overwrite_h=overwrite_h,
            )  # fmt: skip
        tile, found = self.tile("dh"), None
        for part in self.parts(self.w.w2_EDF):
            found = hidden_gradients(
                dout_TD, part.rows(tile.m), part.w_EOI, weights_TK, h_NH, self.glu, tile,
                low_rank=part.low_rank(low_rank), dh=dh, wa=wa, partial=partial,
                overwrite_h=overwrite_h, wa_NF=wa_NF, into=found,
            )  # fmt: skip
        assert found is not None
        return found

    def down_by_columns(
        self, a_NF: Tensor, u2_NR: Tensor | None, spare: Tensor, least: int
    ) -> Iterator[tuple[slice, Callable[[], Tensor]]]:
        """Yield ranges of columns of y, and functions that compute them.

        These are in ``spare``, contiguous memory, if ``least`` columns fit there.
        """
        low_rank = None if u2_NR is None else (u2_NR, self._b2_EOR)
        return self._by_columns("down", a_NF, self.w.w2_EDF, self.w.b2_ED, low_rank, least, spare)

    def input_gradient(
        self, dh_NH: Tensor, p_NR: Tensor | None, into_TD: Tensor | None = None
    ) -> Tensor:
        """Compute the gradient of x; ``into_TD`` gets it some columns at a time."""
        low_rank = None
        if self.lora13 is not None and p_NR is not None:
            low_rank = p_NR, self.lora13.A_ERI.transpose(1, 2)
        if self._fp8 is not None and self._fp8.has_copies:
            return combine(self._fp8.input_gradient(low_rank), self.plan, None)
        w_EDH = self.w.w13_EHD.transpose(1, 2)
        if into_TD is None:
            return combine(self._linear("dx", dh_NH, w_EDH, None, low_rank), self.plan, None)
        # w a is freed by now. As many columns as it had take its memory.
        least = max(COLUMNS, self.w.w2_EDF.shape[2] // LEAST * LEAST)
        for some, rows in self._by_columns("dx", dh_NH, w_EDH, None, low_rank, least):
            combine(rows(), self.plan, None, into_TD[:, some])
        return into_TD

    def _by_columns(
        self,
        op: str,
        inputs: Tensor,
        w_EOI: Tensor | PackedWeight,
        b_EO: Tensor | None,
        low_rank: tuple[Tensor, Tensor] | None,
        least: int,
        spare: Tensor | None = None,
    ) -> Iterator[tuple[slice, Callable[[], Tensor]]]:
        """Yield ranges of columns and functions that compute them; packed weights are one range."""
        if isinstance(w_EOI, PackedWeight):
            yield slice(None), functools.partial(self._linear, op, inputs, w_EOI, b_EO, low_rank)
            return
        N = self.tiles.count
        fit = 0 if spare is None else spare.numel() // N // LEAST * LEAST
        for first in range(0, w_EOI.shape[1], max(least, fit)):
            some = slice(first, first + max(least, fit))
            bias = None if b_EO is None else b_EO[:, some]
            factor = None if low_rank is None else (low_rank[0], low_rank[1][:, some])
            w, into = w_EOI[:, some], None
            if spare is not None and fit >= least:
                into = spare.view(-1)[: N * w.shape[1]].view(N, -1)
            yield some, functools.partial(self._linear, op, inputs, w, bias, factor, into)

    def _linear(
        self,
        op: str,
        inputs: Tensor,
        w_EOI: Tensor | PackedWeight,
        b_EO: Tensor | None,
        low_rank: tuple[Tensor, Tensor] | None,
        into: Tensor | None = None,
    ) -> Tensor:
        if (decoding := self._decoding_tile(w_EOI)) is not None:
            w: Any = w_EOI
            rows = self.tiles.rows(decoding.m)
            return packed_linear(inputs, rows, w, b_EO, decoding, low_rank=low_rank)
        tile, found = self.tile(op), into
        if low_rank is not None and tile.flatten:
            # A low-rank factor costs the portable kernel its flattened loop, and the
            # warp-specialised kernel nothing.
            tile = resized(tile, hopper=True)
        for part in self.parts(w_EOI):
            found = grouped_linear(
                inputs, part.rows(tile.m), part.w_EOI, part.own(b_EO), tile,
                low_rank=part.low_rank(low_rank), into=found,
            )  # fmt: skip
        assert found is not None
        return found

    def parts(self, w_EOI: Tensor | PackedWeight) -> Iterable[Part]:
        """Return the parts of a weight: one, or if it is packed, some experts at a time."""
        if isinstance(w_EOI, PackedWeight):
            return self._packed.parts(w_EOI)
        return (Part(w_EOI, self.tiles),)

    def inputs_of_B13(self) -> Tensor | None:
        """Compute u13 = s A13_e x_n, [N, R]; None without factors on the up projection."""
        lora = self.lora13
        return lora and self._thin(self.x_TD, lora.A_ERI, lora.scaling, gather=True)

    def inputs_of_B2(self, a_NF: Tensor) -> Tensor | None:
        """Compute u2 = s A2_e a_n, [N, R]; None without factors on the down projection."""
        lora = self.lora2
        return lora and self._thin(a_NF, lora.A_ERI, lora.scaling, gather=False)

    def factor_B_backward(
        self, source: Tensor, lora: Lora, u_NR: Tensor | None, *, passed: bool, gather: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return (s B_eᵀ source_n, [N, R], if ``passed``; B's gradient if ``u_NR`` is given)."""
        b_EOR = self._b13_EOR if lora is self.lora13 else self._b2_EOR
        tile = self.tile("factor_bwd")
        if gather or b_EOR.shape[2] > 16:
            # A narrower tile lets two programs share a multiprocessor. That loads gathered rows
            # faster, and a wider factor needs the space.
            tile = resized(tile, n=min(tile.n, 256))
        alpha = lora.scaling if passed else None
        passed_NR, grad_EOR = factor_backward(
            source, self.plan, b_EOR, u_NR, tile, alpha=alpha, gather=gather
        )
        return passed_NR, grad_EOR if grad_EOR is None else laid_like(grad_EOR, lora.B_EOR)

    def _thin(self, source: Tensor, w_ERI: Tensor, alpha: float, gather: bool) -> Tensor:
        tile = resized(self.tile("thin"), n=depth_block(w_ERI.shape[1]))
        rows = self.tiles.rows(tile.m)
        return grouped_linear(source, rows, w_ERI, None, tile, gather=gather, alpha=alpha)

    def outer_A(
        self, rank_NR: Tensor, right: Tensor, like_ERI: Tensor, *, gather: bool = False
    ) -> Tensor:
        """Compute the gradient of a factor A."""
        tile = resized(self.tile("thin_dw"), m=depth_block(rank_NR.shape[1]))
        return outer_sum(rank_NR, right, self.plan, like_ERI, tile, gather_right=gather)
