"""Families whose routing can be recorded and replayed, and those that are refused by name."""

from __future__ import annotations

import pytest
import torch

from moe_patch import (
    UnsupportedModelError,
    UnsupportedOptionError,
    record,
    record_routing,
    replay_routing,
    supported_model_types,
)
from tests.support import tiny_models
from tests.support.replay_cases import other_experts, patched, traced

OWN = "run a forward of their own"
REFUSED = {
    "dbrx": f"the routers of dbrx {OWN}",
    "deepseek_v4": f"the routers of deepseek_v4 {OWN}",
    "doge": "the block routes without a known router module",
    "inkling": f"the routers of inkling_text {OWN}",
    "jetmoe": f"the routers of jetmoe {OWN}",
    "llama4": f"the routers of llama4_text {OWN}",
    "phimoe": f"the routers of phimoe {OWN}",
    "zaya": f"the routers of zaya {OWN}",
}
# Text and image tokens have layers of their own, so no trace holds both.
UNEVEN = {"ernie4_5_vl_moe": "every layer sees the same tokens"}
# On older releases of transformers only their experts are patched.
ROUTED_BY_TRANSFORMERS = {
    "aria", "granitemoe", "granitemoehybrid", "granitemoeshared", "jamba", "lfm2_moe",
}  # fmt: skip
REPLAYED = (
    "afmoe", "aria", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_ocr2",
    "deepseek_v2", "deepseek_v2_greedy", "deepseek_v3", "deepseek_v32", "diffusion_gemma", "dots1",
    "dots3_note", "dots3_note_vision", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint",
    "gemma4", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm5_next", "glm_moe_dsa", "gpt_oss",
    "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe",
    "hy_v3", "hy_v4", "hy_v4_vl", "inkling2", "inkling2_loop", "jamba", "kimi_linear", "kolibri1",
    "laguna", "lara_mini", "lfm2_moe", "longcat_flash", "mellum", "mimo_v2_flash", "minimax",
    "minimax_m2", "minimax_m3_vl", "mistral4", "mistral_large4", "mixtral", "muse_spark",
    "nemotron_h", "olmoe", "openai_privacy_filter", "qwen2_moe", "qwen3_5_moe", "qwen3_moe",
    "qwen3_next", "qwen3_omni_moe", "qwen3_omni_moe_talker", "qwen3_vl_moe", "qwen4_exp",
    "sarvam_mla", "sarvam_moe", "solar_open", "step3p7", "unlimited_ocr",
)  # fmt: skip


def full(name: str) -> bool:
    """Say whether this release's block is patched with its router."""
    return supported_model_types()[tiny_models.config(name).model_type] == "full"


def test_every_family_is_replayed_or_refused_by_name() -> None:
    """A recipe that is in no list, or in two, belongs into one of them."""
    known = [*REPLAYED, *REFUSED, *UNEVEN]
    assert len(known) == len(set(known))
    assert {*tiny_models.patchable()} <= {*known}
    here = [name for name in REPLAYED if name in tiny_models.patchable()]
    assert {name for name in here if not full(name)} <= ROUTED_BY_TRANSFORMERS
    assert len(REPLAYED) >= 60


@pytest.mark.routers
@pytest.mark.parametrize("model_type", tiny_models.patchable())
def test_a_forward_uses_the_experts_of_the_trace(model_type) -> None:
    """In every layer, with ids that its router does not choose."""
    model = patched(model_type).eval()
    refused = REFUSED.get(model_type)
    if model_type in ROUTED_BY_TRANSFORMERS and not full(model_type):
        refused = "transformers routes this block"
    if refused is not None:
        with (
            pytest.raises(UnsupportedModelError, match=refused),
            record_routing(model),
        ):
            pass
        return
    batch = tiny_models.inputs(model)
    if model_type in UNEVEN:
        with pytest.raises(UnsupportedOptionError, match=UNEVEN[model_type]):
            traced(model, batch)
        return
    trace = other_experts(traced(model, batch))
    with replay_routing(model, trace), record(model) as recorder, torch.no_grad():
        model(**batch)
    for index, layer in enumerate(recorder.layers.values()):
        assert torch.equal(layer.ids.long(), trace.ids_TLK[:, index].long())
