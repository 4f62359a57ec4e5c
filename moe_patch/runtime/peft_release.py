"""Differences between the releases of PEFT from 0.18 on, told by what exists in them.

    release      features of a 3-D weight    parametrization in a forward       old names of experts
    0.18         as stored, never swapped    _LoraParameterProxy, merged        kept
    0.19, 0.20   swapped unless transposed   _LoraParameterProxy, merged        rewritten
    0.21         swapped unless transposed   _LoraFactorsProxy of one adapter   rewritten

Nothing here imports peft at import: its classes come from PEFT's own module when it is loaded.
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
    """PEFT's ParamWrapper, or None while peft is not loaded (then no model can hold one)."""
    return next(iter(_classes("ParamWrapper")), None)


def swaps_features(wrapper: Any) -> bool:
    """Return whether PEFT took a weight [E, out, in] for what it is, not for [E, in, out]."""
    return _SWAPPED in wrapper.__dict__ and wrapper.__dict__[_SWAPPED]


def factor_proxies() -> tuple[type[nn.Module], ...]:
    """The parametrizations that keep the low-rank factors; empty where PEFT has none."""
    return _classes(_FACTORS)


def lora_proxies() -> tuple[type[nn.Module], ...]:
    """All parametrizations by which PEFT puts adapters on a parameter, merged ones included."""
    return _classes(_FACTORS, _MERGED)


def _classes(*names: str) -> tuple[type[nn.Module], ...]:
    found = vars(sys.modules[_LAYER]) if _LAYER in sys.modules else {}
    return tuple(found[name] for name in names if name in found)


def rewrites_targets() -> bool:
    """Return whether PEFT turns old names of expert weights into those of the fused parameter."""
    return importlib.util.find_spec(_CONVERSION) is not None


def rewritten_target(name: str, model: nn.Module) -> bool:
    """Return whether PEFT takes a module target for an old name of an expert weight and drops it.

    A release that rewrites no names wraps the module as asked.
    """
    if not rewrites_targets():
        return False
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    trial = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(trial, model, None)
    except ValueError:  # half of what it would fuse, as Beam's attention has a gate_proj alone
        return True
    return bool(trial.target_modules != {name})
