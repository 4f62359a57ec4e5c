"""Models with random weights, spread over the ranks of a study in each layout."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from moe_patch import patch_model
from moe_patch.expert_parallel import attach_adapter

# Qwen3-30B-A3B with a smaller vocabulary.
CARD = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "vocab_size": 16384,
}  # fmt: skip
TINY = {
    "hidden_size": 32, "moe_intermediate_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 96,
}  # fmt: skip
# Releases of transformers that exchange tokens; older ones divide the experts alone.
EXCHANGES = "ep_implementation" in {field.name for field in fields(DistributedConfig)}
LORA_LAYOUTS = ("one", "ddp", "fsdp2", "ep", "ep_tp", "ep_fsdp2")


def expert_options(layout: str, world: int) -> tuple[dict[str, Any], int]:
    """Return transformers' options for divided experts, and the batches of one step.

    ``ep`` has each expert on one rank, and FSDP2 around the dense layers; ``ep_tp`` has tensor
    parallelism there, so that ranks share a batch. ``ep_fsdp2`` has two copies of the experts,
    each divided over half of the ranks, and FSDP2 across the copies.

    Raises:
        ValueError: the layout needs more ranks or another release.
    """
    if layout == "ep" and not EXCHANGES:
        return {"tp_size": world, "enable_expert_parallel": True}, 1
    if not EXCHANGES:
        raise ValueError(f"{layout} needs a transformers with ep_implementation; accepted: ep")
    if layout == "ep":
        return {"fsdp_size": world, "ep_size": world}, world
    if layout == "ep_tp":
        return {"tp_size": world, "ep_size": world, "ep_implementation": "all_to_all"}, 1
    if world < 4:
        raise ValueError(f"ep_fsdp2 on {world} ranks is fsdp2; it needs 4 or more")
    return {"fsdp_size": world, "ep_size": world // 2}, world


def random_model(
    sizes: dict[str, Any], layers: int, options: dict[str, Any], device: torch.device
) -> Any:
    """Make a model with equal weights on every rank, placed by ``options``; use no files.

    With options, all experts of a layer start equal, because their whole tensors might not fit.
    """
    config = Qwen3MoeConfig(**sizes, num_hidden_layers=layers, output_router_logits=False)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM._from_config(
            config, dtype=torch.bfloat16, experts_implementation="grouped_mm"
        )
    generator = torch.Generator(device).manual_seed(0)
    if not options:
        for module in model.modules():
            for name, value in module._parameters.items():
                if value is not None:
                    setattr(module, name, nn.Parameter(_drawn(value, device, generator)))
        with torch.device(device):
            model.model.rotary_emb = type(model.model.rotary_emb)(config)
        return model.train()
    weights = {}
    for name, value in model.state_dict().items():
        if value.dim() != 3:
            weights[name] = _drawn(value, device, generator)
            continue
        # One expert for all: nothing large is in memory, and transformers copies what it expands.
        weights[name] = _drawn(value[0], device, generator).expand(value.shape)
    model = Qwen3MoeForCausalLM.from_pretrained(
        None, config=config, state_dict=weights, dtype=torch.bfloat16,
        experts_implementation="grouped_mm", distributed_config=DistributedConfig(**options),
    )  # fmt: skip
    _check_copied(model)
    return model.train()


def _check_copied(model: Any) -> None:
    """Raise a RuntimeError if a parameter has less memory than its own elements take."""
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if not local.is_contiguous():
            raise RuntimeError(
                f"{name} was not copied: strides {local.stride()}; peaks of memory would be wrong"
            )


def _drawn(like: Any, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Return a random matrix, or a vector around one, of the shape of ``like``."""
    drawn = torch.empty(like.shape, device=device, dtype=torch.bfloat16)
    return drawn.normal_(mean=float(like.dim() == 1), std=0.02, generator=generator)


def adapted(
    sizes: dict[str, Any], layers: int, layout: str, world: int, rank_of_lora: int,
    device: torch.device, checkpointing: bool,
) -> tuple[Any, Any, int]:  # fmt: skip
    """Make a patched model with fp32 adapters on all experts.

    Returns:
        The model, what a step calls (it may be wrapped), and the number of batches of a step.
    """
    torch.manual_seed(0)
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(
        r=rank_of_lora, lora_alpha=rank_of_lora, target_modules=[], target_parameters=parameters
    )
    batches = world
    if layout.startswith("ep"):
        options, batches = expert_options(layout, world)
        model = attach_adapter(random_model(sizes, layers, options, device), config)
    else:
        model = random_model(sizes, layers, {}, device)
        with torch.device(device):  # PEFT draws the factors on the CPU otherwise.
            model = get_peft_model(model, config)
    model = patch_model(model, fuse_lora="require")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if layout == "ddp":
        return model, data_parallel(model, device), batches
    if layout == "fsdp2":
        shard(model)
    return model, model, batches


def data_parallel(model: Any, device: torch.device) -> DistributedDataParallel:
    """Wrap a model in DDP."""
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


def shard(model: Any) -> Any:
    """Shard a model by FSDP2, one unit a decoder layer."""
    for module in model.modules():
        if type(module).__name__.endswith("DecoderLayer"):
            fully_shard(module)
    return fully_shard(model)


def reduces(model: Any, yes: bool) -> None:
    """Set whether the next backward reduces gradients over ranks, for gradient accumulation."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = yes
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(yes, recurse=False)
