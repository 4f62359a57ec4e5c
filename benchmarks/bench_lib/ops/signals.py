"""Op ``signals``: the cost of recording the per-token, per-expert norms beside the experts.

``moe_patch`` records as ``moe_patch.record`` does for a layer; ``moe_patch:off`` does not.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from torch import Tensor

from bench_lib.impls.ours import MODULES
from bench_lib.moe_layer import GLU, LayerInputs
from bench_lib.ops.experts import EXPERTS
from bench_lib.shapes import Point
from bench_lib.spec import Impl, Program


def build(inputs: LayerInputs, point: Point, *, recording: bool) -> Program:
    """Build the experts as a patched layer calls them."""
    from moe_patch.ops.experts.op import experts_mlp
    from moe_patch.runtime.taps import LayerSignals
    from moe_patch.types import ExpertWeights

    w = ExpertWeights(inputs.w13_EHD, inputs.w2_EDF)
    x_TD, ids_TK, weights_TK = inputs.x_TD, inputs.ids_TK, inputs.weights_TK

    def forward() -> Tensor:
        signals = None
        if recording:
            layer = LayerSignals("layer")
            signals = layer.begin(
                x_TD, ids_TK, weights_TK, experts=point.sizes.E, has_lora=False, fused=True
            )
        return experts_mlp(x_TD, ids_TK, weights_TK, w, GLU, signals=signals)

    return Program(forward, inputs.leaves())


SIGNALS = dataclasses.replace(
    EXPERTS,
    name="signals",
    shapes=("qwen3_30b",),
    tokens=(16384,),
    impls=tuple(
        Impl(name, partial(build, recording=on), ours=True, compiles="once", modules=MODULES)
        for name, on in (("moe_patch", True), ("moe_patch:off", False))
    ),
    required=(),
)
