"""Op ``quantised``: LoRA on experts stored in NF4 or FP8, beside the same layer in bf16.

The reference is the layer with the dequantised weights: this measures the arithmetic, not the loss
of a format.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from bench_lib import moe_layer, quantised
from bench_lib.impls.dequant import DEQUANT
from bench_lib.impls.ours import MODULES
from bench_lib.moe_layer import GLU
from bench_lib.ops import lora
from bench_lib.quantised import QuantInputs
from bench_lib.shapes import Point
from bench_lib.spec import Impl, Program, Work


def build(inputs: QuantInputs, point: Point) -> Program:
    """Build ``moe_patch.ops.experts.op.experts_mlp`` on the packed storage."""
    from moe_patch.ops.experts.op import experts_mlp
    from moe_patch.types import ExpertWeights

    stored = inputs.packed13 or inputs.w13_EHD, inputs.packed2 or inputs.w2_EDF
    forward = partial(
        experts_mlp, inputs.x_TD, inputs.ids_TK, inputs.weights_TK, ExpertWeights(*stored), GLU,
        lora13=inputs.lora13, lora2=inputs.lora2,
    )  # fmt: skip
    return Program(forward, inputs.leaves())


def _saved_weight_bytes(point: Point) -> int:
    s = point.sizes
    return 3 * s.E * s.D * s.F * point.torch_dtype.itemsize - quantised.weight_bytes(point)


def work(point: Point) -> Work:
    """Return the work of op lora, with the experts read in their storage."""
    of_lora = lora.work(point)
    return dataclasses.replace(
        of_lora, moved_bytes=of_lora.moved_bytes - _saved_weight_bytes(point)
    )


QUANTISED = dataclasses.replace(
    lora.LORA,
    name="quantised",
    shapes=("qwen3_30b", "glm45_air"),
    tokens=(4096, 16384),
    ranks=(16,),
    passes=("fwd+bwd",),
    dtypes=("bf16", "nf4", "fp8"),
    dry_shape="tiny128",
    impls=(Impl("moe_patch", build, ours=True, compiles="once", modules=MODULES), DEQUANT),
    required=("dequant_grouped_mm",),
    make_inputs=quantised.make_inputs,
    limits=moe_layer.LIMITS | {"nf4": 2e-2, "fp8": 2e-2},
    work=work,
    input_bytes=lambda point: moe_layer.layer_input_bytes(point) - _saved_weight_bytes(point),
)
