"""Restore checkpoints of full fine-tuning, including the experts' weights.

transformers' Trainer (5.24) loads a checkpoint's tensors into the model by their names in the file.
Files name each single expert, so the merged parameters find no tensor and keep their old values,
with one warning about missing keys. ``from_pretrained`` merges the experts correctly.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, Trainer

FILES = ("model.safetensors", "model.safetensors.index.json")


def restore(trainer: Trainer, folder: str | Path) -> None:
    """Load the weights of a checkpoint into a Trainer's model, in place.

    Adapters, and weights that FSDP or DeepSpeed shard, are restored correctly elsewhere; for them
    this does nothing.

    Args:
        trainer: before its training.
        folder: a checkpoint saved by it or by a similar Trainer.
    """
    model = trainer.model
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return
    whole = any((Path(folder) / name).is_file() for name in FILES)
    if not isinstance(model, PreTrainedModel) or not whole:
        return
    found = type(model).from_pretrained(folder, dtype=model.dtype)
    model.load_state_dict(found.state_dict())
