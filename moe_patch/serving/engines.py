"""Layouts of expert adapters that inference engines read, from the source of a named release.

vLLM 0.33.0 (vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl):

- Keys are ``base_model.model.``, the checkpoint's name, and ``.lora_A.weight`` or
  ``.lora_B.weight``.
  Source: vllm/lora/utils.py, ``parse_fine_tuned_lora_name``.
- Each expert and projection has one pair of factors, named as the checkpoint's tensors
  (``experts.0.gate_proj``). All three projections are needed.
  Source: vllm/lora/utils.py, ``process_packed_modules_mapping``.
  Source: vllm/model_executor/layers/fused_moe/routed_experts.py, ``get_expert_mapping``.
- Models with ``is_3d_moe_weight`` read one stacked pair for gate_up_proj under
  ``experts.base_layer``, and one for down_proj under ``experts``.
  A is [experts * r, in] with experts outside. B is [out, r * experts] with experts inside.
  Source: vllm/lora/model_manager.py, ``_stack_moe_lora_weights``.
- The architectures are those of vllm/model_executor/models whose class is a ``SupportsLoRA``.

SGLang 0.5.23 (sglang-0.5.23-cp311-cp311-manylinux_2_34_x86_64.whl):

- Each expert and projection has one pair, named gate_proj, up_proj, down_proj or w1, w3, w2.
  Source: sglang/srt/lora/mem_pool.py (``experts\\.(\\d+)\\.``).
  Source: sglang/srt/lora/lora.py, ``_rename_expert_w_to_proj`` and ``normalize_gate_up_proj``.
- The pairs of q, k and v come together.
  Source: sglang/srt/lora/lora.py, ``normalize_qkv_proj``.
- One r and one lora_alpha hold for the whole adapter.
  Source: sglang/srt/lora/lora_config.py.
- The architectures are those of sglang/srt/models that run a ``FusedMoE``, which
  sglang/srt/lora/lora_manager.py wraps.
  Models that choose modules in ``should_apply_lora`` are left out.
"""

from __future__ import annotations

from typing import NamedTuple

PER_EXPERT, STACKED = "per expert", "stacked"


class Engine(NamedTuple):
    """A release and the layout in which it reads the experts of each architecture."""

    release: str
    layouts: dict[str, str]


_BOTH = (
    "BailingMoeV2ForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM",
    "Ernie4_5_MoeForCausalLM", "ExaoneMoeForCausalLM", "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM", "HYV3ForCausalLM", "LagunaForCausalLM", "Lfm2MoeForCausalLM",
    "MiniMaxM2ForCausalLM", "MixtralForCausalLM", "OlmoeForCausalLM", "PhiMoEForCausalLM",
    "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "SarvamMLAForCausalLM",
    "SarvamMoEForCausalLM",
)  # fmt: skip
_VLLM_ALONE = ("AfmoeForCausalLM", "JambaForCausalLM")
_VLLM_STACKED = (
    "GptOssForCausalLM", "Qwen3VLMoeForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
)  # fmt: skip

ENGINES = {
    "vllm": Engine(
        "vLLM 0.33.0",
        dict.fromkeys((*_BOTH, *_VLLM_ALONE), PER_EXPERT) | dict.fromkeys(_VLLM_STACKED, STACKED),
    ),
    "sglang": Engine("SGLang 0.5.23", dict.fromkeys(_BOTH, PER_EXPERT)),
}

# Linear modules for which both engines run adapters; the router is not among them.
LINEAR = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "q_a_proj",
    "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
)  # fmt: skip
# Modules that an engine runs as one: if one has an adapter, the others need one too.
TOGETHER = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"),
)  # fmt: skip
