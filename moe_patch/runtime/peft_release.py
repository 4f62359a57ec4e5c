"""Differences between PEFT releases from 0.18 on, detected by the names that exist in them.

    release      features of a 3-D weight    parametrization in a forward       old names of experts
    0.18         as stored, never swapped    _LoraParameterProxy, merged        kept
    0.19, 0.20   swapped unless transposed   _LoraParameterProxy, merged        rewritten
    0.21         swapped unless transposed   _LoraFactorsProxy of one adapter   rewritten

Importing this file does not import peft: its classes are read from PEFT's module once loaded.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from torch import nn

_LAYER = "peft.tuners.lora.layer"
_CONVERSION = "peft.utils.transformers_weight_conversion"
_SWAPPED = "_did_swap_in_out_features"
_FACTORS, _MERGED = "_LoraFactorsProxy", "_LoraParameterProxy"


def param_wrapper_class() -> type[nn.Module] | None:
    """Return PEFT's ParamWrapper, or None if peft is not loaded (so no model can contain one)."""
    return next(iter(_classes("ParamWrapper")), None)


def swaps_features(wrapper: Any) -> bool:
    """Return whether PEFT treats the weight as [E, out, in] rather than [E, in, out]."""
    return _SWAPPED in wrapper.__dict__ and wrapper.__dict__[_SWAPPED]


def factor_proxies() -> tuple[type[nn.Module], ...]:
    """Return the parametrizations that expose low-rank factors; empty if this PEFT has none."""
    return _classes(_FACTORS)


def lora_proxies() -> tuple[type[nn.Module], ...]:
    """Return all parametrizations that PEFT puts on an adapted parameter, merged ones included."""
    return _classes(_FACTORS, _MERGED)


def _classes(*names: str) -> tuple[type[nn.Module], ...]:
    found = vars(sys.modules[_LAYER]) if _LAYER in sys.modules else {}
    return tuple(found[name] for name in names if name in found)


def rewrites_targets() -> bool:
    """Return whether PEFT rewrites old names of expert weights to the fused parameter's name."""
    return importlib.util.find_spec(_CONVERSION) is not None


def rewritten_target(name: str, model: nn.Module) -> bool:
    """Return whether PEFT mistakes a target module for an old expert weight name and drops it.

    A release that rewrites no names wraps the target module.
    """
    if not rewrites_targets():
        return False
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    trial = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(trial, model, None)
    except ValueError:  # PEFT found only one of two weights to fuse: Beam's attention's gate_proj.
        return True
    return bool(trial.target_modules != {name})
