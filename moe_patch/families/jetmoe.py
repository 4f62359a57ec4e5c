"""JetMoE: mixture of MLPs and mixture of attention heads over the same two classes.

Both kinds of block hold a gating module and two stacks of matrices, each a module of its own. The
bound gating module returns its plan where transformers' returns a list of sizes. The blocks only
pass it on to the stacks, so nothing is read back from the device. The attention block keeps
transformers' code around the stacks. The MLP block is bound, to sum over experts in a fixed order.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_patch.ops.experts.composed import combine_rows, gather_rows, grouped_linear
from moe_patch.ops.experts.definition import build_plan
from moe_patch.ops.routing import topk_softmax
from moe_patch.ops.routing_op import route_impl
from moe_patch.runtime.experts import compute_dtype, read_projection, stored_weight
from moe_patch.runtime.module_patch import ModulePatch, bound, current_factors
from moe_patch.runtime.spec import FamilySpec, Layout
from moe_patch.types import Plan


def inner_linear_then_fp32(router: Any, hidden: Tensor) -> Tensor:
    """Apply the router's own Linear; return logits in fp32."""
    return router.layer(hidden).float()


@bound
def gating_forward(
    router: Any, patch: ModulePatch, hidden_TD: Tensor
) -> tuple[Tensor, Tensor, Tensor, Plan, Tensor]:
    """Return rows by expert, their tokens, their weights, the plan, and the logits."""
    routing = patch.spec.route(
        router,
        hidden_TD,
        (),
        ties=patch.config.ties,
        impl=route_impl(patch.config.backend, patch.config.batch_invariant),
    )
    plan = build_plan(routing.ids_TK, router.num_experts)
    row_of_N = plan.row_of_N.long()
    weight_N = routing.weights_TK.reshape(-1)[row_of_N]
    return row_of_N, row_of_N // router.top_k, weight_N, plan, routing.logits_TE


@bound
def stacked_linear(experts: Any, patch: ModulePatch, inputs_ND: Tensor, plan: Plan) -> Tensor:
    """Return W_e x_n for rows in plan order, including the adapters on the stack."""
    dtype = compute_dtype(inputs_ND, stored_weight(experts, patch.spec))
    fuse_lora, given = patch.config.fuse_lora, current_factors(experts)
    w_EOI, lora = read_projection(experts, "weight", False, dtype, fuse_lora, given)
    backend = patch.config.backend
    return grouped_linear(inputs_ND.to(dtype), w_EOI, plan, lora=lora, backend=backend)


@bound
def block_forward(block: Any, patch: ModulePatch, layer_input: Tensor) -> Tensor:
    """Return sum_k w_tk * out_e(act(gate) * up) + bias; gate and up are the halves of in_e(x_t)."""
    x_TD = layer_input.reshape(-1, layer_input.shape[-1])
    _, _, weight_N, plan, _ = block.router(x_TD)
    gate_NF, up_NF = block.input_linear(gather_rows(x_TD, plan), plan).chunk(2, dim=-1)
    y_ND = block.output_linear(block.activation(gate_NF) * up_NF, plan)
    weights_TK = weight_N[plan.slot_of_TK.long()]
    out_TD = combine_rows(y_ND, weights_TK, plan)
    return out_TD.view(layer_input.shape) + block.bias


def map_and_reduce(block: Any, hidden: Tensor) -> Tensor:
    """Run the attention block's two halves without the attention between them."""
    mapped, _, topology = block.map(hidden)
    return block.reduce(mapped, topology)


def jetmoe(block: str, **forwards: Any) -> FamilySpec:
    """Return the entry of one of the two kinds of block."""
    return FamilySpec(
        model_types=("jetmoe",),
        module="jetmoe",
        block=block,
        router="JetMoeTopKGating",
        experts="JetMoeParallelExperts",
        logits=inner_linear_then_fp32,
        routing=topk_softmax,
        params={"top_k": "top_k"},
        weights_dtype="hidden",
        router_attr="router",
        layout=Layout(has_gate=False, up="weight", fused=False),
        router_forward=gating_forward,
        experts_forward=stacked_linear,
        **forwards,
    )


FAMILIES = (
    jetmoe("JetMoeMoE", block_forward=block_forward),
    jetmoe("JetMoeMoA", check_call=map_and_reduce),
)
