"""Models of true sizes with random weights, made directly in the storage that a run trains on.

Sizes are those of the published configurations; only layers may be left out. No 16-bit weight of a
packed expert ever exists, and nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from moe_patch.formats.packed import PackedWeight, pack
from moe_patch.formats.tensor import QuantTensor, parameter
from moe_patch.quant import state
from moe_patch.quant.surgery import Projection, expert_projections
from moe_patch.train.frozen import quantize_embedding, quantize_linears

# Sizes as published; keys that are left out have the defaults of the config class.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 40960,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
        "num_experts_per_tok": 4, "sliding_window": 128,
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": False,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "max_position_embeddings": 131072,
    },
}  # fmt: skip
# Widths for a dry run without a card; heads, experts and choices stay.
SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def config_of(name: str, layers: int | None = None, small: bool = False) -> Any:
    """Return a model's config, with some of its layers only if ``layers`` says so."""
    sizes = dict(MODELS[name])
    if layers is not None:
        sizes["num_hidden_layers"] = layers
    if small:
        sizes |= {key: value for key, value in SMALL.items() if key in sizes}
    return AutoConfig.for_model(sizes.pop("model_type"), **sizes)


def meta_model(config: Any) -> Any:
    """Return the model in bf16 on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def fill(
    model: Any,
    storage: str,
    linear: str,
    device: torch.device,
    embedding: str = "bf16",
    home: torch.device | None = None,
) -> Any:
    """Give a meta model random weights on ``device``, in their storages.

    What bitsandbytes packs comes first, and so is in 16 bits only before the experts are there.

    Args:
        model: as meta_model returns it.
        storage: of the experts: "bf16", "nf4", "fp8" or "mxfp4".
        linear: of the frozen Linear modules: "bf16" or "nf4".
        device: the device that trains.
        embedding: of the frozen input embedding: "bf16" or "nf4".
        home: the device of packed experts; None is ``device``.
    """
    trained = storage == "bf16"
    if embedding != "bf16":
        fill_module(model.get_input_embeddings(), device, trained)
        quantize_embedding(model)
    if linear != "bf16":
        head = model.get_output_embeddings()
        for module in model.modules():
            if type(module) is nn.Linear and module is not head:
                fill_module(module, device, trained)
        quantize_linears(model)
    if storage != "bf16":
        for one in expert_projections(model):
            packed = QuantTensor(random_packed(one, storage, device)).to(home or device)
            setattr(one.module, one.name, parameter(packed))
            state.watch(one.module)
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    for module in model.modules():
        fill_module(module, device, trained)
    return model


def fill_module(module: Any, device: torch.device, trained: bool) -> None:
    """Replace what a module itself still has on the meta device by random values on ``device``."""
    for name, value in module._parameters.items():
        if value is not None and value.is_meta:
            filled = torch.empty_like(value, device=device)
            filled = filled.normal_(std=0.02) if value.dim() > 1 else filled.fill_(1.0)
            if name.endswith("bias"):
                filled.zero_()
            setattr(module, name, nn.Parameter(filled, requires_grad=trained))
    for name, value in module._buffers.items():
        if value is not None and value.is_meta:
            module._buffers[name] = torch.zeros_like(value, device=device)


def random_packed(one: Projection, storage: str, device: torch.device) -> PackedWeight:
    """Return random packed experts of realistic scale: scales of one real expert for all.

    MXFP4 is stored [E, out, in], as gpt-oss's checkpoints have it; the others as the module.
    """
    E, rows, columns = one.stored.shape
    if storage == "mxfp4":
        if one.transposed:
            rows, columns = columns, rows
        packed = torch.randint(0, 256, (E, rows, columns // 2), device=device, dtype=torch.uint8)
        scales = torch.full((E, rows, columns // 32), 120, device=device, dtype=torch.uint8)
        return PackedWeight(storage, packed, (scales,), torch.bfloat16, one.transposed)
    sample = torch.randn(1, rows, columns, device=device, dtype=torch.bfloat16) * columns**-0.5
    first = pack(sample, storage, device, one.where)
    if storage == "fp8":
        values = first.packed.expand(E, -1, -1).contiguous()
        return PackedWeight(storage, values, (first.scales[0].repeat(E, 1, 1),), first.dtype)
    absmax, nested, code, offset, levels = first.scales
    packed = torch.randint(0, 256, (E, rows, columns // 2), device=device, dtype=torch.uint8)
    absmax = absmax.repeat(E)
    nested = nested.mean().expand(-(-absmax.numel() // 256)).contiguous()
    return PackedWeight(storage, packed, (absmax, nested, code, offset, levels), first.dtype)
