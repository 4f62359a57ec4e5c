"""Op ``model``: one LoRA training step of twelve layers of Qwen3-30B-A3B in HF Trainer.

Unpatched with PEFT (``peft``) and patched runs use the very same model object. A row's ``rel_err``
compares the first step with that of the unpatched model: the loss, and the norms of all adapters'
gradients as one vector. Runs with Liger or with axolotl's experts have a process of their own,
because what those change in a process stays changed.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench_lib import clocks
from bench_lib.impls import axolotl_experts
from bench_lib.measure import Settings, WrongResultError
from bench_lib.moe_layer import relative_error
from bench_lib.shapes import SHAPES, Point
from bench_lib.spec import Impl, Op, Program, Work

LIMITS = {"bf16": 2e-2, "fp32": 1e-5}
PATCHED = "moe_patch"
LIGER = {"peft_liger", "moe_patch:liger"}
UNPATCHED = {"peft", "peft_liger"}
# What is trained first in the process of an implementation that has one of its own.
REFERENCE = {"moe_patch:liger": "peft_liger", axolotl_experts.NAME: "peft"}
MODULES = (
    "transformers.models.qwen3_moe.modeling_qwen3_moe", "transformers.trainer", "peft", "moe_patch",
    "accelerate",
)  # fmt: skip


def layout(shape: str) -> tuple[int, int, bool]:
    """Return (sequences, their length, gradient checkpointing) from a shape's name."""
    if shape == "tiny":
        return 2, 8, False
    *_, batch, last = shape.removesuffix("_ckpt").replace("x", "_").split("_")
    return int(batch), int(last), shape.endswith("_ckpt")


class _State:
    """The model and the unpatched first steps: built once, shared by all rows of the process."""

    def __init__(self) -> None:
        self.model: Any = None
        self.first: dict[str, Tensor] = {}

    def model_on(self, point: Point, device: torch.device) -> Any:
        from bench_lib import training

        if self.model is None:
            layers = 2 if point.shape == "tiny" else training.LAYERS
            self.model = training.build_model(point.sizes, device, layers)
        return self.model


_STATE = _State()


def _train(impl: Impl, point: Point, device: torch.device) -> Any:
    from bench_lib import training

    model = _STATE.model_on(point, device)
    training.reset_adapters(model)
    batch, length, checkpointing = layout(point.shape)
    liger = impl.name in LIGER
    with _as(impl, model):
        return training.train(model, batch, length, checkpointing, device, liger)


@contextlib.contextmanager
def _as(impl: Impl, model: Any) -> Iterator[None]:
    """Let an implementation run the model's blocks."""
    from moe_patch import patch_model, unpatch_model

    if impl.ours:
        patch_model(model)
        try:
            yield
        finally:
            unpatch_model(model)
    elif impl.name == axolotl_experts.NAME:
        with axolotl_experts.installed(model):
            yield
    else:
        yield


def _distance(found: Tensor, expected: Tensor) -> float:
    loss = (found[0] - expected[0]).abs() / expected[0].abs()
    return max(loss.item(), relative_error(found[1:], expected[1:]))


def measure(impl: Impl, point: Point, device: torch.device, settings: Settings) -> dict[str, Any]:
    """Return one row.

    Raises:
        WrongResultError: the patched model's first step differs.
    """
    # A training that ran out of memory leaves reference cycles.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if impl.name in REFERENCE:
        peer = MODEL.impl(REFERENCE[impl.name])
        _STATE.first[point.shape] = _train(peer, point, device).first
    with clocks.watched(settings.clocks) as seen:
        steps = _train(impl, point, device)
    error = None
    if impl.name in UNPATCHED:
        _STATE.first[point.shape] = steps.first
    elif point.shape in _STATE.first:
        error = _distance(steps.first, _STATE.first[point.shape])
        if not error <= LIMITS[point.dtype]:
            raise WrongResultError(f"the first step differs by {error:.2e}")
    return {**steps.fields(point.T), "rel_err": error, **seen}


def warm(impl: Impl, point: Point, device: torch.device) -> None:
    """Compile with one layer and a small vocabulary; the kernels are those of the slice."""
    from bench_lib import training

    batch, length, _ = layout(point.shape)
    model = training.build_model(SHAPES[point.shape], device, layers=1, vocab=64)
    ids = torch.zeros(batch, length, dtype=torch.int64, device=device)
    with _as(impl, model), torch.autocast(device.type, torch.bfloat16):
        model(input_ids=ids, labels=ids).loss.backward()


def _not_a_layer(inputs: Any, point: Point) -> Program:
    raise NotImplementedError("op model measures whole trainings")


MODEL = Op(
    name="model",
    shapes=tuple(
        f"qwen3_30b_12L_{batch}{ckpt}" for ckpt in ("", "_ckpt") for batch in ("4x4096", "1x16384")
    ),
    tokens=(16384,),
    ranks=(16,),
    passes=("fwd+bwd",),
    dtypes=("bf16",),
    timer="steps",
    grad=True,
    impls=(
        Impl("peft", _not_a_layer, modules=MODULES),
        Impl(PATCHED, _not_a_layer, ours=True, compiles="once", modules=MODULES),
        Impl("peft_liger", _not_a_layer, peer=True, needs_cuda=True, modules=MODULES),
        Impl(
            "moe_patch:liger", _not_a_layer, ours=True, peer=True, needs_cuda=True, modules=MODULES
        ),
        Impl(
            axolotl_experts.NAME,
            _not_a_layer,
            peer=True,
            needs_cuda=True,
            compiles="once",
            modules=MODULES,
        ),
    ),
    required=("peft",),
    work=lambda point: Work(None, 0),
    measure=measure,
    warm=warm,
)
