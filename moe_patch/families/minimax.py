"""MiniMax-M2: sigmoid scores, no groups, correction bias kept on the block and passed to the router."""

from moe_patch.families.logits import linear_weight_dtype
from moe_patch.families.spec import Arg, Const, FamilySpec
from moe_patch.routing import sigmoid_topk

MINIMAX_M2 = FamilySpec(
    model_types=("minimax_m2",),
    module="minimax_m2",
    block="MiniMaxM2SparseMoeBlock",
    router="MiniMaxM2TopKRouter",
    experts="MiniMaxM2Experts",
    logits=linear_weight_dtype,
    routing=sigmoid_topk,
    params={"top_k": "top_k", "renormalize": Const(True)},
    bias=Arg(1),
)

FAMILIES = (MINIMAX_M2,)
