"""AFMoE: sigmoid scores; the router wraps a Linear, the block passes it the correction bias."""

from typing import Any

from torch import Tensor

from moe_patch.ops.routing import sigmoid_topk
from moe_patch.runtime.spec import Arg, Const, FamilySpec


def inner_linear_then_fp32(router: Any, hidden: Tensor) -> Tensor:
    """Apply the router's own Linear in the weight's dtype; return logits in fp32."""
    return router.gate(hidden.reshape(-1, hidden.shape[-1])).float()


AFMOE = FamilySpec(
    model_types=("afmoe",),
    module="afmoe",
    block="AfmoeSparseMoeBlock",
    router="AfmoeTokenChoiceRouter",
    experts="AfmoeExperts",
    logits=inner_linear_then_fp32,
    routing=sigmoid_topk,
    params={
        "top_k": "top_k",
        "renormalize": Const(True),
        "eps": Const(1e-20),
        "scale": "route_scale",
    },
    bias=Arg(1),
    router_attr="router",
    router_input_3d=True,
    shared_by_block="shared_experts",
)

FAMILIES = (AFMOE,)
