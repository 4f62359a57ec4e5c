"""Op ``lora``: the same layer with a frozen base and rank-R adapters on both projections.

R null is the frozen base alone (forward and dx). Rates count only the base's products, so a row
shows how far adapters fall short of the frozen base.
"""

from __future__ import annotations

import torch

from bench_lib import moe_layer
from bench_lib.impls.axolotl_lora import AXOLOTL_LORA
from bench_lib.impls.ours import LORA_IMPLS
from bench_lib.impls.peft_lora import PEFT
from bench_lib.impls.split_lora import SPLIT_LORA
from bench_lib.ops.experts import data_gradient_matmuls, forward_matmuls
from bench_lib.shapes import Point
from bench_lib.spec import Op, Work


def make_inputs(point: Point, device: torch.device) -> moe_layer.LayerInputs:
    """Return random inputs; x, the routing weights and the factors are trained, experts are not."""
    return moe_layer.make_layer(point, device, train_base=False)


def work(point: Point) -> Work:
    """Return the work of forward, with backward also of x, routing weights and factors."""
    s, size, R = point.sizes, moe_layer.itemsize(point), point.R or 0
    tokens = point.T * s.D * size
    routing = point.rows * (8 + size)
    experts = 3 * s.E * s.D * s.F * size
    factors = s.E * R * (2 * s.D + 3 * s.F) * size
    flops = 6 * point.rows * s.D * s.F
    if not point.backward:
        return Work(flops, 2 * tokens + routing + experts + factors, forward_matmuls(point))
    moved = 4 * tokens + routing + point.rows * size + experts + 2 * factors
    return Work(2 * flops, moved, forward_matmuls(point) + data_gradient_matmuls(point))


LORA = Op(
    name="lora",
    shapes=("qwen3_30b", "olmoe", "mixtral", "glm45_air"),
    tokens=(4096, 16384),
    ranks=(None, 16),
    passes=("fwd", "fwd+bwd"),
    dtypes=("bf16",),
    timer="do_bench",
    grad=True,
    impls=(*LORA_IMPLS, PEFT, SPLIT_LORA, AXOLOTL_LORA),
    required=("peft", "axolotl_lora", "split_lora"),
    make_inputs=make_inputs,
    reference=moe_layer.layer_reference,
    compare=moe_layer.compare_layer,
    limits=moe_layer.LIMITS,
    work=work,
    input_bytes=moe_layer.layer_input_bytes,
)
