"""DBRX: the router only makes logits, the block chooses; w1, v1 and w2 are stacked 2-D matrices.

Gate and up are two parameters of shape [E * F, D]. They are multiplied one after the other, so no
concatenated copy is made.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from moe_patch.formats.weights import projection, require_float
from moe_patch.ops.experts.composed import combine_rows, gather_rows, grouped_linear
from moe_patch.ops.experts.definition import build_plan
from moe_patch.ops.routing_op import route_impl
from moe_patch.runtime.experts import compute_dtype
from moe_patch.runtime.module_patch import ModulePatch, bound, bound_method
from moe_patch.runtime.spec import FamilySpec, Layout
from moe_patch.types import RouteSpec


@bound
def router_forward(router: Any, patch: ModulePatch, hidden_states: Tensor) -> Tensor:
    """Return logits_TE; in training, jitter the hidden states in place first."""
    if router.training and router.moe_jitter_eps is not None:
        eps = router.moe_jitter_eps
        hidden_states *= torch.empty_like(hidden_states).uniform_(1.0 - eps, 1.0 + eps)
    return router.layer(hidden_states.view(-1, hidden_states.shape[-1]))


def choice(block: Any, ties: str) -> RouteSpec:
    """Return the routing rule: top-k of a softmax in the logits' dtype."""
    return RouteSpec(block.top_k, fp32=False, ties=ties)


@bound_method("route_tokens_to_experts")
def softmax_topk_norm(
    block: Any, patch: ModulePatch, router_logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Return weights_TK (softmax in the logits' dtype, L_p-normalised if configured) and ids_TK."""
    impl = route_impl(patch.config.backend, patch.config.batch_invariant)
    routing = impl(router_logits, choice(block, patch.config.ties), None)
    weights_TK = routing.weights_TK
    if block.moe_normalize_expert_weights is not None:
        p = float(block.moe_normalize_expert_weights)
        norm_T1 = torch.linalg.vector_norm(weights_TK, ord=p, dim=-1, keepdim=True)
        weights_TK = weights_TK / norm_T1
    return weights_TK, routing.ids_TK


@bound
def experts_forward(
    experts: Any, patch: ModulePatch, hidden: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Return sum_k w_tk * w2_e (act(w1_e x_t) * (v1_e x_t)), in the shape of the hidden states."""
    mlp, E, F, D = experts.mlp, experts.num_experts, experts.ffn_hidden_size, experts.hidden_size
    stored = {name: projection(mlp, name) for name in ("w1", "v1", "w2")}
    for name, weight in stored.items():
        require_float(weight, f"{type(mlp).__name__}.{name}")
    dtype = compute_dtype(hidden, stored["w1"])
    w1_EFD, v1_EFD, w2_EFD = (weight.view(E, F, D).to(dtype) for weight in stored.values())
    plan = build_plan(ids_TK, E)
    x_ND = gather_rows(hidden.reshape(-1, D).to(dtype), plan)
    linear = functools.partial(grouped_linear, plan=plan, backend=patch.config.backend)
    a_NF = mlp.activation_fn(linear(x_ND, w1_EFD)) * linear(x_ND, v1_EFD)
    y_ND = linear(a_NF, w2_EFD.mT)
    out_TD = combine_rows(y_ND, weights_TK, plan)
    shape = hidden.shape if hidden.dim() == 3 else (hidden.shape[0], 1, D)
    return out_TD.to(hidden.dtype).view(shape)


DBRX = FamilySpec(
    model_types=("dbrx",),
    module="dbrx",
    block="DbrxFFN",
    router="DbrxRouter",
    experts="DbrxExperts",
    router_attr="router",
    router_input_3d=True,
    layout=Layout(up="mlp.w1", fused=False),
    router_forward=router_forward,
    experts_forward=experts_forward,
    block_forward=softmax_topk_norm,
    block_slot="route_tokens_to_experts",
    block_choice=choice,
    since="5.16",  # the classes of 5.9 and 5.13 multiply by other matrices
)

FAMILIES = (DBRX,)
