"""Reading transformers' experts modules: weights, adapters and activation, at call time.

The layout flags (``is_transposed``, ``is_concatenated``, ``has_gate``, ``has_bias``) are set on the
instance by transformers' own decorator, so no family entry repeats them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_patch.formats.tensor import QuantTensor, packed_weight
from moe_patch.formats.weights import projection, require_float
from moe_patch.ops.backend import refuse_batch_invariant
from moe_patch.ops.experts.composed import experts_composed
from moe_patch.ops.experts.op import Signals, experts_mlp
from moe_patch.runtime.adapters import live_factors, own_version, refuse_merged, to_lora
from moe_patch.runtime.record import handed_down, record_of
from moe_patch.runtime.row_norms import RowNorms
from moe_patch.runtime.spec import FamilySpec, GluRule, Layout, read
from moe_patch.runtime.taps import LayerSignals
from moe_patch.types import ExpertWeights, Glu, Lora

_ACT_FN = GluRule("act_fn")


class ExpertTensors(NamedTuple):
    """What the experts operator needs from a module, in one compute dtype."""

    weights: ExpertWeights
    lora13: Lora | None
    lora2: Lora | None

    @property
    def has_lora(self) -> bool:
        return self.lora13 is not None or self.lora2 is not None


def layout_of(experts: Any, spec: FamilySpec) -> Layout:
    """How the weights lie: the family entry's word, else transformers' own flags.

    Older releases of transformers set no flag for a post-expert norm and have no family with one.
    """
    if spec.layout is not None:
        return spec.layout
    return Layout(
        has_gate=experts.has_gate,
        has_bias=experts.has_bias,
        is_transposed=experts.is_transposed,
        is_concatenated=experts.is_concatenated,
        has_post_expert_norm="has_post_expert_norm" in experts.__dict__
        and experts.has_post_expert_norm,
    )


def stored_weight(experts: Any, spec: FamilySpec, layout: Layout | None = None) -> Tensor:
    """The up projection as stored, without evaluating a parametrization."""
    layout = layout or layout_of(experts, spec)
    owner, _, name = layout.up_name.rpartition(".")
    holder = read(experts, owner) if owner else experts
    live = live_factors(holder, name)
    return projection(holder, name) if live is None else live[0]


def read_tensors(experts: Any, layout: Layout, dtype: torch.dtype, fuse_lora: str) -> ExpertTensors:
    """Weights, biases and low-rank factors of an experts module.

    Args:
        experts: the live module; parametrizations and handed-down factors are honoured.
        layout: how its weights lie.
        dtype: compute dtype; tensors in another dtype are cast (their gradients are cast back).
        fuse_lora: of the patch; "off" reads PEFT's merged weight instead of factors.
    """
    up = layout.up_name
    w13, lora13 = read_projection(experts, up, layout.is_transposed, dtype, fuse_lora)
    w2, lora2 = read_projection(experts, "down_proj", layout.is_transposed, dtype, fuse_lora)
    E = w2.shape[0]
    if w13.shape[0] > E:  # identity experts own rows of the up projection alone (LongCat-Flash)
        w13 = w13[:E]
        lora13 = lora13 and Lora(lora13.A_ERI[:E], lora13.B_EOR[:E], lora13.scaling)
    b13 = b2 = None
    if layout.has_bias:
        b13, b2 = (read_bias(experts, name, dtype) for name in (up, "down_proj"))
    return ExpertTensors(ExpertWeights(w13, w2, b13, b2), lora13, lora2)


def read_bias(experts: Any, name: str, dtype: torch.dtype) -> Tensor:
    """The bias of one projection, [E, out], in the compute dtype."""
    bias = getattr(experts, f"{name}_bias")
    require_float(bias, f"{type(experts).__name__}.{name}_bias")
    return bias.to(dtype)


def read_projection(
    experts: Any, name: str, transposed: bool, dtype: torch.dtype, fuse_lora: str
) -> tuple[Tensor, Lora | None]:
    """One projection's weight as an [E, out, in] view and its low-rank factors; see above."""
    if fuse_lora == "require":
        refuse_merged(experts, name)
    live = None if fuse_lora == "off" else live_factors(experts, name)
    if live is not None:
        weight, factors = live
    else:
        weight, factors = projection(experts, name), handed_down(experts).get(name, [])
        if factors and (record := record_of(experts)) is not None:
            record.taken += (name,)
    require_float(weight, f"{type(experts).__name__}.{name}")
    w_EOI: Any = weight if live is None else own_version(weight)
    if isinstance(weight, QuantTensor):
        w_EOI = packed_weight(weight)
    w_EOI = w_EOI.transpose(1, 2) if transposed else w_EOI
    lora = to_lora(factors, w_EOI, transposed, dtype, f"{type(experts).__name__}.{name}")
    return w_EOI.to(dtype), lora


def read_glu(experts: Any, spec: FamilySpec, layout: Layout | None = None) -> Glu | None:
    """The experts' activation as a Glu, or None when it is none that the fused kernels know.

    ``act_fn`` is looked at on every call, so that replacing it on the instance is followed.
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
    return Glu(
        kind,
        gated=layout.has_gate,
        interleaved=not layout.is_concatenated,
        alpha=float(read(experts, rule.alpha)),
        limit=limit,
    )


def _has_own_gate(experts: Any, spec: FamilySpec, layout: Layout) -> bool:
    """Return whether instance or class gate unlike the entry and transformers' decorator say."""
    if "_apply_gate" in experts.__dict__:
        return True
    if spec.glu is not None or spec.layout is not None or not layout.has_gate:
        return False
    from transformers.integrations.moe import _default_apply_gate

    return type(experts)._apply_gate is not _default_apply_gate


def activation_kind(act_fn: object) -> str | None:
    """The Glu kind of an activation object, by exact type; None if it is none that we know."""
    # Not through `from transformers import ..`: Dynamo takes no lazy module for a module.
    from transformers.activations import (
        GELUActivation,
        GELUTanh,
        NewGELUActivation,
        ReLUSquaredActivation,
        SiLUActivation,
    )

    if isinstance(act_fn, nn.Module) and ("forward" in act_fn.__dict__ or _hooked(act_fn)):
        return None
    if type(act_fn) is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}[act_fn.approximate]
    kinds = {
        nn.SiLU: "silu",
        SiLUActivation: "silu",
        GELUActivation: "gelu",
        GELUTanh: "gelu_tanh",
        NewGELUActivation: "gelu_tanh",
        nn.ReLU: "relu",
        ReLUSquaredActivation: "relu2",
    }
    return kinds.get(type(act_fn))


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
    )


def compute_dtype(hidden: Tensor, weight: Tensor, fp32: bool = False) -> torch.dtype:
    """Autocast's dtype where autocast is on, else the weights', widened to fp32 if asked.

    Autocast leaves fp64 weights alone, and so do we.
    """
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return torch.promote_types(weight.dtype, torch.float32) if fp32 else weight.dtype


def _activation(experts: Any, layout: Layout) -> Callable[[Tensor], Tensor]:
    """The module's own h_NH -> a_NF."""
    if not layout.has_gate:
        return experts.act_fn
    if hasattr(experts, "_apply_gate"):
        return experts._apply_gate
    return functools.partial(_gate_halves, experts.act_fn)


def _gate_halves(act_fn: Callable[[Tensor], Tensor], h_NH: Tensor) -> Tensor:
    gate, up = h_NH.chunk(2, dim=-1)
    return act_fn(gate) * up


def run_experts(
    experts: Any,
    spec: FamilySpec,
    hidden_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    backend: str,
    recompute: bool = False,
    batch_invariant: bool = False,
    fuse_lora: str = "auto",
    layer: LayerSignals | None = None,
) -> Tensor:
    """One call of an experts module on this library; the output in the dtype of ``hidden_TD``.

    An activation or post-expert norm that the fused operator does not know runs the module's own
    code between grouped products. ``layer``, if given, records the call.
    """
    layout = layout_of(experts, spec)
    stored = stored_weight(experts, spec, layout)
    dtype = compute_dtype(hidden_TD, stored, spec.experts_fp32)
    tensors = read_tensors(experts, layout, dtype, fuse_lora)
    glu = read_glu(experts, spec, layout)
    x_TD = hidden_TD.to(dtype)
    signals = None
    if layer is not None:
        signals = layer.begin(
            x_TD, ids_TK, weights_TK, experts=stored.shape[0], has_lora=tensors.has_lora,
            fused=glu is not None,
        )  # fmt: skip
    if glu is None:
        if batch_invariant:
            refuse_batch_invariant(f"{type(experts).__name__} runs its own activation or norm")
        args = x_TD, ids_TK, weights_TK, tensors, signals, backend
        out_TD = _run_composed(experts, layout, *args)
    else:
        out_TD = experts_mlp(
            x_TD,
            ids_TK,
            weights_TK,
            tensors.weights,
            glu,
            lora13=tensors.lora13,
            lora2=tensors.lora2,
            backend=backend,
            recompute=recompute,
            batch_invariant=batch_invariant,
            signals=signals,
        )
    return out_TD.to(hidden_TD.dtype)


def _run_composed(
    experts: Any,
    layout: Layout,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    tensors: ExpertTensors,
    signals: Signals | None,
    backend: str,
) -> Tensor:
    """The module's own activation and post-expert norm between grouped products."""
    gate = _activation(experts, layout)
    post_norm = experts.post_expert_norm if layout.has_post_expert_norm else None
    w = tensors.weights
    if signals is not None:
        norms = RowNorms(signals, x_TD, ids_TK, w.w13_EHD.shape[0], w.b13_EH is not None)
        gate, post_norm = norms.gate(gate), norms.post(post_norm)
    args = x_TD, ids_TK, weights_TK, w, gate, post_norm
    return experts_composed(*args, lora13=tensors.lora13, lora2=tensors.lora2, backend=backend)
