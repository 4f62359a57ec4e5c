"""Which expert weights the operator may read: plain numbers of 16 bits or more, or our own packing.

A tensor subclass of another library decides in its ``__torch_dispatch__`` what an operator sees. It
knows none of ours, so its weights are refused by name, when patching and in every call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.errors import UnsupportedModelError
from moe_patch.formats.tensor import QuantTensor

_NUMBERS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def is_packed(dtype: torch.dtype) -> bool:
    """Whether a storage dtype holds packed or 8-bit values, which no product here may read."""
    return not dtype.is_floating_point or dtype.itemsize < 2


def foreign_class(tensor: Tensor) -> str | None:
    """The class of a tensor whose operators another library runs; None for every other tensor.

    torch's own subclasses (DTensor, those of tracing) stand for a plain tensor when the operator
    runs, and a subclass without a dispatch of its own is one.
    """
    cls = type(tensor)
    if cls is Tensor or cls is nn.Parameter or isinstance(tensor, QuantTensor):
        return None
    if cls.__torch_dispatch__ is Tensor.__torch_dispatch__:
        return None
    own = cls.__module__.partition(".")[0] == "torch"
    return None if own else f"{cls.__module__}.{cls.__qualname__}"


def require_float(weight: Tensor, where: str) -> None:
    """Packed or 8-bit storage is never taken for numbers, nor for what can be trained.

    Raises:
        UnsupportedModelError: the weight is a tensor subclass of another library, its dtype is not
            a floating one of 16 bits or more, or it is quantised and asks for a gradient.
    """
    if type(weight) is nn.Parameter and weight.dtype in _NUMBERS:
        return  # the common case first
    if (foreign := foreign_class(weight)) is not None:
        raise UnsupportedModelError(
            f"{where}: expert weights are stored in {foreign}, a tensor subclass that knows no "
            "operator of this library; accepted: plain bf16, fp16, fp32 and fp64 weights, a "
            "parametrization that yields one of them, or what quantize_experts(model, 'nf4' or "
            "'fp8') makes of plain weights; leave such a model to transformers (unpatch_model if "
            "it was quantised after patching)"
        )
    if isinstance(weight, QuantTensor) and weight.requires_grad:
        raise UnsupportedModelError(
            f"{where}: requires_grad is True, but experts stored in {weight.stored_in} are frozen "
            "and get no gradient; accepted: adapters on them (target_parameters; neither "
            "modules_to_save nor requires_grad_), or dequantize_experts(model) to train them"
        )
    if is_packed(weight.dtype):
        fp8 = weight.dtype == torch.float8_e4m3fn
        raise UnsupportedModelError(
            f"{where}: expert weights are stored in {weight.dtype}; accepted: bf16, fp16, fp32 and "
            "fp64, or a parametrization that yields one of them"
            + (", or what quantize_experts(model, 'fp8') takes over" if fp8 else "")
            + "; leave such a model to transformers (unpatch_model if it was quantised after "
            "patching)"
        )


def projection(experts: Any, name: str) -> Tensor:
    """A stacked weight of an experts module, evaluated if it is parametrized.

    Raises:
        UnsupportedModelError: the module has none of that name.
    """
    # Module.__getattr__ takes ten times as long.
    if (own := experts._parameters.get(name)) is not None:
        return own
    try:
        return getattr(experts, name)
    except AttributeError as error:
        children = ", ".join(experts._modules) or "no modules"
        raise UnsupportedModelError(
            f"{type(experts).__module__}.{type(experts).__name__} has no stacked weight {name!r} "
            f"but holds {children}: its experts were taken apart (quantisation tools make single "
            "Linear modules of them) or renamed; accepted: the stacked weights that transformers "
            "builds; leave such a model to transformers (unpatch_model if it was changed after "
            "patching)"
        ) from error
