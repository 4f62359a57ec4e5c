"""Step-3.7: sigmoid scores; layers with a limit bound the gate after its activation.

A layer with a limit runs the experts' own gate between grouped products; the others run the fused
operator. The block scales the routed output and adds the shared expert.
"""

from moe_patch.families.logits import linear_weight_dtype
from moe_patch.ops.routing import sigmoid_topk
from moe_patch.runtime.spec import Const, FamilySpec, GluRule, Layout

STEP3P7 = FamilySpec(
    model_types=("step3p5", "step3p7"),
    module="step3p7",
    block="Step3p7SparseMoeBlock",
    router="Step3p7TopKRouter",
    experts="Step3p7Experts",
    logits=linear_weight_dtype,
    routing=sigmoid_topk,
    params={"top_k": "top_k", "renormalize": Const(True)},
    bias="e_score_correction_bias",
    glu=GluRule("act_fn", limit="limit", limit_first=False),
    layout=Layout(),
    shared_by_block="shared_experts",
)

FAMILIES = (STEP3P7,)
