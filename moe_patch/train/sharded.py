"""Weights that several processes hold in parts (FSDP, ZeRO-3): checks before, gathering after."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from moe_patch.config import PatchConfig
from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.patching.patch import patch_model
from moe_patch.quant.sharded_state import is_sharded, rank0_only
from moe_patch.train import build
from moe_patch.train.adapters import add_adapters
from moe_patch.train.config import TrainConfig


def check_packed() -> None:
    """Refuse ways of sharding that cannot hold experts in 4 or 8 bits.

    Raises:
        UnsupportedOptionError: DeepSpeed ZeRO-3, or FSDP in its first version.
    """
    accepted = (
        "accepted: FSDP2 (configs/accelerate/fsdp2.yaml) or DDP (configs/accelerate/ddp.yaml)"
    )
    if is_deepspeed_zero3_enabled():
        raise UnsupportedOptionError(
            "quantize_experts: DeepSpeed ZeRO-3 cuts each parameter as one flat tensor of its "
            f"dtype, which bytes with scales are not; {accepted}"
        )
    version = os.environ.get("FSDP_VERSION", "1")  # set by accelerate launch
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and version != "2":
        raise UnsupportedOptionError(
            f"quantize_experts: FSDP {version} joins parameters into one flat tensor of floats; "
            f"{accepted}"
        )


def check_whole(config: TrainConfig) -> None:
    """Refuse to shard weights that bitsandbytes packs, or experts that stay in host memory.

    Raises:
        UnsupportedOptionError: FSDP or DeepSpeed ZeRO-3 together with such weights.
    """
    options = PatchConfig.parse(config.moe_patch)
    whole = {
        "quantize_linear": config.quantize_linear is not None,
        "quantize_embedding": config.quantize_embedding is not None,
        "moe_patch.offload_experts": options is not None and options.offload_experts,
    }
    key = next((key for key, used in whole.items() if used), None)
    fsdp = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if key is not None and (fsdp or is_deepspeed_zero3_enabled()):
        raise UnsupportedOptionError(
            f"{key}: such weights are not sharded; accepted: DDP (configs/accelerate/ddp.yaml), or "
            "quantize_experts alone"
        )


def check_equal(model: Any) -> None:
    """Refuse trained parameters that differ between processes, before the first step.

    FSDP2 would join parts of different adapters without an error. Every process calls this.

    Raises:
        UnsupportedModelError: in every process; names the first parameter that differs.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    sent = rank0_only()  # other processes get their values later
    own = {
        name: (tuple(p.shape), str(p.dtype), None if sent else p.sum(dtype=torch.float64).item())
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    for rank, other in enumerate(ranks):
        for name in sorted(ranks[0].keys() | other.keys()):
            first, found = ranks[0].get(name, "missing"), other.get(name, "missing")
            if first != found:
                raise UnsupportedModelError(
                    f"{name}: (shape, dtype, sum) is {first} on rank 0 and {found} on rank {rank}; "
                    "accepted: equal adapters on all ranks (the same LoraConfig and seed, or the "
                    "same adapter loaded everywhere)"
                )


def holds_parts(model: Any) -> bool:
    """Return whether a model has packed experts in parts."""
    return any(is_sharded(p) for p in model.parameters())


def gather_trained(model: Any) -> dict[str, Tensor]:
    """Gather the trained parameters of an FSDP2 model on each process's CPU, one at a time."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().cpu()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def gather(trainer: Trainer) -> dict[str, Tensor] | None:
    """Gather all weights of a trained model on the first process's CPU; every process calls this.

    Returns:
        None if each process holds the whole model anyway; otherwise the state by name, which is
        complete only on the first process. Of a model with packed experts, the trained weights.

    Raises:
        UnsupportedOptionError: DeepSpeed is not configured to gather ZeRO-3 weights.
    """
    accelerator = trainer.accelerator
    if holds_parts(trainer.model_wrapped):
        return gather_trained(trainer.model_wrapped)
    if accelerator.distributed_type not in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        return None
    try:
        state = accelerator.get_state_dict(trainer.model_wrapped)
    except ValueError as error:
        raise UnsupportedOptionError(
            "DeepSpeed: ZeRO-3 weights cannot be saved as one model; set zero3_save_16bit_model: "
            "true in accelerate's configuration (stage3_gather_16bit_weights_on_model_save)"
        ) from error
    # Models that the first process builds from here on are whole.
    unset_hf_deepspeed_config()
    return state or {}


def rebuild(config: TrainConfig, tokenizer: Any, state: dict[str, Tensor]) -> Any:
    """Return the whole trained model on the CPU: one device may be too small for it.

    It is unpatched, unless its experts are packed, which transformers' own code cannot run.

    Args:
        state: the result of :func:`gather`.
    """
    storage = config.quantize_experts
    base = build.build_base(config.model, tokenizer, config.seed, storage)
    model = add_adapters(base, config.lora, config.seed, config.adapter_dtype)
    # Of packed models only the adapters were gathered: the rest is as it was read.
    model.load_state_dict(state, strict=storage is None)
    return model if storage is None else patch_model(model, config.moe_patch)


def size(parameter: nn.Parameter) -> int:
    """Return the number of elements of a parameter, also of one that ZeRO-3 keeps in parts."""
    return parameter.ds_numel if hasattr(parameter, "ds_numel") else parameter.numel()
