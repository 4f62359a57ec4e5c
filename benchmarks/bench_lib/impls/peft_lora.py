"""PEFT's own LoRA on 3-D expert parameters (target_parameters) over transformers' grouped_mm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from bench_lib.impls.hf import MODULES, experts_module
from bench_lib.moe_layer import LORA_SCALING, LayerInputs
from bench_lib.shapes import Point
from bench_lib.spec import Impl, Program

# The adapted parameter, and the names of its factors in the op.
FACTORS = {"gate_up_proj": ("a13", "b13"), "down_proj": ("a2", "b2")}


class _Block(nn.Module):
    """The smallest module in which PEFT can find a parameter called experts.*."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self.experts(x_TD, ids_TK, weights_TK)


def to_b(b_EOR: Tensor) -> Tensor:
    """Reshape [E, out, R] -> [out, R * E], rank-major columns."""
    return b_EOR.permute(1, 2, 0).flatten(1, 2)


def from_a(grad: Tensor, E: int) -> Tensor:
    """Reshape a gradient of A back to [E, R, in]."""
    return grad.view(E, -1, grad.shape[1])


def from_b(grad: Tensor, E: int) -> Tensor:
    """Reshape a gradient of B back to [E, out, R]."""
    return grad.view(grad.shape[0], -1, E).permute(2, 0, 1)


def set_factors(
    wrapper: Any, inputs: LayerInputs, E: int
) -> tuple[dict[str, Tensor], dict[str, Callable[[Tensor], Tensor]]]:
    """Copy the op's values into PEFT's wrappers; return factors by name, and the way back.

    Args:
        wrapper: the outermost of the wrappers around the experts.
        inputs: inputs with the factors.
        E: experts.
    """
    leaves: dict[str, Tensor] = {}
    canonical: dict[str, Callable[[Tensor], Tensor]] = {}
    while hasattr(wrapper, "parameter_name"):
        a, b = FACTORS[wrapper.parameter_name]
        leaves[a] = wrapper.lora_A["default"].weight
        leaves[b] = wrapper.lora_B["default"].weight
        leaves[a].data = inputs.factors[a].detach().flatten(0, 1).clone()
        leaves[b].data = to_b(inputs.factors[b].detach()).clone()
        canonical |= {a: partial(from_a, E=E), b: partial(from_b, E=E)}
        wrapper = wrapper.base_layer
    return leaves, canonical


def build(inputs: LayerInputs, point: Point) -> Program:
    """Build a PEFT model around the experts, its factors set to the op's values."""
    from peft import LoraConfig, get_peft_model

    experts = experts_module(inputs, point, "grouped_mm")
    config = LoraConfig(
        r=point.R,
        lora_alpha=LORA_SCALING * point.R,
        target_modules=[],
        target_parameters=[f"experts.{name}" for name in FACTORS],
    )
    model = get_peft_model(_Block(experts), config, autocast_adapter_dtype=False)
    factors, canonical = set_factors(model.base_model.model.experts, inputs, point.sizes.E)
    leaves = {"x": inputs.x_TD, "weights": inputs.weights_TK} | factors
    forward = partial(model, inputs.x_TD, inputs.ids_TK, inputs.weights_TK)
    return Program(forward, {name: leaves[name] for name in inputs.trained}, canonical)


PEFT = Impl("peft", build, covers=lambda point: point.R is not None, modules=(*MODULES, "peft"))
