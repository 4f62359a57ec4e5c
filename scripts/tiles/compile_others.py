"""Launch the kernels that use no tile of the table over meta tensors, for compile_tiles.py."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from moe_patch.formats import fp8
from moe_patch.formats.packed import STORAGES, PackedWeight, pack
from moe_patch.kernels.common import activation
from moe_patch.kernels.common.device import device_of
from moe_patch.kernels.experts import dh_epilogue, factors, norms, reduce
from moe_patch.kernels.experts.fp8 import fp8_products
from moe_patch.kernels.packed import dequant
from moe_patch.kernels.packed import linear as packed_linear
from moe_patch.kernels.plan import plan
from moe_patch.kernels.plan.row_tiles import RowTiles
from moe_patch.kernels.routing import losses, product_key, route, weights_at
from moe_patch.types import ExpertWeights, Glu, RouteSpec

SCALE = torch.float32
ROUTES = (
    (128, RouteSpec(8, renormalize=True)),
    (64, RouteSpec(8)),
    (256, RouteSpec(8, score="sigmoid", groups=8, top_groups=4, renormalize=True, eps=1e-20)),
    (32, RouteSpec(4, order="topk_score", fp32=False)),
    (512, RouteSpec(10, renormalize=True)),
)


def launch_others(dtype: torch.dtype) -> None:
    """Launch every kernel that uses no tile of the table: plan, reductions, routing, losses."""
    T, D, E, K = 4096, 2048, 128, 8

    def empty(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, device="meta", dtype=dtype)

    weights_TK, b_ED = empty(T, K, dtype=torch.float32), empty(E, D)
    plans = [plan.build_plan(empty(n, K, dtype=torch.int64), E) for n in (8, T)]
    plan.grouped_rows(plans[1], weights_TK)
    tiles = RowTiles(plans[1])
    row_tiles = tiles.rows(64)
    for weights in (weights_TK, None):
        reduce.combine(empty(T * K, D), plans[1], weights)
        reduce.expert_sum(empty(T, D), plans[1], b_ED, gather=True, weights_TK=weights)
    reduce.expert_sum(empty(T * K, D), plans[1], b_ED)
    for bias in (b_ED, None):
        partial_NC = empty(T * K, 6, dtype=torch.float32)
        reduce.routing_gradient(partial_NC, row_tiles, weights_TK, empty(T, D), bias)
    for experts, spec in ROUTES:
        logits_TE, bias_E = empty(T, experts), empty(experts, dtype=torch.float32)
        bias = bias_E if spec.groups else None
        made = route.route_forward(logits_TE, spec, bias)
        route.route_backward(made.weights_TK, logits_TE, made.ids_TK, spec)
        weights_at.weights_at(logits_TE, made.ids_TK, spec, bias is not None)
    sums = losses.router_sums(empty(T, E), weights_TK[:, 0], K)
    losses.router_sums_backward(sums.probabilities_E, sums.z, empty(T, E), None)
    ids_TK, found_TK = product_key.product_key_forward(empty(T, 64), empty(T, 64), 16)
    product_key.product_key_backward(found_TK, empty(T, 64), empty(T, 64), ids_TK)
    factors.weighted(empty(T * K, 16), plans[1], weights_TK)
    peft_EOR = empty(D, 16, E).permute(2, 0, 1)
    factors.laid_like(factors.rank_innermost(peft_EOR), peft_EOR)
    norms.combine_with_norms(empty(T * K, D), plans[1], weights_TK)


def launch_packed(dtype: torch.dtype) -> None:
    """Launch the kernels that packed experts use beside the grouped products."""
    weights_TK = torch.empty(4096, 8, device="meta")
    tiles = RowTiles(plan.build_plan(weights_TK.long(), 128))
    row_tiles = tiles.rows(64)
    O, I, glu = 512, 256, Glu("silu")
    E, N = row_tiles.plan.offsets_S.shape[0] - 1, row_tiles.count
    h_NH = torch.empty(N, 2 * I, device="meta", dtype=dtype)
    activation.activation(h_NH, glu)
    da_NF = torch.empty(N, I, device="meta", dtype=torch.float32)
    dh_epilogue.hidden_gradients_from(
        da_NF, row_tiles, weights_TK, h_NH, glu, dh=True, wa=True, partial=True
    )
    for storage in STORAGES:
        w = pack(torch.zeros(1, O, I), storage, torch.device("cpu"), "w")
        meta = [t.to("meta") for t in (w.packed.expand(E, -1, -1), *w.scales)]
        stored = PackedWeight(storage, meta[0], tuple(meta[1:]), dtype)
        buffer = torch.empty(E, O, I, device="meta", dtype=dtype)
        dequant.dequantize_into(buffer, stored, row_tiles.plan.offsets_S, 0)
        launch_decoding(stored, tiles)
        launch_decoding(stored.transpose(1, 2), tiles)
    values = torch.empty(E, O, I // 2, device="meta", dtype=torch.uint8)
    stored = PackedWeight("mxfp4", values, (values[..., ::16].contiguous(),), dtype)
    dequant.dequantize_into(buffer, stored, row_tiles.plan.offsets_S, 0)


def launch_fp8(dtype: torch.dtype) -> None:
    """Launch the products in FP8, forward and backward, where a call could choose them."""
    T, D, F, E, K, R = 4096, 2048, 768, 128, 8, 16

    def empty(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, device="meta", dtype=dtype)

    def packed(O: int, I: int) -> Any:
        values = [empty(E, *size, dtype=fp8.DTYPE) for size in ((O, I), (I, O))]
        scales = [empty(E, v.shape[1] // 128, v.shape[2] // 128, dtype=SCALE) for v in values]
        own = scales[0], values[1], scales[1]
        return PackedWeight("fp8", values[0], own, dtype, in_fp8=True)

    x_TD, u_NR = empty(T, D), empty(T * K, R)
    tiles = RowTiles(plan.build_plan(empty(T, K, dtype=torch.int64), E))
    w = ExpertWeights(packed(2 * F, D), packed(D, F))
    made = fp8_products(tiles, x_TD, w, Glu("silu"), device_of(x_TD))
    if made is None:
        return
    made.up(None, save_h=False, save_a=False)
    h_NH, _ = made.up((u_NR, empty(E, 2 * F, R)), save_h=True, save_a=True)
    made.down((u_NR, empty(E, D, R)))
    made.hidden_gradients(
        x_TD, empty(T, K, dtype=SCALE), h_NH, (u_NR, empty(E, R, F)), wa=True, overwrite_h=False
    )
    made.input_gradient((u_NR, empty(E, R, D).transpose(1, 2)))


def launch_decoding(w: PackedWeight, tiles: RowTiles) -> None:
    """Launch decoding in front of the product, wherever a call of this Triton could choose it."""
    E, O, I = w.shape
    inputs = torch.empty(tiles.count, I, device="meta", dtype=w.dtype)
    low_rank = inputs[:, :16].contiguous(), torch.empty(E, O, 16, device="meta", dtype=w.dtype)
    for mean in (1, 256):
        with mock.patch.object(packed_linear, "_MOST_ROWS", {w.storage: mean}):
            tile = packed_linear.decoding_tile(w, w.dtype, device_of(inputs), mean * E)
        if tile is not None:
            result = torch.float32 if w.transposed else w.dtype
            packed_linear.packed_linear(
                inputs, tiles.rows(tile.m), w, None, tile, low_rank=low_rank, dtype=result
            )
