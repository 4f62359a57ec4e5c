"""A callback for Hugging Face Trainer and everything built on it, such as TRL.

    trainer = Trainer(model, args, callbacks=[MoePatchCallback()])

The model is patched when the Trainer is built, before it is wrapped for data parallelism. It is
checked again when training begins: ``model_init`` may have made a new model, adapters may have been
added, or another library may have replaced a forward. One line in the log (logger ``moe_patch``,
level INFO, first rank) says what was patched.

Checkpoints load with all their weights: see :mod:`moe_patch.integrations.checkpoints`.
"""

from __future__ import annotations

import logging
from typing import Any

from moe_patch.config import PatchConfig
from moe_patch.errors import UnsupportedOptionError
from moe_patch.integrations.announce import LOGGER, announce
from moe_patch.integrations.checkpoints import CheckpointCallback
from moe_patch.patching.patch import patch_model


class MoePatchCallback(CheckpointCallback):
    """Patch the Trainer's model, which stays patched afterwards.

    Args:
        config: as for :func:`moe_patch.patch_model`; False leaves the model alone.
        logger: logger for the line about a patched model.
        options: single options, see :class:`moe_patch.PatchConfig`.

    Raises:
        UnsupportedOptionError: at construction, an option is unknown or wrong. When the Trainer is
            built, an argument of the Trainer would replace the patch. Later errors: see
            :class:`~moe_patch.integrations.checkpoints.CheckpointCallback`.
        UnsupportedModelError: when the Trainer is built, see :func:`moe_patch.patch_model`.
    """

    def __init__(
        self, config: Any = None, *, logger: logging.Logger = LOGGER, **options: Any
    ) -> None:
        super().__init__()
        self.config = PatchConfig.parse(config, **options)
        self.logger = logger
        self.said = ""

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Patch the model; with ``model_init``, the Trainer already has a first model here."""
        if self.config is not None:
            _refuse_conflicts(args)
            self._patch(model)
            super().on_init_end(args, state, control, model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Patch new modules, and refuse to train modules that no longer run the patched forward."""
        if self.config is not None:
            self._patch(model)
            super().on_train_begin(args, state, control, model)

    def _patch(self, model: Any) -> None:
        patch_model(model, self.config)
        self.said = announce(model, self.said, self.logger)


def _refuse_conflicts(args: Any) -> None:
    if args.use_liger_kernel and (args.liger_kernel_config or {}).get("swiglu", True):
        raise UnsupportedOptionError(
            "TrainingArguments: use_liger_kernel=True replaces the experts' forward when training "
            "begins; accepted: liger_kernel_config={'swiglu': False}, or no MoePatchCallback"
        )
    if args.n_gpu > 1:
        raise UnsupportedOptionError(
            f"TrainingArguments: {args.n_gpu} GPUs in one process make the Trainer use "
            "nn.DataParallel, whose copies run the first device's weights; start one process per "
            "GPU (accelerate launch or torchrun), or set CUDA_VISIBLE_DEVICES to one"
        )
