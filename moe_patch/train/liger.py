"""Run the parts around the MoE blocks on Liger's kernels: ``liger: true`` in a training file.

Rotary embedding, RMSNorm and the loss over the vocabulary run on Liger, which the Trainer applies
when training begins. The experts remain patched by moe_patch (``swiglu: False``). Source:
liger-kernel 0.8.5, liger_kernel/transformers/monkey_patch.py.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from moe_patch.errors import UnsupportedOptionError

# Arguments of transformers.TrainingArguments.
ARGUMENTS: dict[str, Any] = {
    "use_liger_kernel": True,
    "liger_kernel_config": {"swiglu": False},
}


def check_liger(device: torch.device, training: dict[str, Any]) -> None:
    """Refuse options that cannot run, before anything is loaded.

    Args:
        device: the device that trains.
        training: the file's own arguments of the Trainer.

    Raises:
        UnsupportedOptionError: liger-kernel is not installed, its kernels do not run on the device,
            or the Trainer's own Liger arguments are given as well.
    """
    if twice := sorted(ARGUMENTS.keys() & training.keys()):
        raise UnsupportedOptionError(
            f"training.{twice[0]}: `liger: true` sets it; keep only one of the two"
        )
    if importlib.util.find_spec("liger_kernel") is None:
        raise UnsupportedOptionError(
            "liger: liger-kernel is not installed; run pip install liger-kernel, or set "
            "liger: false"
        )
    if device.type != "cuda":
        raise UnsupportedOptionError(
            f"liger: its kernels need a GPU, found {device.type}; set liger: false"
        )


def check_liger_knows(model_type: str) -> None:
    """Refuse a model that Liger would silently leave unchanged.

    Raises:
        UnsupportedOptionError: the installed Liger has no function for this model type.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UnsupportedOptionError(
            f"liger: the installed liger-kernel does nothing for model type {model_type!r}; set "
            "liger: false, or install a newer liger-kernel"
        )
