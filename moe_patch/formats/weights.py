"""Checks of expert weights: the operator reads plain floats of 16 bits or more, or QuantTensor.

A tensor subclass of another library controls by its ``__torch_dispatch__`` what an operator sees,
and does not support our operators. Its weights are refused by name, in patch_model and in every
call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.errors import UnsupportedModelError
from moe_patch.formats.shard import QuantShard
from moe_patch.formats.tensor import QuantTensor

_NUMBERS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def is_packed(dtype: torch.dtype) -> bool:
    """Return whether a dtype holds packed or 8-bit values, which no product may read."""
    return not dtype.is_floating_point or dtype.itemsize < 2


def foreign_class(tensor: Tensor) -> str | None:
    """Return the name of a tensor's class if another library runs its operators, or else None.

    torch's own subclasses (DTensor, those of tracing) become plain tensors when the operator runs.
    A subclass without its own ``__torch_dispatch__`` counts as a plain tensor.
    """
    cls = type(tensor)
    if cls is Tensor or cls is nn.Parameter or isinstance(tensor, QuantTensor):
        return None
    if cls.__torch_dispatch__ is Tensor.__torch_dispatch__:
        return None
    own = cls.__module__.partition(".")[0] == "torch"
    return None if own else f"{cls.__module__}.{cls.__qualname__}"


def require_float(weight: Tensor, where: str) -> None:
    """Refuse packed or 8-bit storage as numbers, and quantised weights that require a gradient.

    Raises:
        UnsupportedModelError: the weight is a tensor subclass of another library, is not a float of
            16 bits or more, or is quantised and requires a gradient. Also one rank's part.
    """
    if type(weight) is nn.Parameter and weight.dtype in _NUMBERS:
        return
    if isinstance(weight, QuantShard):
        raise UnsupportedModelError(
            f"{where}: experts stored in {weight.held_weight.storage} are divided over ranks, and "
            "nothing has gathered them; accepted: FSDP2 (fully_shard), which gathers them for a "
            "forward; expert and tensor parallelism take experts in 16 bits"
        )
    if (foreign := foreign_class(weight)) is not None:
        raise UnsupportedModelError(
            f"{where}: expert weights are stored in {foreign}, a tensor subclass that does not "
            "support this library's operators; accepted: plain bf16, fp16, fp32 and fp64 weights, "
            "a parametrization that yields one of them, or the result of quantize_experts(model, "
            "'nf4' or 'fp8'); leave such a model to transformers (unpatch_model if it was "
            "quantised after patching)"
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
            + (", or the result of quantize_experts(model, 'fp8')" if fp8 else "")
            + "; leave such a model to transformers (unpatch_model if it was quantised after "
            "patching)"
        )


def projection(experts: Any, name: str) -> Tensor:
    """Return a stacked weight of an experts module, evaluated if it is parametrized.

    Raises:
        UnsupportedModelError: the module has no weight of that name.
    """
    # Read _parameters directly: Module.__getattr__ takes ten times as long.
    if (own := experts._parameters.get(name)) is not None:
        return own
    try:
        return getattr(experts, name)
    except AttributeError as error:
        children = ", ".join(experts._modules) or "no modules"
        raise UnsupportedModelError(
            f"{type(experts).__module__}.{type(experts).__name__} has no stacked weight {name!r} "
            f"but holds {children}: its experts were split (quantisation tools turn them into "
            "single Linear modules) or renamed; accepted: the stacked weights that transformers "
            "builds; leave such a model to transformers (unpatch_model if it was changed after "
            "patching)"
        ) from error
