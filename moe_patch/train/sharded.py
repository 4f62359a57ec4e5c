"""Gather weights that several processes hold in parts (FSDP, ZeRO-3) after training."""

from __future__ import annotations

from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import Trainer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from moe_patch.errors import UnsupportedOptionError


def gather(trainer: Trainer) -> dict[str, Tensor] | None:
    """Gather all weights of a trained model on the first process's CPU; every process calls this.

    Returns:
        None if each process holds the whole model anyway; otherwise the state by name, which is
        complete only on the first process.

    Raises:
        UnsupportedOptionError: DeepSpeed is not configured to gather ZeRO-3 weights.
    """
    accelerator = trainer.accelerator
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


def size(parameter: nn.Parameter) -> int:
    """Return the number of elements of a parameter, also of one that ZeRO-3 keeps in parts."""
    return parameter.ds_numel if hasattr(parameter, "ds_numel") else parameter.numel()
