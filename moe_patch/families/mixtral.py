"""Mixtral and MiniMax-01: softmax over all experts, top-k, always renormalised, weights in fp32.

In training their blocks multiply noise onto the hidden states; that remains transformers' code.
"""

from moe_patch.families.logits import linear
from moe_patch.ops.routing import softmax_topk
from moe_patch.runtime.spec import Const, FamilySpec


def mixtral_like(prefix: str, module: str) -> FamilySpec:
    """Return the entry of a family whose classes are renamed copies of Mixtral's."""
    return FamilySpec(
        model_types=(module,),
        module=module,
        block=f"{prefix}SparseMoeBlock",
        router=f"{prefix}TopKRouter",
        experts=f"{prefix}Experts",
        logits=linear,
        routing=softmax_topk,
        params={"top_k": "top_k", "renormalize": Const(True)},
    )


FAMILIES = (mixtral_like("Mixtral", "mixtral"), mixtral_like("MiniMax", "minimax"))
