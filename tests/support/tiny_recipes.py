"""The recipes of tiny_models.py: a small config of every MoE family of transformers, as data.

A new family is one line in FAMILIES. The sizes below apply where a config class declares the name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SIZES: dict[str, Any] = {
    # trunk
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "initializer_range": 0.2, "sliding_window": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "kv_channels": 8, "unpadded_vocab_size": 90,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 99,
    "attention_dropout": 0.0, "output_router_logits": True, "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0, "n_layers_per_attn_res_block": 2,
    # Latent, sliding-window and indexed attention.
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "o_groups": 2, "o_lora_rank": 8, "d_rel": 4, "rel_extent": 16,
    "sliding_window_size": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
    "swa_head_dim": 8, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8,
    # Linear attention and state spaces.
    "linear_head_dim": 8, "linear_num_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "mamba_d_state": 8, "mamba_dt_rank": 4, "mamba_n_heads": 8, "mamba_d_head": 8,
    "mamba_n_groups": 1, "mamba_chunk_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8,
    "n_groups": 1, "ssm_state_size": 8, "chunk_size": 8,
    # experts and routing
    "intermediate_size": 24, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24, "shared_intermediate_size": 24,
    "shared_experts_intermediate_size": 24, "dense_intermediate_size": 24,
    "intermediate_size_mlp": 24, "ffn_hidden_size": 24, "expert_ffn_hidden_size": 16,
    "moe_hidden_size": 16, "router_hidden_size": 16,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2,
    "zero_expert_num": 2, "num_layers": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 0, "num_dense_layers": 0,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """One family's recipe.

    Attributes:
        over: config values beyond SIZES; None for a SIZES key leaves the config's own default.
        config, model: "folder:ClassName" where the auto classes of transformers do not lead there.
        block_alone: the block's forward takes hidden states alone and can be called by itself.
        extra: values that the config takes without declaring them.
        feed: input of the model: "ids", "embeds", "pixels", "patches", "seq2seq" or "modalities"
            (ids of text and images).
        since: the first transformers release whose own model runs with this recipe, where its
            folder is older than that.
        later: fields that tests set -> the first release whose config declares them, where the
            recipe runs on older releases too.
    """

    over: dict[str, Any] = field(default_factory=dict)
    config: str | None = None
    model: str | None = None
    block_alone: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    feed: str = "ids"
    since: str = ""
    later: dict[str, str] = field(default_factory=dict)


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MHA = {"num_key_value_heads": 4}
SPARSE = {"mlp_layer_types": ["sparse", "sparse"]}
# On by default in some families; releases before 5.18 then fail if there are labels.
NO_AUX = {"output_router_logits": False}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}


def tower(folder: str, name: str, model: str = "Model", since: str = "", **over: Any) -> Tiny:
    """Return a text tower of a larger model: classes ``{name}Config`` and ``{name}{model}``."""
    base = name.removesuffix("Text") if model == "ForCausalLM" else name
    return Tiny(over, f"{folder}:{name}Config", f"{folder}:{base}{model}", since=since)


def mrope(*sections: int) -> dict[str, Any]:
    """Rotary parameters of a model with temporal, height and width positions."""
    return {**ROPE, "mrope_section": list(sections)}


FAMILIES: dict[str, Tiny] = {
    "afmoe": Tiny(),
    "aria": Tiny({}, "aria:AriaTextConfig", "aria:AriaTextForCausalLM"),
    "axk1": Tiny(MHA),
    "axk2": Tiny(MHA),
    "bailing_hybrid": Tiny(HYBRID | MHA | SPARSE),
    "beam": Tiny({"mlp_layer_types": ["dense", "sparse"]}),
    "cohere2_moe": Tiny(),
    # Before 5.16, DBRX's own experts accept no width other than the hidden size.
    "dbrx": Tiny(
        NO_AUX
        | {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {
                "hidden_size": 32,
                "ffn_hidden_size": 16,
                "moe_num_experts": 8,
                "moe_top_k": 2,
            },
        },
        since="5.16",
    ),  # fmt: skip
    "deepseek_ocr2": tower("deepseek_ocr2", "DeepseekOcr2Text", **SPARSE),
    # Before 5.13, DeepSeek-V2's block reads an attribute that it does not have.
    "deepseek_v2": Tiny(MHA | {"topk_method": "group_limited_greedy"}, since="5.13"),
    "deepseek_v2_greedy": tower(
        "deepseek_v2", "DeepseekV2", "ForCausalLM", **MHA, topk_method="greedy"
    ),
    "deepseek_v3": Tiny(MHA),
    "deepseek_v32": Tiny(MHA),
    "deepseek_v4": Tiny(
        {"mlp_layer_types": ["hash_moe", "moe"], "num_key_value_heads": 1}, block_alone=False
    ),
    "diffusion_gemma": Tiny(
        {},
        "diffusion_gemma:DiffusionGemmaTextConfig",
        "diffusion_gemma:DiffusionGemmaEncoderTextModel",
        since="5.16",
    ),
    # Before 5.18, Doge's decoder layer treats the block's tuple as a tensor.
    "doge": Tiny({"is_moe": True, "num_experts": 16}, since="5.18"),
    "dots1": Tiny(),
    "dots3_note": tower("dots3_note", "Dots3NoteText", "ForCausalLM", **MHA),
    "dots3_note_vision": Tiny(
        {"patch_size": 14, "num_local_experts": None},
        "dots3_note:Dots3NoteVisionConfig",
        "dots3_note:Dots3NoteVisionModel",
        extra={"pyramid_num_routed": [-1, 8], "adapter_in_dim": 32, "adapter_out_dim": 32},
        feed="patches",
    ),
    "ernie4_5_moe": Tiny(),
    "ernie4_5_vl_moe": Tiny(
        SPARSE | {"moe_intermediate_size": [24, 16], "rope_parameters": mrope(1, 1, 2)},
        "ernie4_5_vl_moe:Ernie4_5_VLMoeTextConfig",
        "ernie4_5_vl_moe:Ernie4_5_VLMoeTextModel",
        feed="modalities",
    ),
    "exaone_moe": Tiny(),
    "flex_olmo": Tiny({"intermediate_size": 16}),
    "flint": Tiny(),
    "gemma4": tower("gemma4", "Gemma4Text", "ForCausalLM", enable_moe_block=True),
    "glm4_moe": Tiny(),
    "glm4_moe_lite": Tiny(MHA),
    "glm4v_moe": tower(
        "glm4v_moe",
        "Glm4vMoeText",
        rope_parameters={**mrope(1, 1, 2), "partial_rotary_factor": 1.0},
    ),
    "glm5_next": tower(
        "glm5_next",
        "Glm5NextText",
        since="5.18",
        index_kpool=4,
        qk_rope_head_dim=0,
        layer_types=["linear_attention", "indexed_attention"],
        **MHA,
        **SPARSE,
    ),
    # Before 5.13, the fields of GLM's config yield dense layers only.
    "glm_moe_dsa": Tiny(MHA, since="5.13"),
    "gpt_oss": Tiny(
        {"intermediate_size": 16, "rope_parameters": ROPE}, later={"swiglu_limit": "5.19"}
    ),
    "granitemoe": Tiny({"intermediate_size": 16} | NO_AUX),
    "granitemoe_swa": Tiny({"intermediate_size": 16} | NO_AUX),
    "granitemoehybrid": Tiny(HYBRID | {"intermediate_size": 16} | NO_AUX, since="5.13"),
    "granitemoeshared": Tiny({"intermediate_size": 16} | NO_AUX),
    "hunyuan_v1_moe": Tiny({"intermediate_size": 16}),
    "hy_v3": Tiny(),
    "hy_v4": Tiny(MHA),
    "hy_v4_vl": tower("hy_v4_vl", "HYV4VLText", rope_parameters=mrope(1, 1, 0), **MHA),
    "inkling": tower("inkling", "InklingText", "ForCausalLM"),
    "inkling2": tower("inkling2", "Inkling2Text", "ForCausalLM"),
    "inkling2_loop": tower("inkling2_loop", "Inkling2LoopText", "ForCausalLM"),
    "jamba": Tiny(
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "use_mamba_kernels": False,
        }
    ),  # fmt: skip
    "jetmoe": Tiny(block_alone=False),
    "kimi_linear": Tiny(HYBRID | MHA | SPARSE),
    "kolibri1": Tiny(),
    "laguna": Tiny(),
    "lara_mini": Tiny(),
    "lfm2_moe": Tiny({"layer_types": ["conv", "full_attention"]}),
    "llama4": tower("llama4", "Llama4Text", "ForCausalLM"),
    "longcat_flash": Tiny(MHA | {"head_dim": 4}),
    "mellum": Tiny(),
    "mimo_v2_flash": Tiny(),
    "minimax": Tiny({"intermediate_size": 16}),
    "minimax_m2": Tiny({"intermediate_size": 16}),
    "minimax_m3_vl": tower("minimax_m3_vl", "MiniMaxM3VLText", "ForCausalLM"),
    "mistral4": Tiny(MHA, model="mistral4:Mistral4ForCausalLM"),
    "mistral_large4": tower("mistral_large4", "MistralLarge4Text", **MHA),
    "mixtral": Tiny({"intermediate_size": 16}),
    "muse_spark": tower("muse_spark", "MuseSparkText"),
    "nemotron_h": Tiny(),
    "nllb_moe": Tiny(
        {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_sparse_step": 2,
            "decoder_sparse_step": 2,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
        },
        "nllb_moe:NllbMoeConfig",
        "nllb_moe:NllbMoeForConditionalGeneration",
        feed="seq2seq",
    ),  # fmt: skip
    "olmoe": Tiny({"intermediate_size": 16}),
    "openai_privacy_filter": Tiny(
        {"intermediate_size": 16},
        "openai_privacy_filter:OpenAIPrivacyFilterConfig",
        "openai_privacy_filter:OpenAIPrivacyFilterModel",
    ),
    "phimoe": Tiny({"intermediate_size": 16}),
    "qwen2_moe": Tiny(),
    "qwen3_5_moe": tower("qwen3_5_moe", "Qwen3_5MoeText", "ForCausalLM", **HYBRID),
    "qwen3_moe": Tiny({"norm_topk_prob": True}),
    "qwen3_next": Tiny(HYBRID),
    "qwen3_omni_moe": Tiny(
        {},
        "qwen3_omni_moe:Qwen3OmniMoeTextConfig",
        "qwen3_omni_moe:Qwen3OmniMoeThinkerTextModel",
    ),
    "qwen3_omni_moe_talker": Tiny(
        {},
        "qwen3_omni_moe:Qwen3OmniMoeTalkerTextConfig",
        "qwen3_omni_moe:Qwen3OmniMoeTalkerModel",
        extra={"shared_expert_intermediate_size": 24},
        feed="embeds",
    ),
    "qwen3_vl_moe": tower("qwen3_vl_moe", "Qwen3VLMoeText"),
    "qwen4_exp": tower(
        "qwen4_exp",
        "Qwen4ExpText",
        "ForCausalLM",
        since="5.18",
        layer_types=["linear_attention", "indexed_attention"],
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=8,
        indexer_compress_ratio=4,
    ),
    "sarvam_mla": Tiny(MHA, model="deepseek_v3:DeepseekV3ForCausalLM"),
    "sarvam_moe": Tiny(model="glm4_moe:Glm4MoeForCausalLM"),
    "solar_open": Tiny(),
    "step3p7": tower(
        "step3p7",
        "Step3p7Text",
        mlp_layer_types=["dense", "sparse"],
        swiglu_limits=[None, 7.0],
    ),
    "switch_transformers": Tiny(
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_heads": 4,
            "dropout_rate": 0.0,
        },
        "switch_transformers:SwitchTransformersConfig",
        "switch_transformers:SwitchTransformersForConditionalGeneration",
        feed="seq2seq",
    ),  # fmt: skip
    "unlimited_ocr": tower("unlimited_ocr", "UnlimitedOcrText", **MHA),
    "vitpose_backbone": Tiny(
        {"image_size": [32, 32], "patch_size": [16, 16], "part_features": 8},
        "vitpose_backbone:VitPoseBackboneConfig",
        "vitpose_backbone:VitPoseBackbone",
        block_alone=False,
        extra={"out_indices": [2]},
        feed="pixels",
    ),
    "zaya": Tiny({"num_experts_per_tok": 1}, block_alone=False),
}
