"""Forwards that a patch binds to the model's modules. Read ops/experts/definition.py first.

- router_forward is bound on a router instance. It maps hidden states to (logits, weights, ids),
  like transformers' router.
- experts_forward is registered in transformers' ExpertsInterface (see patching/by_name.py). An
  instance's config selects it.
- block_forward is bound on blocks with a shared expert. It calls router, experts and shared expert
  as modules.
- choice_forward replaces a block's method that chooses experts from given logits.
- lora_forward is bound on PEFT's ParamWrapper. It passes low-rank factors to the experts for one
  call.

Each runs only while its patch is active (see :func:`moe_patch.runtime.module_patch.bound`).
Otherwise the class's own forward runs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.ops.routing_op import route_impl
from moe_patch.runtime.adapters import active_factors, base_of, paused, why_not_fused
from moe_patch.runtime.experts import run_experts
from moe_patch.runtime.module_patch import (
    ModulePatch,
    bound,
    bound_method,
    origin_of,
    patch_of,
    restore_factors,
    set_factors,
)
from moe_patch.runtime.modules import child_of, undecorated_forward

EXPERTS_NAME = "moe_patch"


@bound
def router_forward(router: nn.Module, patch: ModulePatch, hidden_states: Tensor, *args: Any) -> Any:
    """Return logits_TE, weights_TK and ids_TK, or whatever this family's router returns."""
    if patch.taps is not None:
        return patch.taps.eagerly(_route, router, patch, hidden_states, args)
    return _route(router, patch, hidden_states, args)


def _route(router: nn.Module, patch: ModulePatch, hidden_states: Tensor, args: tuple) -> Any:
    spec, taps = patch.spec, patch.taps
    impl = route_impl(patch.config.backend, patch.config.batch_invariant)
    if taps is not None:
        impl = taps.impl(impl)
    routing = spec.route(router, hidden_states, args, ties=patch.config.ties, impl=impl)
    if taps is not None:
        routing = taps.decided(spec, hidden_states, args, routing)
    if spec.returns is not None:
        return spec.returns(router, routing)
    if spec.ids_first:
        return routing.logits_TE, routing.ids_TK, routing.weights_TK
    return routing.logits_TE, routing.weights_TK, routing.ids_TK


def experts_forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run the experts by transformers' signature: [T, D], [T, K] ids, [T, K] weights -> [T, D]."""
    patch = patch_of(experts)
    if patch is None:
        return undecorated_forward(experts)(experts, hidden_states, top_k_index, top_k_weights)
    args = (hidden_states, top_k_index, top_k_weights)
    # A bound forward (it has attributes) already ran under the probe.
    if patch.probe is not None and not patch.attributes:
        return patch.probe.run(functools.partial(_experts, experts, patch), experts, args, {})
    return _experts(experts, patch, *args)


def _experts(
    experts: Any, patch: ModulePatch, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    args = (experts, patch.spec, hidden_TD, ids_TK, weights_TK, patch.config)
    copies, seat, taps = patch.copies, patch.seat, patch.taps
    layer = None if taps is None else taps.layer
    if seat is not None:
        return seat.eagerly(run_experts, *args, copies=copies, layer=layer, seat=seat)
    if layer is not None:
        return taps.eagerly(run_experts, *args, copies=copies, layer=layer)
    return run_experts(*args, copies=copies)


@bound
def bound_experts_forward(
    experts: nn.Module, patch: ModulePatch, *args: Any, **kwargs: Any
) -> Tensor:
    """Run :func:`experts_forward`; bound on classes that do not use transformers' registry."""
    return experts_forward(experts, *args, **kwargs)


@bound
def block_forward(block: Any, patch: ModulePatch, hidden_states: Tensor) -> Tensor:
    """Add the routed experts and the shared expert, scaled by sigmoid(shared gate) if it has one.

    Calls every part as a module and reads no weights, so adapters and hooks take effect.
    """
    spec = patch.spec
    assert spec.shared is not None
    x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
    block_in = hidden_states if spec.router_input_3d else x_TD
    _, weights_TK, ids_TK = getattr(block, spec.router_attr)(block_in)
    routed_TD = block.experts(x_TD, ids_TK, weights_TK)
    shared = getattr(block, spec.shared)(block_in).reshape(routed_TD.shape)
    if spec.shared_gate is not None:
        shared = torch.sigmoid(getattr(block, spec.shared_gate)(x_TD)) * shared
    return (routed_TD + shared).view(hidden_states.shape)


@bound_method("route_tokens_to_experts")
def choice_forward(
    block: nn.Module, patch: ModulePatch, router_logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ids_TK and weights_TK of the experts that the block chooses for these logits."""
    logits_TE = router_logits.reshape(-1, router_logits.shape[-1])
    impl = route_impl(patch.config.backend, patch.config.batch_invariant)
    ties = patch.config.ties
    routing = patch.spec.choose(block, logits_TE, router_logits, ties=ties, impl=impl)
    return routing.ids_TK, routing.weights_TK


@bound
def lora_forward(wrapper: Any, patch: ModulePatch, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run PEFT's ParamWrapper without the merged weight: the experts operator takes the factors.

    PEFT's own forward runs if adapters are disabled, merged or chosen per sample. It also runs if
    :func:`why_not_fused` gives a reason, or if the experts below are no longer patched.

    Raises:
        UnsupportedModelError: the experts ran other code, which did not use the factors.
        UnsupportedOptionError: the experts are not patched, with fuse_lora="require"; or another
            thread is running them with adapters.
    """
    by_peft = kwargs.get("adapter_names") is not None or paused(wrapper) is not None
    if by_peft or why_not_fused(wrapper) is not None:
        return type(wrapper).forward(wrapper, x, *args, **kwargs)
    base = base_of(wrapper)
    below, name = patch_of(base), wrapper.parameter_name
    if below is None:
        if patch.config.fuse_lora == "require":
            raise UnsupportedOptionError(
                f"{type(base).__name__}.{name}: fuse_lora='require' cannot hold: the experts below "
                "the adapter are no longer patched (wrapped or unpatched since); call patch_model "
                "again, or use fuse_lora='auto'"
            )
        return type(wrapper).forward(wrapper, x, *args, **kwargs)
    wrapper._check_forward_args(x, *args, **kwargs)
    factors = active_factors(wrapper)
    previous = set_factors(below, {name: factors}, f"{type(base).__name__}.{name}")
    try:
        out_TD: Tensor = child_of(wrapper, "base_layer")(x, *args, **kwargs)
        left_out = factors and name not in below.used
    finally:
        restore_factors(below, previous)
    if left_out:
        raise UnsupportedModelError(
            f"{type(base).__name__}.{name}: the adapter was left out, because the experts ran a "
            f"forward that is not ours ({origin_of(base.forward)}); accepted: experts as patched; "
            "remove that forward, or call unpatch_model, or patch with fuse_lora='off'"
        )
    return out_TD


def refuse_fp8(experts: nn.Module, *_: Any, **__: Any) -> Tensor:
    """Refuse transformers' FP8 experts; registered under our name in transformers' FP8 registry."""
    raise UnsupportedModelError(
        f"{type(experts).__name__}: found FP8 weights in transformers' own format; accepted: bf16, "
        "fp16, fp32 and fp64 weights; call quantize_experts(model, 'fp8') to convert such experts, "
        "or unpatch_model to go back to transformers' own implementation"
    )
