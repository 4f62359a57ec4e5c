"""Zaya: an MLP router with a state that travels from layer to layer, and a class that skips.

The last of the E + 1 classes names no expert: the router returns its slot as expert 0, weight 0.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_patch.ops.routing import softmax_topk
from moe_patch.ops.routing_op import route_impl
from moe_patch.runtime.module_patch import ModulePatch, bound
from moe_patch.runtime.spec import Const, FamilySpec


def router_state(router: Any, hidden: Tensor, previous: Tensor | None) -> Tensor:
    """Return the projected hidden states plus a trained scale times the previous layer's state."""
    state = router.down_proj(hidden)
    if router.use_eda and previous is not None:
        state = state + previous * router.router_states_scale
    return state


def class_logits(router: Any, state: Tensor) -> Tensor:
    """Return the router MLP's logits over E + 1 classes, one row per token."""
    logits = router.router_mlp(state)
    return logits.reshape(-1, logits.shape[-1])


@bound
def router_forward(
    router: Any, patch: ModulePatch, hidden_states: Tensor, router_states: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logits, weights, ids, and the router state for the next layer."""
    state = router_state(router, hidden_states, router_states)
    logits = class_logits(router, state)
    routing = patch.spec.choose(
        router,
        logits,
        hidden_states,
        ties=patch.config.ties,
        impl=route_impl(patch.config.backend, patch.config.batch_invariant),
    )
    skipped_TK = routing.ids_TK == router.num_experts
    return (
        routing.logits_TE,
        routing.weights_TK.masked_fill(skipped_TK, 0.0),
        routing.ids_TK.masked_fill(skipped_TK, 0),
        state.clone(),
    )


ZAYA = FamilySpec(
    model_types=("zaya",),
    module="zaya",
    block="ZayaSparseMoeBlock",
    router="ZayaRouter",
    experts="ZayaExperts",
    logits=class_logits,
    routing=softmax_topk,
    params={"top_k": "top_k", "fp32": Const(False)},
    bias="balancing_biases",
    router_forward=router_forward,
    router_input_3d=True,
)

FAMILIES = (ZAYA,)
