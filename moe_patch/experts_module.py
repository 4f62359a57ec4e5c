"""Reading transformers' experts modules: weights, adapters and activation, at call time.

The layout flags (``is_transposed``, ``is_concatenated``, ``has_gate``, ``has_bias``) are set on the
instance by transformers' own decorator, so no family entry repeats them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_patch.errors import UnsupportedModelError
from moe_patch.families.spec import GluRule, read
from moe_patch.lora import HANDED_DOWN, live_factors, to_lora
from moe_patch.types import ExpertWeights, Glu, Lora

_ACT_FN = GluRule("act_fn")


class ExpertTensors(NamedTuple):
    """What the experts operator needs from a module, in one compute dtype."""

    weights: ExpertWeights
    lora13: Lora | None
    lora2: Lora | None


def up_name(experts: nn.Module) -> str:
    """The name of the up projection's parameter."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def read_tensors(experts: nn.Module, dtype: torch.dtype, fuse_lora: bool) -> ExpertTensors:
    """Weights, biases and low-rank factors of an experts module.

    Args:
        experts: the live module; parametrizations and handed-down factors are honoured.
        dtype: compute dtype; tensors in another dtype are cast (their gradients are cast back).
        fuse_lora: read factors instead of PEFT's merged weight.
    """
    w13, lora13 = _projection(experts, up_name(experts), dtype, fuse_lora)
    w2, lora2 = _projection(experts, "down_proj", dtype, fuse_lora)
    b13 = b2 = None
    if experts.has_bias:
        b13 = getattr(experts, f"{up_name(experts)}_bias").to(dtype)
        b2 = experts.down_proj_bias.to(dtype)
    return ExpertTensors(ExpertWeights(w13, w2, b13, b2), lora13, lora2)


def _projection(
    experts: nn.Module, name: str, dtype: torch.dtype, fuse_lora: bool
) -> tuple[Tensor, Lora | None]:
    handed_down = experts.__dict__.get(HANDED_DOWN, {})
    live = live_factors(experts, name) if fuse_lora else None
    weight, factors = live if live is not None else (getattr(experts, name), handed_down.get(name, []))
    w_EOI = weight.mT if experts.is_transposed else weight
    lora = to_lora(factors, w_EOI, experts.is_transposed, dtype, f"{type(experts).__name__}.{name}")
    return w_EOI.to(dtype), lora


def read_glu(experts: nn.Module, rule: GluRule | None) -> Glu | None:
    """The experts' activation as a Glu, or None when it is none that the kernels know.

    ``act_fn`` is looked at on every call, so that replacing it on the instance is followed.
    """
    if "_apply_gate" in experts.__dict__:
        return None
    if rule is None:
        from transformers.integrations.moe import _default_apply_gate

        if experts.has_gate and type(experts)._apply_gate is not _default_apply_gate:
            return None
        rule = _ACT_FN
    kind = rule.kind
    if kind == "act_fn":
        if not hasattr(experts, "act_fn"):
            return None
        kind = activation_kind(experts.act_fn)
        if kind is None:
            return None
    return Glu(
        kind,
        gated=experts.has_gate,
        interleaved=not experts.is_concatenated,
        alpha=float(read(experts, rule.alpha)),
        limit=_limit(read(experts, rule.limit)),
    )


def _limit(value: float | None) -> float:
    return float("inf") if value is None else float(value)


def activation_kind(act_fn: object) -> str | None:
    """The Glu kind of an activation object, by exact type; None if it is none that we know."""
    from transformers import activations

    if isinstance(act_fn, nn.Module) and ("forward" in act_fn.__dict__ or act_fn._forward_hooks):
        return None
    if type(act_fn) is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}[act_fn.approximate]
    kinds = {
        nn.SiLU: "silu",
        activations.SiLUActivation: "silu",
        activations.GELUActivation: "gelu",
        activations.GELUTanh: "gelu_tanh",
        activations.NewGELUActivation: "gelu_tanh",
        nn.ReLU: "relu",
        activations.ReLUSquaredActivation: "relu2",
    }
    return kinds.get(type(act_fn))


def compute_dtype(experts: nn.Module, device_type: str) -> torch.dtype:
    """Autocast's dtype where autocast is on, else that of the expert weights."""
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    live = live_factors(experts, up_name(experts))
    weight = getattr(experts, up_name(experts)) if live is None else live[0]
    return weight.dtype


def require_glu(experts: nn.Module, rule: GluRule | None, path: str) -> Glu:
    """:func:`read_glu`, or an error that names the activation.

    Raises:
        UnsupportedModelError: the activation is none that the kernels know.
    """
    glu = read_glu(experts, rule)
    if glu is None:
        act = type(experts.act_fn).__name__ if hasattr(experts, "act_fn") else "a gate of its own"
        raise UnsupportedModelError(
            f"{path} ({type(experts).__name__}): activation {act} is not known; accepted: "
            f"{', '.join(Glu.KINDS)} through act_fn, or a family entry with a GluRule"
        )
    return glu


