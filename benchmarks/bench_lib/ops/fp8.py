"""Op ``fp8``: LoRA on experts stored in FP8: decoded, or multiplied in FP8, beside bf16.

All read the same values, so the reference is the layer with the dequantised weights. The limit is
that of quantising rows: 5%.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from bench_lib import moe_layer, quantised
from bench_lib.impls.ours import MODULES
from bench_lib.moe_layer import GLU
from bench_lib.ops import lora
from bench_lib.ops.quantised import work
from bench_lib.quantised import QuantInputs
from bench_lib.shapes import Point
from bench_lib.spec import Impl, Program


def build(inputs: QuantInputs, point: Point, *, compute: str | None = None) -> Program:
    """Build ``experts_mlp`` on bf16 weights, or with ``compute`` on the packed ones."""
    from moe_patch.ops.experts.op import experts_mlp
    from moe_patch.runtime.fp8 import Copies, in_fp8
    from moe_patch.types import ExpertWeights

    w = ExpertWeights(inputs.w13_EHD, inputs.w2_EDF)
    if compute is not None and inputs.packed13 is not None:
        packed: Any = inputs.packed13, inputs.packed2
        copies = Copies() if point.backward else None
        w = in_fp8(ExpertWeights(*packed), compute, copies, inputs.x_TD, GLU)
    forward = partial(
        experts_mlp, inputs.x_TD, inputs.ids_TK, inputs.weights_TK, w, GLU,
        lora13=inputs.lora13, lora2=inputs.lora2,
    )  # fmt: skip
    return Program(forward, inputs.leaves())


def _impl(name: str, compute: str | None) -> Impl:
    return Impl(
        f"moe_patch{name}", partial(build, compute=compute), ours=True,
        compiles="once", modules=(*MODULES, "moe_patch.runtime.fp8"),
    )  # fmt: skip


FP8 = dataclasses.replace(
    lora.LORA,
    name="fp8",
    shapes=("qwen3_30b", "glm45_air", "dsv3_e64"),
    tokens=(4096, 16384),
    ranks=(16,),
    passes=("fwd", "fwd+bwd"),
    dtypes=("fp8",),
    dry_shape="tiny128",
    impls=(
        _impl("", None), _impl(":fp8_stored", "decoded"), _impl(":fp8", "fp8"),
        _impl(":fp8_copy", "fp8_copy"),
    ),
    required=(),
    make_inputs=quantised.make_inputs,
    limits=moe_layer.LIMITS | {"fp8": 5e-2},
    work=work,
    input_bytes=lambda point: moe_layer.layer_input_bytes(point) + quantised.weight_bytes(point),
)  # fmt: skip
