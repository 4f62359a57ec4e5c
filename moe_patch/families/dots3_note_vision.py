"""The vision tower of dots3-note: sigmoid scores; the block holds the correction bias."""

from moe_patch.families.logits import linear_fp32
from moe_patch.ops.routing import sigmoid_topk
from moe_patch.runtime.spec import Arg, Const, FamilySpec

DOTS3_NOTE_VISION = FamilySpec(
    model_types=("dots3_note_vision_encoder",),
    module="dots3_note",
    block="Dots3NoteVisionMoE",
    router="Dots3NoteVisionTopKRouter",
    experts="Dots3NoteExperts",
    logits=linear_fp32,
    routing=sigmoid_topk,
    params={
        "top_k": "top_k",
        "renormalize": Const(True),
        "eps": Const(1e-20),
        "scale": "router_scaling_factor",
    },
    bias=Arg(1),
    router_input_3d=True,
)

FAMILIES = (DOTS3_NOTE_VISION,)
