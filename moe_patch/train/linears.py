"""Store frozen Linear modules in 4 bits by bitsandbytes: ``quantize_linear: nf4`` in a file.

The modules are those of the decoder layers, shared experts included. Experts, routers, embeddings
and the head stay as they are: Liger's fused loss reads the head's 16-bit weight.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.patching.discover import discover

STORAGES = ("nf4",)


def check_bitsandbytes(key: str) -> None:
    """Refuse a key of the training file that needs bitsandbytes where it is not installed.

    Raises:
        UnsupportedOptionError: bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UnsupportedOptionError(
            f"{key}: bitsandbytes is not installed; run pip install bitsandbytes, or leave the key "
            "out"
        )


def quantize_linears(model: Any) -> Any:
    """Replace the Linear modules of the decoder layers by bitsandbytes' Linear4bit, in place.

    Each weight [out, in] becomes NF4 with double quantisation on its own device; its 16-bit form is
    freed before the next one. Adapters go on afterwards: PEFT chooses its class by the module's.

    Args:
        model: a transformers model without adapters, on the device that trains.

    Returns:
        The same object.

    Raises:
        UnsupportedModelError: its layers have no Linear module.
    """
    import bitsandbytes

    found = list(_linears(model))
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__}: its decoder layers have no Linear module to store in nf4; "
            "leave quantize_linear out"
        )
    for parent, name, linear in found:
        weight = linear.weight
        made = bitsandbytes.nn.Linear4bit(
            linear.in_features, linear.out_features, linear.bias is not None,
            compute_dtype=weight.dtype, quant_type="nf4", device="meta",
        )  # fmt: skip
        packed = bitsandbytes.nn.Params4bit(
            weight.data, requires_grad=False, quant_type="nf4", module=made
        )
        made.weight, made.bias = packed.to(weight.device), linear.bias
        setattr(parent, name, made)
    model.is_loaded_in_4bit = True  # PEFT puts its 4-bit adapters only on models marked so
    return model


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield (parent, name, module) of the Linear modules in decoder layers, but not of routers."""
    blocks = discover(model)
    skipped = {id(m) for block in blocks for _, r in block.routers for m in r.modules()}
    skipped |= {
        id(block.block.get_submodule(block.spec.router_attr))
        for block in blocks
        if block.spec.chooses_in_block and block.block is not None
    }
    lists = tuple({_list_of(block.path) for block in blocks})
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if (
                f"{path}.{name}".startswith(lists)
                and type(child) is nn.Linear
                and id(child) not in skipped
            ):
                yield parent, name, child


def _list_of(path: str) -> str:
    """Return the path of the list that holds a block's layer: "model.layers." of its 3rd layer."""
    parts = path.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[:at]) + "."


def cast_adapters(model: Any, dtype: torch.dtype) -> None:
    """Cast the trained adapters of a PeftModel, one tensor at a time.

    PEFT makes fp32 factors on a base layer whose weight has no floating dtype.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
