"""Comparison of the FP8 products with their definition, for the self-tests on a Hopper card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moe_patch.formats.packed import PackedWeight, pack
from moe_patch.ops.backend import capability_of, choose_backend
from moe_patch.ops.experts import definition
from moe_patch.ops.experts.fp8_definition import Fp8Experts
from moe_patch.ops.experts.op import experts_mlp
from moe_patch.runtime.fp8 import FP8_COPY, Copies, in_fp8
from moe_patch.tools.selftest_checks import Group, Layer
from moe_patch.types import ExpertWeights, Lora

IN_FP8 = "fp8 products"


def fp8_groups(device: torch.device) -> Iterator[Group]:
    """Yield the checks of FP8 products; none on a device or Triton on which experts decode."""
    if choose_backend("auto", device, torch.bfloat16).name != "triton":
        return
    if torch.version.hip is not None or capability_of(device) != (9, 0):
        return
    from moe_patch.kernels.common.versions import why_no_fp8

    if not why_no_fp8():
        layer, name = Fp8Layer(device, torch.bfloat16, 200), f"experts bf16 {IN_FP8}"
        yield [(name, layer.check), (f"{name} bit-identical", layer.repeats)]


class Fp8Layer(Layer):
    """A layer over frozen experts in FP8, with transposed copies and adapters."""

    def __init__(self, device: torch.device, dtype: torch.dtype, tokens: int) -> None:
        super().__init__(device, dtype, tokens, rank=16)
        self.D, self.F = 384, 256

    def inputs(self) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Make inputs as a layer does; weights are packed and kept apart from trained tensors."""
        tensors, ids_TK, grad_TD = super().inputs()
        packed: list[Any] = [
            pack(tensors.pop(name).detach(), "fp8", self.device, name) for name in ("w13", "w2")
        ]
        self._w = ExpertWeights(*packed)
        return tensors, ids_TK, grad_TD

    def results(
        self, tensors: dict[str, Tensor], ids_TK: Tensor, grad_TD: Tensor
    ) -> dict[str, Tensor]:
        """Compute output and gradients with FP8 products, forward and backward."""
        w = in_fp8(self._w, FP8_COPY, Copies(), tensors["x"], self.glu)
        lora13, lora2 = _loras(tensors)
        out = experts_mlp(
            tensors["x"], ids_TK, tensors["weights"], w, self.glu, lora13=lora13, lora2=lora2
        )
        grads = torch.autograd.grad(out, list(tensors.values()), grad_TD)
        return {"out": out.detach()} | dict(zip(tensors, grads, strict=True))

    def reference(
        self, tensors: dict[str, Tensor], ids_TK: Tensor, grad_TD: Tensor
    ) -> dict[str, Tensor]:
        """Compute output and gradients by the definition, in the dtype of the tensors."""
        t = {name: tensor.detach() for name, tensor in tensors.items()}
        w13: Any = self._w.w13_EHD
        w2: Any = self._w.w2_EDF
        assert isinstance(w13, PackedWeight)
        plan = definition.build_plan(ids_TK, self.E)
        experts = Fp8Experts(plan, w13, w2, self.glu, *_loras(t))
        rows = experts.forward(t["x"], t["weights"])
        found = experts.backward(grad_TD.to(t["x"].dtype), t["x"], t["weights"], rows)
        gradients = zip(("x", "weights", "a13", "lb13", "a2", "lb2"), found, strict=True)
        return {"out": rows.out_TD} | {name: g for name, g in gradients if g is not None}


def _loras(tensors: dict[str, Tensor]) -> tuple[Lora, Lora]:
    t = tensors
    return Lora(t["a13"], t["lb13"], 0.5), Lora(t["a2"], t["lb2"], 2.0)
