"""Op ``experts``: one MoE layer's experts with given routing, every parameter trained.

FLOPs: 2 per multiply-add, 3 products of D x F per row forward, twice that again backward.
"""

from __future__ import annotations

import torch

from bench_lib import moe_layer
from bench_lib.impls.hf import HF_IMPLS
from bench_lib.impls.liger import LIGER
from bench_lib.impls.ours import EXPERTS_IMPLS
from bench_lib.impls.scattermoe import SCATTERMOE
from bench_lib.impls.sonicmoe import SONICMOE
from bench_lib.impls.torch_grouped import TORCH_GROUPED_MM_EARLY
from bench_lib.shapes import Point
from bench_lib.spec import Op, Work


def make_inputs(point: Point, device: torch.device) -> moe_layer.LayerInputs:
    """Return random inputs, all trained."""
    return moe_layer.make_layer(point, device, train_base=True)


def forward_matmuls(point: Point) -> tuple[tuple[int, int, int, int], ...]:
    """Return (batch, m, k, n) of the up and down products with equal rows per expert."""
    s = point.sizes
    rows = -(-point.rows // s.E)
    return (s.E, rows, s.D, 2 * s.F), (s.E, rows, s.F, s.D)


def data_gradient_matmuls(point: Point) -> tuple[tuple[int, int, int, int], ...]:
    """Return the two products that carry the gradient back through both projections."""
    s = point.sizes
    rows = -(-point.rows // s.E)
    return (s.E, rows, 2 * s.F, s.D), (s.E, rows, s.D, s.F)


def weight_gradient_matmuls(point: Point) -> tuple[tuple[int, int, int, int], ...]:
    """Return the two products that give dW13 and dW2."""
    s = point.sizes
    rows = -(-point.rows // s.E)
    return (s.E, 2 * s.F, rows, s.D), (s.E, s.D, rows, s.F)


def work(point: Point) -> Work:
    """Return the work of forward, with backward also of all gradients."""
    s, size = point.sizes, moe_layer.itemsize(point)
    tokens = point.T * s.D * size
    routing = point.rows * (8 + size)
    experts = 3 * s.E * s.D * s.F * size
    flops = 6 * point.rows * s.D * s.F
    if not point.backward:
        return Work(flops, 2 * tokens + routing + experts, forward_matmuls(point))
    moved = 4 * tokens + routing + point.rows * size + 2 * experts
    products = (
        forward_matmuls(point) + data_gradient_matmuls(point) + weight_gradient_matmuls(point)
    )
    return Work(3 * flops, moved, products)


EXPERTS = Op(
    name="experts",
    shapes=("qwen3_30b", "olmoe", "mixtral", "glm45_air", "dsv3_e64"),
    tokens=(4096, 16384, 32768),
    ranks=(None,),
    passes=("fwd", "fwd+bwd"),
    dtypes=("bf16",),
    timer="do_bench",
    grad=True,
    impls=(*EXPERTS_IMPLS, *HF_IMPLS, TORCH_GROUPED_MM_EARLY, SCATTERMOE, SONICMOE, LIGER),
    required=("hf_grouped_mm", "torch_grouped_mm_early", "scattermoe", "sonicmoe"),
    make_inputs=make_inputs,
    reference=moe_layer.layer_reference,
    compare=moe_layer.compare_layer,
    limits=moe_layer.LIMITS,
    work=work,
    input_bytes=moe_layer.layer_input_bytes,
)
