"""The way without own kernels: dequantise the stacked experts, then run split LoRA over them.

Both projections share a buffer for the dequantised stack, in forward and again in backward. NF4
uses bitsandbytes' own kernel (from the peers folder, see scripts/peers.sh), FP8 a cast and a scale
in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench_lib.impls.torch_grouped import sort_rows, weighted_activation
from bench_lib.quantised import QuantInputs
from bench_lib.shapes import Point
from bench_lib.spec import Impl, Program
from moe_patch.formats import fp8
from moe_patch.formats.packed import PackedWeight

Dequantise = Callable[[], Tensor]


class _FrozenProduct(torch.autograd.Function):
    """x W; W is dequantised in forward, and again in backward."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, dequantise: Dequantise, ends_E: Tensor) -> Tensor:
        ctx.dequantise = dequantise
        ctx.save_for_backward(ends_E)
        return functional.grouped_mm(x_NI, dequantise().transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor, None, None]:
        (ends_E,) = ctx.saved_tensors
        return functional.grouped_mm(dy_NO, ctx.dequantise(), offs=ends_E), None, None


def nf4_into(weight: PackedWeight, buffer: Tensor) -> Dequantise:
    """Run bitsandbytes' kernel on the packed bytes, whose format is its own."""
    from bitsandbytes import functional as bnb

    absmax, nested, code, offset, levels = weight.scales
    state = bnb.QuantState(
        absmax=absmax, shape=torch.Size(weight.stored_shape), code=levels, blocksize=64,
        quant_type="nf4", dtype=buffer.dtype, offset=offset,
        state2=bnb.QuantState(
            absmax=nested.view(-1), blocksize=256, code=code, dtype=torch.float32
        ),
    )  # fmt: skip
    packed = weight.packed.view(-1, 1)
    return lambda: bnb.dequantize_4bit(packed, state, out=buffer)


def fp8_into(weight: PackedWeight, buffer: Tensor) -> Dequantise:
    """Cast, and multiply by each block's scale in place."""
    E, rows, columns = weight.stored_shape
    B = fp8.BLOCK
    blocks = buffer.view(E, rows // B, B, columns // B, B)
    scales = weight.scales[0][:, :, None, :, None]

    def run() -> Tensor:
        buffer.copy_(weight.packed)
        blocks.mul_(scales)
        return buffer

    return run


def adapted(x_NI: Tensor, dequantise: Dequantise, lora: Any, ends_E: Tensor) -> Tensor:
    """Run one projection with its adapter, rows in expert order."""
    base_NO = _FrozenProduct.apply(x_NI, dequantise, ends_E)
    p_NR = functional.grouped_mm(x_NI, lora.A_ERI.transpose(1, 2), offs=ends_E)
    return base_NO + lora.scaling * functional.grouped_mm(
        p_NR, lora.B_EOR.transpose(1, 2), offs=ends_E
    )


def layer(inputs: QuantInputs, up: Dequantise, down: Dequantise) -> Tensor:
    """Return the adapted experts' weighted sum."""
    T, K = inputs.ids_TK.shape
    order_N, inverse_N, ends_E = sort_rows(inputs.ids_TK, inputs.w13_EHD.shape[0])
    h_NH = adapted(inputs.x_TD[order_N // K], up, inputs.lora13, ends_E)
    a_NF = weighted_activation(h_NH, inputs.weights_TK, order_N)
    y_ND = adapted(a_NF, down, inputs.lora2, ends_E)
    return y_ND[inverse_N].view(T, K, -1).sum(dim=1)


def build(inputs: QuantInputs, point: Point) -> Program:
    """Build the layer on the op's packed weights."""
    shapes = [inputs.w13_EHD.shape, inputs.w2_EDF.shape]
    room = torch.empty(
        max(shape.numel() for shape in shapes), dtype=point.torch_dtype, device=inputs.x_TD.device
    )
    into = {"nf4": nf4_into, "fp8": fp8_into}[point.dtype]
    up, down = (
        into(packed, room[: shape.numel()].view(shape))
        for packed, shape in zip((inputs.packed13, inputs.packed2), shapes, strict=True)
    )
    return Program(partial(layer, inputs, up, down), inputs.leaves())


def why_not(point: Point, device: torch.device) -> str | None:
    """Return bitsandbytes' own limit, if it applies."""
    if point.dtype == "nf4" and device.type != "cuda":
        return f"bitsandbytes decodes into a given buffer on CUDA devices only, this is {device}"
    return None


DEQUANT = Impl(
    "dequant_grouped_mm", build, peer=True, why_not=why_not,
    covers=lambda point: point.dtype in ("nf4", "fp8"),
)  # fmt: skip
