"""Comparisons of the Hopper kernels with the portable ones, for :mod:`moe_patch.tools.trust`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_patch.formats.packed import pack
from moe_patch.ops.experts.op import Signals, experts_mlp
from moe_patch.tools.fp8_checks import IN_FP8, Fp8Layer
from moe_patch.tools.selftest_checks import (
    EAGER_FACTOR,
    FP32_INSIDE,
    GPT_OSS,
    Failed,
    Group,
    Layer,
    distance,
    short,
    tie_routing,
)
from moe_patch.types import ExpertWeights, Glu, Lora

# Rows of an average expert: several row tiles, one wide tile, or one narrow tile.
MANY, WIDE, NARROW = 1200, 200, 40
# Norms are of 16-bit rows; some are taken before rounding and some after.
NORMS, NORMS_LIMIT = ("row norms", "gradient norms"), 2e-2
IN_FRONT = "in front of the product"
Results = dict[str, Tensor]


class Recorded(Layer):
    """A layer whose results include the norms of its rows."""

    def reference(self, tensors: Results, ids_TK: Tensor, grad_TD: Tensor) -> Results:
        """Compute the results with the torch backend."""
        return self._norms(partial(experts_mlp, backend="torch"), tensors, ids_TK, grad_TD)

    def results(self, tensors: Results, ids_TK: Tensor, grad_TD: Tensor) -> Results:
        """Compute the results with the device's own backend."""
        return self._norms(experts_mlp, tensors, ids_TK, grad_TD)

    def _norms(self, function: Any, tensors: Results, ids_TK: Tensor, grad_TD: Tensor) -> Results:
        wide = tensors["x"].dtype == torch.float64
        dtype = torch.float64 if wide else torch.float32
        signals = Signals(torch.zeros(3, *ids_TK.shape, device=self.device, dtype=dtype))
        found = self.run(partial(function, signals=signals), tensors, ids_TK, grad_TD)
        assert signals.act_norm_TK is not None
        return found | dict(zip(NORMS, (signals.act_norm_TK, signals.grads_3TK), strict=True))


class Stored(Layer):
    """A layer over frozen experts in low precision, with adapters."""

    def __init__(self, device: torch.device, dtype: torch.dtype, tokens: int, storage: str) -> None:
        super().__init__(device, dtype, tokens, rank=16)
        self.storage = storage
        self.D, self.F = (320, 128) if device.type == "cuda" else (128, 64)

    def inputs(self) -> tuple[Results, Tensor, Tensor]:
        """Make inputs as a layer does, but with the packed weights' decoded values."""
        tensors, ids_TK, grad_TD = super().inputs()
        self._packed = {}
        for name in ("w13", "w2"):
            packed = pack(tensors[name].detach(), self.storage, self.device, name)
            self._packed[name] = packed
            tensors[name] = packed.experts(0, self.E)
        return tensors, ids_TK, grad_TD

    def results(self, tensors: Results, ids_TK: Tensor, grad_TD: Tensor) -> Results:
        """Compute the results from the packed weights."""
        return self.run(experts_mlp, tensors | self._packed, ids_TK, grad_TD)

    def run(
        self, function: Any, tensors: dict[str, Any], ids_TK: Tensor, grad_TD: Tensor
    ) -> Results:
        """Call the experts, without gradients for their weights."""
        trained = {name: t for name, t in tensors.items() if name not in self._packed}
        w = ExpertWeights(tensors["w13"], tensors["w2"], None, None)
        lora13 = Lora(tensors["a13"], tensors["lb13"], 0.5)
        lora2 = Lora(tensors["a2"], tensors["lb2"], 2.0)
        out = function(
            tensors["x"], ids_TK, tensors["weights"], w, self.glu, lora13=lora13, lora2=lora2
        )
        grads = torch.autograd.grad(out, list(trained.values()), grad_TD.to(out.dtype))
        return {"out": out.detach()} | dict(zip(trained, grads, strict=True))


def groups_of(device: torch.device) -> Iterator[Group]:
    """Yield all comparisons of a device, in order; those of one group run the same kernels."""
    bf16, fp16 = torch.bfloat16, torch.float16
    many = MANY if device.type == "cuda" else NARROW
    for dtype in (bf16, fp16):
        yield [_experts(f"experts {short(dtype)}", Layer(device, dtype, many))]
        yield [_experts(f"experts {short(dtype)} lora", Layer(device, dtype, many, rank=16))]
    yield [_experts("experts bf16 transposed bias", Layer(device, bf16, many, GPT_OSS))]
    yield [_experts("experts bf16 ungated", Layer(device, bf16, WIDE, Glu("relu2", gated=False)))]
    yield [_experts("experts bf16 norms", Recorded(device, bf16, many, rank=16))]
    for storage in ("nf4", "fp8"):
        name = f"experts bf16 {storage}"
        yield [_experts(f"{name} in a buffer", Stored(device, bf16, many, storage))]
        for tokens in (WIDE, NARROW):
            title = f"{name} {IN_FRONT}, {tokens} tokens"
            yield [_experts(title, Stored(device, bf16, tokens, storage), in_front=True)]
    if device.type == "cuda":
        yield [(f"experts bf16 {IN_FP8}", partial(compare_fp8, Fp8Layer(device, bf16, many)))]
    for score in ("softmax", "sigmoid"):
        yield [(f"routing {score} bf16", partial(tie_routing, device, score, bf16))]


def _experts(
    title: str, layer: Layer, *, in_front: bool = False
) -> tuple[str, Callable[[], float]]:
    return title, partial(compare, layer, in_front=in_front)


def compare(layer: Layer, *, in_front: bool) -> float:
    """Return the largest error of the Hopper kernels over its limit.

    Their output and gradients are compared with fp64, with the portable kernels and, bit by bit,
    with repeated runs. The portable kernels may be as far from fp64 themselves.

    Args:
        layer: sizes and inputs.
        in_front: decode packed weights in front of the product.

    Raises:
        Failed: a result is too far away, or differs between two runs.
    """
    from moe_patch.kernels.common.versions import PORTABLE, Gates, opened

    tensors, ids_TK, grad_TD = layer.inputs()
    with opened(Gates(hopper=True, in_front=in_front)):
        ours = layer.repeated(tensors, ids_TK, grad_TD)
    with opened(PORTABLE):
        portable = layer.results(tensors, ids_TK, grad_TD)
    exact = layer.reference(layer.cast(tensors, torch.float64), ids_TK, grad_TD)
    eager = layer.reference(layer.cast(tensors, layer.dtype), ids_TK, grad_TD)
    worst = 0.0
    for name, mine in ours.items():
        theirs = distance(eager[name].to(mine.dtype), exact[name])
        limit = NORMS_LIMIT if name in NORMS else EAGER_FACTOR * theirs + FP32_INSIDE
        to_exact = distance(mine, exact[name]) / limit
        to_portable = distance(mine, portable[name].double()) / (2 * limit)
        for error, other in ((to_exact, "fp64"), (to_portable, "the portable kernels")):
            if not error <= 1.0:
                raise Failed(f"{name} is {error:.2f} times as far from {other} as allowed")
        worst = max(worst, to_exact, to_portable)
    return worst


def compare_fp8(layer: Fp8Layer) -> float:
    """Return the largest error of the FP8 products over its limit, as :func:`compare` does.

    Raises:
        Failed: a result is too far from the definition, or differs between two runs.
    """
    from moe_patch.kernels.common.versions import Gates, opened

    with opened(Gates(hopper=True, in_front=False, fp8=True)):
        layer.repeats()
        return layer.check()
