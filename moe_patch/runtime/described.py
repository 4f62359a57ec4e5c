"""Layout and activation of an experts module, read from the module itself.

transformers' decorator sets the layout flags (``is_transposed``, ``is_concatenated``,
``has_gate``, ``has_bias``) on the instance, so family entries do not repeat them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from moe_patch.ops.direct import eagerly_cached
from moe_patch.runtime.spec import FamilySpec, GluRule, Layout, read
from moe_patch.types import Glu

_ACT_FN = GluRule("act_fn")
_layout, _glu = eagerly_cached(Layout), eagerly_cached(Glu)


def layout_of(experts: Any, spec: FamilySpec) -> Layout:
    """Return the weight layout: the family entry's if it has one, or else transformers' flags.

    Older releases of transformers set no flag for a post-expert norm and have no family with one.
    """
    if spec.layout is not None:
        return spec.layout
    return _layout(
        experts.has_gate,
        experts.has_bias,
        experts.is_transposed,
        experts.is_concatenated,
        "has_post_expert_norm" in experts.__dict__ and experts.has_post_expert_norm,
    )


def read_glu(experts: Any, spec: FamilySpec, layout: Layout | None = None) -> Glu | None:
    """Return the activation of the experts as a Glu, or None if the fused kernels lack it.

    ``act_fn`` is read on every call, so replacing it on the instance takes effect.
    """
    layout = layout or layout_of(experts, spec)
    if layout.has_post_expert_norm or not layout.fused or _has_own_gate(experts, spec, layout):
        return None
    rule = spec.glu or _ACT_FN
    kind = rule.kind
    if kind == "act_fn":
        act_fn = experts._modules.get("act_fn")
        if act_fn is None or (known := activation_kind(act_fn)) is None:
            return None
        kind = known
    limit = read(experts, rule.limit)
    limit = float("inf") if limit is None else float(limit)
    if limit != float("inf") and not rule.limit_first:
        return None
    alpha = float(read(experts, rule.alpha))
    return _glu(kind, layout.has_gate, not layout.is_concatenated, alpha, limit)


def _has_own_gate(experts: Any, spec: FamilySpec, layout: Layout) -> bool:
    """Return whether the instance or its class replaces the gate function."""
    if "_apply_gate" in experts.__dict__:
        return True
    if spec.glu is not None or spec.layout is not None or not layout.has_gate:
        return False
    return type(experts)._apply_gate is not _default_apply_gate()


@eagerly_cached
def _default_apply_gate() -> Callable[..., Any]:
    """Return the gate method that transformers' decorator adds to a class."""
    from transformers.integrations.moe import _default_apply_gate as found

    return found


def activation_kind(act_fn: object) -> str | None:
    """Return the Glu kind of an activation object, by exact type; None for other types."""
    if isinstance(act_fn, nn.Module) and ("forward" in act_fn.__dict__ or _hooked(act_fn)):
        return None
    if type(act_fn) is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}[act_fn.approximate]
    return _activation_kinds().get(type(act_fn))


@eagerly_cached
def _activation_kinds() -> dict[type, str]:
    """Return the Glu kind of each activation class."""
    # Import from the submodule: Dynamo does not treat transformers' lazy module as a module.
    from transformers.activations import (
        GELUActivation,
        GELUTanh,
        NewGELUActivation,
        ReLUSquaredActivation,
        SiLUActivation,
    )

    return {
        nn.SiLU: "silu",
        SiLUActivation: "silu",
        GELUActivation: "gelu",
        GELUTanh: "gelu_tanh",
        NewGELUActivation: "gelu_tanh",
        nn.ReLU: "relu",
        ReLUSquaredActivation: "relu2",
    }


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
    )
