"""Llama-4: sigmoid of the best logits; the routing weight multiplies the expert's input.

transformers runs every expert on every token, with inputs scaled to zero for experts not chosen.
Here each expert sees only the tokens that chose it, which gives the same sum. The block is bound
because the router returns dense scores, zero for experts not chosen, in place of ids and weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_patch.families.logits import linear
from moe_patch.ops.routing import RouteRule, stable_topk
from moe_patch.ops.routing_op import route_impl
from moe_patch.runtime import forward
from moe_patch.runtime.module_patch import ModulePatch, bound
from moe_patch.runtime.spec import FamilySpec, Layout


@bound
def router_forward(router: Any, patch: ModulePatch, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return transformers' scores, [T, E] and zero for experts not chosen, and the logits."""
    routing = patch.spec.route(
        router,
        hidden_TD,
        (),
        ties=patch.config.ties,
        impl=route_impl(patch.config.backend, patch.config.batch_invariant),
    )
    dense_TE = torch.zeros_like(routing.logits_TE)
    return dense_TE.scatter(1, routing.ids_TK, routing.weights_TK), routing.logits_TE


@bound
def block_forward(block: Any, patch: ModulePatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return shared plus routed experts, [T, D], and the router logits."""
    x_TD = hidden.reshape(-1, hidden.shape[-1])
    # Take the scores from the router module's output, so that a hook on it can steer the block.
    scores_TE, logits_TE = block.router(x_TD)
    _, ids_TK = stable_topk(scores_TE.detach().abs(), block.top_k)
    routed_TD = block.experts(x_TD, ids_TK, scores_TE.gather(1, ids_TK))
    return block.shared_expert(x_TD) + routed_TD, logits_TE


@bound
def experts_forward(
    experts: Any,
    patch: ModulePatch,
    hidden: Tensor,
    ids_TK: Tensor | None = None,
    weights_TK: Tensor | None = None,
) -> Tensor:
    """Run chosen experts on [T, D], or accept transformers' call: E equal runs of scaled rows.

    In the second form every scaled row is a token with one expert, and its output has weight 1.
    """
    if ids_TK is None or weights_TK is None:
        E = experts.num_experts
        ids_N = torch.arange(E, device=hidden.device).repeat_interleave(hidden.shape[0] // E)
        ones_N1 = hidden.new_ones(ids_N.shape[0], 1)
        return forward.experts_forward(experts, hidden, ids_N.unsqueeze(1), ones_N1)
    rows_ND = (hidden.unsqueeze(1) * weights_TK.unsqueeze(2)).flatten(0, 1)
    ids_N1 = ids_TK.reshape(-1, 1)
    out_ND = forward.experts_forward(experts, rows_ND, ids_N1, rows_ND.new_ones(ids_N1.shape))
    return out_ND.view(*ids_TK.shape, hidden.shape[1]).sum(dim=1)


LLAMA4 = FamilySpec(
    model_types=("llama4_text", "llama4"),
    module="llama4",
    block="Llama4TextMoe",
    router="Llama4Router",
    experts="Llama4TextExperts",
    logits=linear,
    # The sigmoid, in fp32, of each of the best k logits.
    routing=RouteRule("topk_sigmoid", score="sigmoid", order="topk_score"),
    params={"top_k": "top_k"},
    weights_dtype="logits",
    router_attr="router",
    shared="shared_expert",
    layout=Layout(is_transposed=True),
    router_forward=router_forward,
    experts_forward=experts_forward,
    block_forward=block_forward,
)

FAMILIES = (LLAMA4,)
