"""Checkpoints of a full fine-tuning: all weights back, the experts' too.

transformers' Trainer (5.24) puts a checkpoint's tensors into the model by their names in the file.
Files have a name for each single expert, so that the merged parameters find nothing there and stay
as they are, with one warning about missing keys. ``from_pretrained`` merges them.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, Trainer

FILES = ("model.safetensors", "model.safetensors.index.json")


def restore(trainer: Trainer, folder: str | Path) -> None:
    """Put the weights of a checkpoint into a Trainer's model, in place.

    Adapters, and weights that FSDP or DeepSpeed keep in parts, come back by other ways, which are
    right; for them this does nothing.

    Args:
        trainer: before its training.
        folder: a checkpoint that it, or one like it, has saved.
    """
    model = trainer.model
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return
    whole = any((Path(folder) / name).is_file() for name in FILES)
    if not isinstance(model, PreTrainedModel) or not whole:
        return
    found = type(model).from_pretrained(folder, dtype=model.dtype)
    model.load_state_dict(found.state_dict())
