"""The axolotl plugin: patches a model after it and its adapters were loaded.

    plugins:
      - moe_patch.MoePatchPlugin
    moe_patch: true          # or a mapping of options, or false; true if left out

One line in the log (logger ``axolotl.moe_patch``, level INFO, first rank) says what was patched.
axolotl 0.21 also loads the plugin by its entry point, in every run: then it acts only where the key
is there. Importing the plugin registers ``experts_implementation: moe_patch``.
Source: the plugin interface of axolotl's documentation (BasePlugin). Only axolotl imports this.
"""

from __future__ import annotations

import logging
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

import moe_patch.integrations.transformers  # noqa: F401
from moe_patch.config import PatchConfig
from moe_patch.errors import UnsupportedOptionError
from moe_patch.integrations.announce import announce
from moe_patch.integrations.checkpoints import CheckpointCallback
from moe_patch.patching.patch import patch_model
from moe_patch.patching.report import patch_report

# axolotl drops what other libraries log below WARNING, by the names of their loggers.
logger = logging.getLogger("axolotl.moe_patch")

EXPERT_KERNELS = ("scattermoe", "sonicmoe")
# Keys of axolotl's Liger plugin that replace the experts' forward: today's and an older one.
LIGER_EXPERTS = ("liger_glu_activation", "liger_swiglu")


class MoePatchArgs(BaseModel):
    """The key that the plugin adds to axolotl's YAML file."""

    moe_patch: bool | dict[str, Any] | None = None


class MoePatchKey(BaseModel):
    """The same key for the entry point, since axolotl inherits from the models of all plugins."""

    moe_patch: bool | dict[str, Any] | None = None


class MoePatchPlugin(BasePlugin):
    """Runs a model's MoE blocks on moe_patch."""

    args: type[BaseModel] = MoePatchArgs

    def get_input_args(self) -> str:
        """The dotted name of the pydantic model of the plugin's keys."""
        return f"{self.args.__module__}.{self.args.__qualname__}"

    def pre_model_load(self, cfg: Any) -> None:
        """Check the options, and refuse axolotl's own expert kernels, before weights load.

        Raises:
            UnsupportedOptionError: an option is unknown or wrong, or two libraries would serve the
                experts.
        """
        if PatchConfig.parse(cfg.moe_patch) is not None:
            _refuse_conflicts(cfg)

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Patch; adapters are there by now, and so is what other plugins wrote into ``cfg``.

        Raises:
            UnsupportedModelError: see :func:`moe_patch.patch_model`.
            UnsupportedOptionError: see :meth:`pre_model_load`.
        """
        self.pre_model_load(cfg)
        before = patch_report(model).summary()
        patch_model(model, cfg.moe_patch)
        if PatchConfig.parse(cfg.moe_patch) is not None:
            announce(model, before, logger)

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """What a full fine-tuning's checkpoints need; none where nothing is patched."""
        return [] if PatchConfig.parse(cfg.moe_patch) is None else [CheckpointCallback()]


class MoePatchByKey(MoePatchPlugin):
    """The plugin of the entry point, for axolotl files that say ``moe_patch:`` and nothing else."""

    args = MoePatchKey

    def pre_model_load(self, cfg: Any) -> None:
        """As in the base class, where the key is there."""
        if cfg.moe_patch is not None:
            super().pre_model_load(cfg)

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """As in the base class, where the key is there."""
        if cfg.moe_patch is not None:
            super().post_model_load(cfg, model)

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """As in the base class, where the key is there."""
        return [] if cfg.moe_patch is None else super().add_callbacks_pre_trainer(cfg, model)


def _refuse_conflicts(cfg: Any) -> None:
    flags = [*(f"use_{name}" for name in EXPERT_KERNELS), "dense_mixer", *LIGER_EXPERTS]
    asked = [f"{flag}: true" for flag in flags if cfg[flag]]
    if cfg["expert_backend"] in EXPERT_KERNELS:
        asked.append(f"expert_backend: {cfg['expert_backend']}")
    chosen = cfg["experts_implementation"]
    if chosen in EXPERT_KERNELS or str(chosen).startswith("deep_ep"):
        asked.append(f"experts_implementation: {chosen}")
    if (cfg["expert_parallel_size"] or 1) > 1:
        asked.append(f"expert_parallel_size: {cfg['expert_parallel_size']}")
    if asked:
        raise UnsupportedOptionError(
            f"axolotl config: {asked[0]} and moe_patch would both serve the experts; remove one "
            "of them (moe_patch: false keeps axolotl's)"
        )
