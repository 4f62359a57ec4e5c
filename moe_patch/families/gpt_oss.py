"""gpt_oss: the best logits first, then softmax over them; interleaved, transposed, biased experts."""

from moe_patch.families.logits import linear_bias
from moe_patch.families.spec import FamilySpec, GluRule
from moe_patch.routing import topk_softmax

GPT_OSS = FamilySpec(
    model_types=("gpt_oss",),
    module="gpt_oss",
    block="GptOssMLP",
    router="GptOssTopKRouter",
    experts="GptOssExperts",
    logits=linear_bias,
    routing=topk_softmax,
    params={"top_k": "top_k"},
    glu=GluRule("swiglu_oai", alpha="alpha", limit="limit"),
)

FAMILIES = (GPT_OSS,)
