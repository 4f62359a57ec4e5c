"""Read the weights and adapters of transformers' experts modules at call time, and run them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_patch.config import PatchConfig
from moe_patch.formats.tensor import QuantTensor, packed_weight
from moe_patch.formats.weights import projection, require_float
from moe_patch.ops.backend import refuse_batch_invariant
from moe_patch.ops.direct import in_dtype
from moe_patch.ops.experts.composed import experts_composed
from moe_patch.ops.experts.op import Signals, experts_mlp
from moe_patch.runtime.adapters import (
    live_factors,
    original_under_adapters,
    own_version,
    refuse_merged,
    to_lora,
)
from moe_patch.runtime.described import layout_of, read_glu
from moe_patch.runtime.fp8 import Copies, in_fp8
from moe_patch.runtime.module_patch import current_factors, patch_of
from moe_patch.runtime.offload import Seat
from moe_patch.runtime.row_norms import RowNorms
from moe_patch.runtime.spec import FamilySpec, Layout, read
from moe_patch.runtime.taps import LayerSignals
from moe_patch.types import ExpertWeights, Lora


class ExpertTensors(NamedTuple):
    """Weights and low-rank factors of an experts module, as the experts operator takes them."""

    weights: ExpertWeights
    lora13: Lora | None
    lora2: Lora | None

    @property
    def has_lora(self) -> bool:
        return self.lora13 is not None or self.lora2 is not None


def stored_weight(experts: Any, spec: FamilySpec, layout: Layout | None = None) -> Tensor:
    """Return the up projection as stored, without evaluating PEFT's parametrizations."""
    layout = layout or layout_of(experts, spec)
    owner, _, name = layout.up_name.rpartition(".")
    holder = read(experts, owner) if owner else experts
    original = original_under_adapters(holder, name)
    return projection(holder, name) if original is None else original


def read_tensors(
    experts: Any, layout: Layout, dtype: torch.dtype, fuse_lora: str, cast: bool = True
) -> ExpertTensors:
    """Read weights, biases and low-rank factors of an experts module.

    Args:
        experts: the live module; parametrizations and factors passed for this call are applied.
        layout: layout of its weights.
        dtype: compute dtype. Weights and biases in another dtype are cast (gradients are cast
            back).
        fuse_lora: option of the patch; "off" reads PEFT's merged weight instead of factors.
        cast: False leaves both weights in their stored dtype.
    """
    up, given = layout.up_name, current_factors(experts)
    args = layout.is_transposed, dtype, fuse_lora, given, cast
    w13, lora13 = read_projection(experts, up, *args)
    w2, lora2 = read_projection(experts, "down_proj", *args)
    E = w2.shape[0]
    if w13.shape[0] > E:  # LongCat-Flash's identity experts have rows only in the up projection.
        w13 = w13[:E]
        lora13 = lora13 and Lora(lora13.A_ERI[:E], lora13.B_EOR[:E], lora13.scaling)
    b13 = b2 = None
    if layout.has_bias:
        b13, b2 = (read_bias(experts, name, dtype) for name in (up, "down_proj"))
    return ExpertTensors(ExpertWeights(w13, w2, b13, b2), lora13, lora2)


def read_bias(experts: Any, name: str, dtype: torch.dtype) -> Tensor:
    """Return the bias of one projection, [E, out], in the compute dtype."""
    bias = getattr(experts, f"{name}_bias")
    require_float(bias, f"{type(experts).__name__}.{name}_bias")
    return bias.to(dtype)


def read_projection(
    experts: Any,
    name: str,
    transposed: bool,
    dtype: torch.dtype,
    fuse_lora: str,
    given: dict[str, Any],
    cast: bool = True,
) -> tuple[Tensor, Lora | None]:
    """Read one projection's weight, as an [E, out, in] view, and its low-rank factors.

    Args:
        experts, dtype, fuse_lora, cast: as for :func:`read_tensors`.
        name: name of the parameter.
        transposed: True if the storage is [E, in, out].
        given: factors passed for this call, by parameter name.
    """
    if fuse_lora == "require":
        refuse_merged(experts, name)
    live = None if fuse_lora == "off" else live_factors(experts, name)
    if live is not None:
        weight, factors = live
    else:
        weight, factors = projection(experts, name), given.get(name, [])
        if factors and (patch := patch_of(experts)) is not None:
            patch.used += (name,)
    where = f"{type(experts).__name__}.{name}"
    require_float(weight, where)
    w_EOI: Any = weight if live is None else own_version(weight)
    if isinstance(weight, QuantTensor):
        w_EOI = packed_weight(weight)
    w_EOI = w_EOI.transpose(1, 2) if transposed else w_EOI
    lora = to_lora(factors, w_EOI, transposed, dtype, where) if factors else None
    return in_dtype(w_EOI, dtype) if cast else w_EOI, lora


def compute_dtype(hidden: Tensor, weight: Tensor, fp32: bool = False) -> torch.dtype:
    """Return the dtype of products on the hidden states' device (see :func:`dtype_on`)."""
    return dtype_on(hidden.device.type, weight, fp32)


def dtype_on(device_type: str, weight: Tensor, fp32: bool = False) -> torch.dtype:
    """Return autocast's dtype if autocast is on, or else the weights', at least fp32 with ``fp32``.

    Like autocast, leave fp64 weights alone.

    Args:
        device_type: where products run; torch has no autocast for "meta", where weights may be.
        weight: of the experts.
        fp32: the family computes its experts in fp32 at least.
    """
    if torch.is_autocast_enabled(device_type) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return torch.promote_types(weight.dtype, torch.float32) if fp32 else weight.dtype


def _activation(experts: Any, layout: Layout) -> Callable[[Tensor], Tensor]:
    """Return the module's own activation, h_NH -> a_NF."""
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
    config: PatchConfig,
    *,
    copies: Copies | None = None,
    layer: LayerSignals | None = None,
    seat: Seat | None = None,
) -> Tensor:
    """Run an experts module on this library; return its output in the dtype of ``hidden_TD``.

    If the fused operator lacks the module's activation or post-expert norm, the module's own code
    runs between grouped products.

    Args:
        experts, spec: the live module and its family entry.
        hidden_TD, ids_TK, weights_TK: arguments of transformers' experts.
        config: options of the patch.
        copies: transposed copies of packed weights, as in :func:`moe_patch.runtime.fp8.in_fp8`.
        layer: if given, records the call.
        seat: given if the weights are in host memory (patch_model refuses that for experts without
            a fused activation).
    """
    layout = layout_of(experts, spec)
    stored = stored_weight(experts, spec, layout)
    dtype = compute_dtype(hidden_TD, stored, spec.experts_fp32)
    tensors = read_tensors(experts, layout, dtype, config.fuse_lora, cast=seat is None)
    glu = read_glu(experts, spec, layout)
    x_TD = in_dtype(hidden_TD, dtype)
    signals = None
    if layer is not None:
        signals = layer.begin(
            x_TD, ids_TK, weights_TK, experts=stored.shape[0], has_lora=tensors.has_lora,
            fused=glu is not None,
        )  # fmt: skip
    if glu is None:
        if config.batch_invariant:
            refuse_batch_invariant(f"{type(experts).__name__} runs its own activation or norm")
        args = x_TD, ids_TK, weights_TK, tensors, signals, config.backend
        out_TD = _run_composed(experts, layout, *args)
    else:
        run = functools.partial(
            experts_mlp,
            x_TD,
            ids_TK,
            weights_TK,
            glu=glu,
            lora13=tensors.lora13,
            lora2=tensors.lora2,
            backend=config.backend,
            recompute=config.recompute,
            batch_invariant=config.batch_invariant,
            signals=signals,
        )
        if seat is None:
            kept = copies if torch.is_grad_enabled() else None
            w = in_fp8(tensors.weights, config.compute, kept, x_TD, glu, config.backend)
            # FP8 products write whole tensors, not slices; PatchConfig refuses a number with them.
            out_TD = run(w, chunk_tokens=config.chunk_tokens if w is tensors.weights else 0)
        else:
            for lora in filter(None, (tensors.lora13, tensors.lora2)):
                seat.check_adapter(lora, x_TD.device)
            loan = seat.loan(tensors.weights, dtype, x_TD.device)
            with loan.forward(ids_TK) as weights:
                out_TD = run(weights, lend=loan.backward, chunk_tokens=config.chunk_tokens)
    return in_dtype(out_TD, hidden_TD.dtype)


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
    """Run the module's own activation and post-expert norm between grouped products."""
    gate = _activation(experts, layout)
    post_norm = experts.post_expert_norm if layout.has_post_expert_norm else None
    w = tensors.weights
    if signals is not None:
        norms = RowNorms(signals, x_TD, ids_TK, w.w13_EHD.shape[0], w.b13_EH is not None)
        gate, post_norm = norms.gate(gate), norms.post(post_norm)
    args = x_TD, ids_TK, weights_TK, w, gate, post_norm
    return experts_composed(*args, lora13=tensors.lora13, lora2=tensors.lora2, backend=backend)
