"""Run Hugging Face mixture-of-experts models on shared kernels, exactly as they are defined.

from moe_patch import patch_model
model = patch_model(model)
"""

import importlib
from typing import Any

from moe_patch._version import __version__
from moe_patch.config import PatchConfig
from moe_patch.debug.shadow import shadow_results
from moe_patch.debug.unpatched import reference
from moe_patch.errors import (
    MoePatchError,
    PatchStateError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from moe_patch.families import register_family, supported_model_types
from moe_patch.patching.lora_targets import lora_targets
from moe_patch.patching.patch import patch_model, patched, unpatch_model
from moe_patch.patching.report import BlockReport, patch_report
from moe_patch.quant.loading import load_quantized
from moe_patch.quant.surgery import dequantize_experts, quantize_experts
from moe_patch.runtime.spec import FamilySpec
from moe_patch.signals.balance import update_expert_bias
from moe_patch.signals.losses import delta_sc, gate_accuracy, smk_loss
from moe_patch.signals.recorder import record
from moe_patch.signals.replay import record_routing, replay_routing
from moe_patch.tools.adapter_files import convert_adapter
from moe_patch.tools.replay import replay_file

__all__ = [
    "BlockReport",
    "FamilySpec",
    "MoePatchError",
    "PatchConfig",
    "PatchStateError",
    "UnsupportedModelError",
    "UnsupportedOptionError",
    "__version__",
    "convert_adapter",
    "delta_sc",
    "dequantize_experts",
    "gate_accuracy",
    "load_quantized",
    "lora_targets",
    "patch_model",
    "patch_report",
    "patched",
    "quantize_experts",
    "record",
    "record_routing",
    "reference",
    "register_family",
    "replay_file",
    "replay_routing",
    "shadow_results",
    "smk_loss",
    "supported_model_types",
    "unpatch_model",
    "update_expert_bias",
]


def __getattr__(name: str) -> Any:
    """Return the axolotl plugin under a short name: ``plugins: [moe_patch.MoePatchPlugin]``."""
    if name == "MoePatchPlugin":
        # Import on access, because the plugin needs axolotl and the package does not.
        return importlib.import_module("moe_patch.integrations.axolotl").MoePatchPlugin
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
