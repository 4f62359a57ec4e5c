"""Trainer callback that restores merged weights and records the base of adapters.

Full fine-tunings resume, and load their best model, with all weights of the checkpoint: see
:mod:`moe_patch.tools.checkpoint_loading`. Checkpoints of adapters record their base: see
:mod:`moe_patch.tools.base_identity`.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, TrainerCallback

from moe_patch.errors import UnsupportedOptionError
from moe_patch.tools.base_identity import Base, base_of, note_checkpoint
from moe_patch.tools.checkpoint_loading import (
    check_loaded,
    conversion_groups,
    watch_loading,
    watching,
)


class CheckpointCallback(TrainerCallback):
    """Convert weights that a checkpoint stores under other names, in the Trainer's model.

    Raises:
        UnsupportedOptionError: a loaded checkpoint lacks weights (raised when training begins or
            ends), or a model of ``model_init`` was resumed without the hook (when it begins).
    """

    def __init__(self) -> None:
        self.bases: dict[int, Base | None] = {}

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Add the hook to the model before the Trainer loads anything."""
        watch_loading(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Refuse a partly loaded checkpoint; add the hook to a model of ``model_init``."""
        if state.global_step and watching(model) is None:
            _refuse_unseen(model)
        watch_loading(model)
        check_loaded(model)
        self.bases[id(model)] = base_of(model)

    def on_save(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Record the base of adapters in the checkpoint that was just written."""
        note_checkpoint(args, state, self.bases.get(id(model)))

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Refuse a partly loaded best model."""
        self.bases.pop(id(model), None)
        check_loaded(model)


def _refuse_unseen(model: Any) -> None:
    """Refuse to resume a model that was created without the callback's hook.

    Raises:
        UnsupportedOptionError: some of the model's weights are stored under other names.
    """
    if isinstance(model, PreTrainedModel) and any(True for _ in conversion_groups(model)):
        raise UnsupportedOptionError(
            "Trainer: model_init and resume_from_checkpoint together would leave merged experts "
            "at their initial values, because no callback gets the model before the checkpoint "
            "is loaded; accepted: Trainer(model=...)"
        )
