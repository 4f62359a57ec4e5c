"""A callback for what Trainer's checkpoints lack: merged weights come back, adapters know a base.

Full fine-tunings resume, and load their best model, with all weights of the checkpoint: see
:mod:`moe_patch.tools.checkpoint_loading`. Checkpoints of adapters note which base they are of: see
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
    """Watches the Trainer's model for weights that a checkpoint has under other names.

    Raises:
        UnsupportedOptionError: when training begins or ends, a checkpoint that was loaded lacks
            weights; when training begins, a model of ``model_init`` was resumed unseen.
    """

    def __init__(self) -> None:
        self.bases: dict[int, Base | None] = {}

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Watch the model before the Trainer loads anything."""
        watch_loading(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Refuse a checkpoint that was loaded in part; watch a model of ``model_init``."""
        if state.global_step and watching(model) is None:
            _refuse_unseen(model)
        watch_loading(model)
        check_loaded(model)
        self.bases[id(model)] = base_of(model)

    def on_save(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Note the base of adapters in the checkpoint that was just written."""
        note_checkpoint(args, state, self.bases.get(id(model)))

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Refuse a best model that was loaded in part."""
        self.bases.pop(id(model), None)
        check_loaded(model)


def _refuse_unseen(model: Any) -> None:
    """Refuse to resume a model that was made after the callback had seen another.

    Raises:
        UnsupportedOptionError: weights of it are stored under other names.
    """
    if isinstance(model, PreTrainedModel) and any(True for _ in conversion_groups(model)):
        raise UnsupportedOptionError(
            "Trainer: model_init and resume_from_checkpoint together leave merged experts as they "
            "were built, and no callback sees the model before; accepted: Trainer(model=...)"
        )
