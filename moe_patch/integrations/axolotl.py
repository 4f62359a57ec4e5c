"""The axolotl plugin: patches a model after it and its adapters were loaded.

    plugins:
      - moe_patch.integrations.axolotl.MoePatchPlugin
    moe_patch: true          # or a mapping of options, or false; true if left out

Source: the plugin interface of axolotl's documentation (BasePlugin). Only axolotl imports this.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from moe_patch.config import PatchConfig
from moe_patch.errors import UnsupportedOptionError
from moe_patch.patching.patch import patch_model

EXPERT_KERNELS = ("scattermoe", "sonicmoe")


class MoePatchArgs(BaseModel):
    """The key that the plugin adds to axolotl's YAML file."""

    moe_patch: bool | dict[str, Any] | None = None


class MoePatchPlugin(BasePlugin):
    """Runs a model's MoE blocks on moe_patch."""

    def get_input_args(self) -> str:
        """The dotted name of the pydantic model of the plugin's keys."""
        return f"{MoePatchArgs.__module__}.{MoePatchArgs.__qualname__}"

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
        patch_model(model, cfg.moe_patch)


def _refuse_conflicts(cfg: Any) -> None:
    flags = [*(f"use_{name}" for name in EXPERT_KERNELS), "dense_mixer"]
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
