"""The axolotl plugin: patch a model after axolotl has loaded it and its adapters.

    plugins:
      - moe_patch.MoePatchPlugin
    moe_patch: true          # or a mapping of options, or false; true if left out

One line in the log (logger ``axolotl.moe_patch``, level INFO, first rank) says what was patched.
In every run axolotl 0.21 also loads the plugin by its entry point. That plugin acts only if the key
is set. Importing the plugin registers ``experts_implementation: moe_patch``. Only axolotl imports
this module. Source: the plugin interface in axolotl's documentation (BasePlugin).
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

# axolotl hides logs below WARNING unless the logger's name begins with its own.
logger = logging.getLogger("axolotl.moe_patch")

EXPERT_KERNELS = ("scattermoe", "sonicmoe")
# Experts implementations with which axolotl divides experts: that of 0.21 and those before it.
EXPERT_PARALLEL = ("expert_parallel", "deep_ep", "torch_ep")
# Keys of axolotl's Liger plugin that replace the experts' forward: the current and an older one.
LIGER_EXPERTS = ("liger_glu_activation", "liger_swiglu")


class MoePatchArgs(BaseModel):
    """Add the plugin's key to axolotl's YAML file."""

    moe_patch: bool | dict[str, Any] | None = None


class MoePatchKey(BaseModel):
    """Add the same key for the entry point; axolotl inherits from the models of all plugins."""

    moe_patch: bool | dict[str, Any] | None = None


class MoePatchPlugin(BasePlugin):
    """Plugin that runs a model's MoE blocks on moe_patch."""

    args: type[BaseModel] = MoePatchArgs

    def get_input_args(self) -> str:
        """Return the dotted name of the pydantic model of the plugin's keys."""
        return f"{self.args.__module__}.{self.args.__qualname__}"

    def pre_model_load(self, cfg: Any) -> None:
        """Check the options, and refuse axolotl's own expert kernels, before weights load.

        Raises:
            UnsupportedOptionError: an option is unknown or wrong, or another library would also run
                the experts.
        """
        if PatchConfig.parse(cfg.moe_patch) is not None:
            _refuse_conflicts(cfg)

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Patch the model, after adapters are attached and other plugins have changed ``cfg``.

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
        """Return the callback that loads full checkpoints; none if nothing is patched."""
        return [] if PatchConfig.parse(cfg.moe_patch) is None else [CheckpointCallback()]


class MoePatchByKey(MoePatchPlugin):
    """The plugin of the entry point, for axolotl files with only the key ``moe_patch:``."""

    args = MoePatchKey

    def pre_model_load(self, cfg: Any) -> None:
        """Run the base class's check if the key is set."""
        if cfg.moe_patch is not None:
            super().pre_model_load(cfg)

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Run the base class's patch if the key is set."""
        if cfg.moe_patch is not None:
            super().post_model_load(cfg, model)

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """Run the base class's hook if the key is set."""
        return [] if cfg.moe_patch is None else super().add_callbacks_pre_trainer(cfg, model)


def _refuse_conflicts(cfg: Any) -> None:
    flags = [*(f"use_{name}" for name in EXPERT_KERNELS), "dense_mixer", *LIGER_EXPERTS]
    asked = [f"{flag}: true" for flag in flags if cfg[flag]]
    if cfg["expert_backend"] in EXPERT_KERNELS:
        asked.append(f"expert_backend: {cfg['expert_backend']}")
    chosen = cfg["experts_implementation"]
    if chosen in EXPERT_KERNELS or str(chosen).startswith(EXPERT_PARALLEL):
        asked.append(f"experts_implementation: {chosen}")
    if (cfg["expert_parallel_size"] or 1) > 1:
        asked.append(f"expert_parallel_size: {cfg['expert_parallel_size']}")
    if asked:
        raise UnsupportedOptionError(
            f"axolotl config: {asked[0]} and moe_patch would both run the experts; remove one "
            "of them (moe_patch: false keeps axolotl's)"
        )
