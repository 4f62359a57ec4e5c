"""Choose the best logits, then softmax over those alone: gpt_oss, Granite-MoE, Aria."""

from moe_patch.families.logits import linear, linear_bias, linear_then_fp32
from moe_patch.ops.routing import topk_softmax
from moe_patch.runtime.spec import FamilySpec, GluRule

GPT_OSS = FamilySpec(
    model_types=("gpt_oss",),
    module="gpt_oss",
    block="GptOssMLP",
    router="GptOssTopKRouter",
    experts="GptOssExperts",
    router_attr="router",
    logits=linear_bias,
    routing=topk_softmax,
    params={"top_k": "top_k"},
    glu=GluRule("swiglu_oai", alpha="alpha", limit="limit"),
)

ARIA = FamilySpec(
    model_types=("aria_text",),
    module="aria",
    block="AriaTextMoELayer",
    router="AriaTextTopKRouter",
    experts="AriaExperts",
    router_attr="router",
    logits=linear,
    routing=topk_softmax,
    params={"top_k": "top_k"},
    shared="shared_experts",
    since="5.21",
)


def granite_like(
    prefix: str, module: str, shared: str | None = "shared_mlp", since: str = ""
) -> FamilySpec:
    """Return the entry of Granite-MoE or a copy; a shared MLP sits on the decoder layer."""
    return FamilySpec(
        model_types=(module,),
        module=module,
        block=f"{prefix}MoE",
        router=f"{prefix}TopKRouter",
        experts=f"{prefix}Experts",
        router_attr="router",
        logits=linear_then_fp32,
        routing=topk_softmax,
        params={"top_k": "top_k"},
        weights_dtype="hidden",
        shared_by_block=shared,
        since=since,
    )


FAMILIES = (
    GPT_OSS,
    ARIA,
    # Before 5.21 these routers returned their three results in another order.
    granite_like("GraniteMoe", "granitemoe", shared=None, since="5.21"),
    granite_like("GraniteMoeShared", "granitemoeshared", since="5.21"),
    granite_like("GraniteMoeSWA", "granitemoe_swa"),
    granite_like("GraniteMoeHybrid", "granitemoehybrid", since="5.21"),
)
