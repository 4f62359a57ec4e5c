"""Muse Spark: sigmoid scores of scaled fp32 logits; every expert's output is normalised.

The experts have a hidden width of their own, between two projections of the block. The norm after
each expert keeps them on separate grouped products.
"""

from typing import Any

from torch import Tensor

from moe_patch.families.logits import linear_fp32
from moe_patch.ops.routing import sigmoid_topk
from moe_patch.runtime.spec import Const, FamilySpec


def scaled_linear_fp32(router: Any, hidden: Tensor) -> Tensor:
    """Return W x in fp32, times the router's output multiplier."""
    return linear_fp32(router, hidden) * router.output_multiplier


MUSE_SPARK = FamilySpec(
    model_types=("muse_spark_text",),
    module="muse_spark",
    block="MuseSparkMoE",
    router="MuseSparkTopkRouter",
    experts="MuseSparkExperts",
    logits=scaled_linear_fp32,
    routing=sigmoid_topk,
    params={
        "top_k": "top_k",
        "renormalize": Const(True),
        "eps": "norm_topk_prob_eps",
        "scale": "routed_scaling_factor",
    },
    bias="e_score_correction_bias",
    router_input_3d=True,
)

FAMILIES = (MUSE_SPARK,)
