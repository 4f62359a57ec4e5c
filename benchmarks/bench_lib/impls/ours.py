"""Implement the op with moe_patch itself: the backend that it would choose, and its options."""

from __future__ import annotations

import atexit
import contextlib
from functools import partial

from bench_lib.moe_layer import GLU, LayerInputs
from bench_lib.shapes import Point
from bench_lib.spec import Impl, Program

# Contexts entered here stay open until the process ends.
_FOR_THE_PROCESS = contextlib.ExitStack()
atexit.register(_FOR_THE_PROCESS.close)
MODULES = ("moe_patch.ops.experts.op", "moe_patch.kernels.experts.experts")


def build(
    inputs: LayerInputs,
    point: Point,
    *,
    backend: str = "auto",
    recompute: bool = False,
    batch_invariant: bool = False,
) -> Program:
    """Build ``moe_patch.ops.experts.op.experts_mlp`` on the op's own tensors."""
    from moe_patch.ops.experts.op import experts_mlp
    from moe_patch.types import ExpertWeights

    w = ExpertWeights(inputs.w13_EHD, inputs.w2_EDF)
    forward = partial(
        experts_mlp, inputs.x_TD, inputs.ids_TK, inputs.weights_TK, w, GLU,
        lora13=inputs.lora13, lora2=inputs.lora2, backend=backend, recompute=recompute,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    return Program(forward, inputs.leaves())


def build_portable(inputs: LayerInputs, point: Point) -> Program:
    """Build the kernels of cards without Hopper's instructions. Needs a process of its own."""
    from moe_patch.kernels.common.versions import PORTABLE, opened

    _FOR_THE_PROCESS.enter_context(opened(PORTABLE))
    return build(inputs, point)


def _covers_adapters(point: Point) -> bool:
    return point.R is not None


BATCH_INVARIANT = Impl(
    "moe_patch:batch_invariant",
    partial(build, batch_invariant=True),
    ours=True,
    needs_cuda=True,
    compiles="once",
    modules=MODULES,
)
# A peer, because the gates that it closes stay closed in its process.
PORTABLE = Impl(
    "moe_patch:portable", build_portable, ours=True, peer=True, needs_cuda=True, compiles="once"
)
EXPERTS_IMPLS = (
    Impl("moe_patch", build, ours=True, compiles="once", modules=MODULES),
    Impl("moe_patch:torch", partial(build, backend="torch"), ours=True),
    Impl("moe_patch:recompute", partial(build, recompute=True), ours=True),
    BATCH_INVARIANT,
    PORTABLE,
)
LORA_IMPLS = (
    *EXPERTS_IMPLS[:2],
    Impl("moe_patch:recompute", partial(build, recompute=True), ours=True, covers=_covers_adapters),
    PORTABLE,
)
