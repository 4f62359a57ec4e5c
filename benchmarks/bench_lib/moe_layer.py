"""Inputs and the fp64 check of the ops that run one layer's experts (experts, lora, decode).

The check covers the whole size without an fp64 copy of the whole problem. Results per token
(output, dx, dweights) are checked on a sample of tokens with all experts. Results per expert (dW
and the factors' gradients) are checked on a sample of experts with all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench_lib.shapes import Point
from bench_lib.spec import Grads
from moe_patch.ops.experts import definition as reference
from moe_patch.types import ExpertWeights, Glu, Lora

GLU = Glu("silu")
SEED = 2026
SAMPLED_TOKENS = 256
SAMPLED_EXPERTS = 2
LORA_SCALING = 2.0
FACTORS = ("a13", "b13", "a2", "b2")


@dataclass(frozen=True)
class LayerInputs:
    """One layer's tensors. Values are about one in size, so that relative errors mean something.

    Attributes:
        x_TD, ids_TK, weights_TK: hidden states, int64 ids (k distinct ones, uniform), weights.
        w13_EHD, w2_EDF: the experts, concatenated gate and up.
        dout_TD: the gradient that backward starts from.
        factors: A and B of both projections in logical layout, or empty without adapters.
        trained: names of the leaves that need a gradient.
    """

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    w13_EHD: Tensor
    w2_EDF: Tensor
    dout_TD: Tensor
    factors: dict[str, Tensor]
    trained: tuple[str, ...]

    @property
    def lora13(self) -> Lora | None:
        return (
            Lora(self.factors["a13"], self.factors["b13"], LORA_SCALING) if self.factors else None
        )

    @property
    def lora2(self) -> Lora | None:
        return Lora(self.factors["a2"], self.factors["b2"], LORA_SCALING) if self.factors else None

    def tensors(self) -> dict[str, Tensor]:
        """Return every floating-point input by its leaf name."""
        named = {"x": self.x_TD, "weights": self.weights_TK, "w13": self.w13_EHD, "w2": self.w2_EDF}
        return named | self.factors

    def leaves(self) -> dict[str, Tensor]:
        """Return the inputs that need a gradient."""
        return {name: t for name, t in self.tensors().items() if name in self.trained}


def make_layer(point: Point, device: torch.device, *, train_base: bool) -> LayerInputs:
    """Return random inputs for a point, the same on every call.

    Args:
        point: sizes, dtype and rank.
        device: device of the tensors.
        train_base: whether w13 and w2 need gradients.
    """
    s, R = point.sizes, point.R
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(*size: int, fan_in: int = 1) -> Tensor:
        values = torch.randn(size, generator=generator, device=device, dtype=point.torch_dtype)
        return values.mul_(fan_in**-0.5)

    factors = {}
    if R is not None:
        factors = {
            "a13": normal(s.E, R, s.D, fan_in=s.D),
            "b13": normal(s.E, 2 * s.F, R, fan_in=R),
            "a2": normal(s.E, R, s.F, fan_in=s.F),
            "b2": normal(s.E, s.D, R, fan_in=R),
        }
    scores_TE = torch.rand(point.T, s.E, generator=generator, device=device)
    chosen_TK = torch.softmax(torch.rand(point.T, s.K, generator=generator, device=device), -1)
    inputs = LayerInputs(
        x_TD=normal(point.T, s.D),
        ids_TK=scores_TE.topk(s.K).indices,
        weights_TK=chosen_TK.to(point.torch_dtype),
        w13_EHD=normal(s.E, 2 * s.F, s.D, fan_in=s.D),
        w2_EDF=normal(s.E, s.D, s.F, fan_in=s.F),
        dout_TD=normal(point.T, s.D),
        factors=factors,
        trained=("x", "weights", *(("w13", "w2") if train_base else ()), *factors),
    )
    for leaf in inputs.leaves().values():
        leaf.requires_grad_()
    return inputs


@dataclass(frozen=True)
class Expected:
    """fp64 values: ``by_token`` on the rows ``tokens``, ``by_expert`` on ``experts``."""

    tokens: Tensor
    experts: Tensor
    by_token: dict[str, Tensor]
    by_expert: dict[str, Tensor]


def _evaluate(
    inputs: LayerInputs, ids_TK: Tensor, tokens: Tensor, experts: Tensor, names: tuple[str, ...]
) -> tuple[Tensor, Grads]:
    """Return output and gradients of ``names`` in fp64 on some tokens and some experts."""
    named = inputs.tensors()
    rows = {name: tokens if name in ("x", "weights") else experts for name in named}
    wide = {n: t.detach()[rows[n]].double().requires_grad_(n in names) for n, t in named.items()}
    w = ExpertWeights(wide["w13"], wide["w2"])
    lora13 = lora2 = None
    if inputs.factors:
        lora13 = Lora(wide["a13"], wide["b13"], LORA_SCALING)
        lora2 = Lora(wide["a2"], wide["b2"], LORA_SCALING)
    out = reference.experts(wide["x"], ids_TK, wide["weights"], w, GLU, lora13, lora2)
    if not names:
        return out, {}
    dout = inputs.dout_TD[tokens].double()
    grads = torch.autograd.grad(out, [wide[name] for name in names], dout)
    return out.detach(), dict(zip(names, grads, strict=True))


def layer_reference(point: Point, inputs: LayerInputs) -> Expected:
    """Return correct results, on the sampled tokens and experts."""
    T, E = point.T, point.sizes.E
    device = inputs.x_TD.device
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randperm(T, generator=generator)[:SAMPLED_TOKENS].to(device)
    experts = torch.randperm(E, generator=generator)[:SAMPLED_EXPERTS].to(device)
    all_tokens = torch.arange(T, device=device)
    all_experts = torch.arange(E, device=device)

    token_names = tuple(name for name in ("x", "weights") if name in inputs.trained)
    out, by_token = _evaluate(inputs, inputs.ids_TK[tokens], tokens, all_experts, token_names)
    expert_names = tuple(name for name in inputs.trained if name not in token_names)
    by_expert: Grads = {}
    if expert_names:
        local_E = torch.full((E,), -1, device=device)
        local_E[experts] = torch.arange(len(experts), device=device)
        _, by_expert = _evaluate(inputs, local_E[inputs.ids_TK], all_tokens, experts, expert_names)
    return Expected(tokens, experts, {"out": out.detach(), **by_token}, by_expert)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return norm(found - expected) / norm(expected), in fp64."""
    return float((found.double() - expected).norm() / expected.norm())


def compare_layer(point: Point, expected: Expected, out: Tensor, grads: Grads) -> float:
    """Return the largest relative error of the output and of each existing gradient."""
    found = {"out": out, **grads}
    names = ("out", *grads)
    errors = []
    for name in names:
        if name in expected.by_token:
            errors.append(relative_error(found[name][expected.tokens], expected.by_token[name]))
        else:
            errors.append(relative_error(found[name][expected.experts], expected.by_expert[name]))
    return max(errors, key=lambda error: float("inf") if error != error else error)


# bf16 and fp16: all measured peers lie below these limits; fp32: even tf32 would fail this one.
LIMITS = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-5}


def itemsize(point: Point) -> int:
    """Return the bytes of one element of the point's dtype."""
    return point.torch_dtype.itemsize


def layer_input_bytes(point: Point) -> int:
    """Return the bytes of x, ids, weights, dout, the experts and the adapters."""
    s, R = point.sizes, point.R or 0
    floats = 2 * point.T * s.D + point.rows + 3 * s.E * s.D * s.F
    factors = s.E * R * (2 * s.D + 3 * s.F)
    return itemsize(point) * (floats + factors) + 8 * point.rows
