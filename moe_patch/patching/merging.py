"""Refuse to merge adapters into packed or offloaded experts before PEFT has changed any layer.

PEFT merges layer by layer, attention before experts: an error raised by the experts would leave
half of the adapters merged. Both merging methods are bound on the tuner instance, because no hook
of PEFT is told which adapters will be merged.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from moe_patch.errors import UnsupportedModelError
from moe_patch.formats.tensor import QuantTensor
from moe_patch.patching.offload import held_parameters
from moe_patch.runtime.adapters import is_param_wrapper

QUANTIZE, PATCH = "quantize_experts", "patch_model"
_METHODS = ("merge_and_unload", "merge_adapter")


def guard_merging(model: nn.Module, by: str) -> None:
    """Make PEFT's tuners inside ``model`` refuse to merge into packed or offloaded experts.

    Args:
        model: contains the tuners, or is one; without a tuner or such experts nothing is bound.
        by: QUANTIZE or PATCH, the owner of the guards; those of QUANTIZE outlive unpatch_model.
    """
    utils = sys.modules.get("peft.tuners.tuners_utils")
    if utils is None:
        return
    for tuner in model.modules():
        if not isinstance(tuner, utils.BaseTuner) or next(_packed(tuner), None) is None:
            continue
        for name in _METHODS:
            found = tuner.__dict__.get(name)
            if found is None or (_owner(found) is not None and by == QUANTIZE):
                tuner.__dict__[name] = functools.partial(_merge, tuner, name, by)


def free_merging(model: nn.Module, by: str | None = None) -> None:
    """Undo :func:`guard_merging` of one owner, or of every owner if ``by`` is None."""
    for module in model.modules():
        for name in _METHODS:
            owner = _owner(module.__dict__.get(name))
            if owner is not None and by in (None, owner):
                del module.__dict__[name]


def _owner(bound: Any) -> str | None:
    """Return the ``by`` of a guard, or None for anything else."""
    if isinstance(bound, functools.partial) and bound.func is _merge:
        return str(bound.args[2])
    return None


def _packed(tuner: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, wrapper and parameter for PEFT's wrappers around packed or offloaded experts."""
    held = held_parameters(tuner.model)
    for path, module in tuner.model.named_modules():
        if is_param_wrapper(module):
            wrapper: Any = module
            parameter = wrapper.get_base_layer()._parameters.get(wrapper.parameter_name)
            if isinstance(parameter, QuantTensor) or id(parameter) in held:
                experts = path.replace(".base_layer", "")
                yield f"{experts}.{wrapper.parameter_name}", wrapper, parameter


def _merge(tuner: Any, name: str, by: str, *args: Any, **kwargs: Any) -> Any:
    """Merge as PEFT does, unless an adapter to be merged belongs to packed experts.

    Raises:
        UnsupportedModelError: an adapter does; no weight has been written.
    """
    method = getattr(type(tuner), name)
    given = inspect.signature(method).bind(tuner, *args, **kwargs).arguments
    chosen: Sequence[str] | None = given.get("adapter_names")
    for path, wrapper, parameter in _packed(tuner):
        names = wrapper.active_adapters if chosen is None else chosen
        adapters = [one for one in names if one in wrapper.lora_A]
        if not isinstance(parameter, QuantTensor):
            apart = {wrapper.lora_A[one].weight.device for one in adapters} - {parameter.device}
            if apart:
                raise UnsupportedModelError(
                    f"{name}: {path} is in host memory (offload_experts) and its adapters are on "
                    f"{min(map(str, apart))}; no weight was changed; accepted: unpatch_model first"
                )
        elif adapters:
            raise UnsupportedModelError(
                f"{name}: {path} is stored in {parameter.stored_in}, and nothing can be merged "
                f"into packed experts (adapters {', '.join(map(repr, adapters))}); no weight was "
                "changed; accepted: dequantize_experts(model) first, or save the adapters and "
                "merge them into the 16-bit checkpoint"
            )
    return method(tuner, *args, **kwargs)
