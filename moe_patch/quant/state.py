"""State dicts of quantised experts: plain tensors under established names.

Keys of a parameter ``P``, by storage:

- nf4, as in bitsandbytes: ``P`` (uint8), ``P.absmax``, ``P.nested_absmax``,
  ``P.nested_quant_map``, ``P.quant_map`` and ``P.quant_state.bitsandbytes__nf4`` (JSON as bytes).
- fp8, as in FP8 checkpoints: ``P`` (e4m3) and ``P_scale_inv``.
- mxfp4, as in gpt-oss: ``P_blocks`` and ``P_scales``.

Under FSDP2 the keys are those of :mod:`moe_patch.quant.sharded_state`, which every model reads.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.formats import mxfp4, nf4
from moe_patch.formats.packed import PackedWeight
from moe_patch.formats.tensor import QuantTensor
from moe_patch.quant import sharded_state
from moe_patch.runtime.module_patch import patch_of

_WATCHED = "_moe_patch_quant_state"
_QUANT_STATE = "quant_state.bitsandbytes__nf4"


def watch(module: nn.Module) -> None:
    """Add hooks that write and read a module's state dict in the form above.

    The hooks check each parameter's class on every call, so they can stay after the experts are
    dequantised.
    """
    if _WATCHED not in module.__dict__:
        module.__dict__[_WATCHED] = True
        module.register_state_dict_post_hook(_save)
        module.register_load_state_dict_pre_hook(_load)


def put_back(module: nn.Module, name: str, value: nn.Parameter, order: tuple[str, ...]) -> None:
    """Register a parameter and restore the order of a module's parameters.

    PEFT nests its wrappers in this order, and the names of their weights show it.
    """
    module.register_parameter(name, value)
    for one in order:
        if one in module._parameters:
            module._parameters[one] = module._parameters.pop(one)


def _save(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, value in list(module._parameters.items()):
        key = prefix + name
        if isinstance(value, QuantTensor) and isinstance(state_dict.get(key), QuantTensor):
            form = sharded_state.to_parts if sharded_state.rank0_only() else to_tensors
            state_dict.update(form(state_dict.pop(key).weight, key))
        elif sharded_state.is_sharded(value) and sharded_state.is_sharded(state_dict.get(key)):
            sharded_state.save(module, state_dict, key, name)


def _load(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
) -> None:
    error_messages: list[str] = rest[-1]
    if (patch := patch_of(module)) is not None:
        patch.copies.made.clear()  # Compiled code cannot see that values change in place.
    for name, value in list(module._parameters.items()):
        key = prefix + name
        if sharded_state.is_sharded(value):
            if (why := sharded_state.load(module, state_dict, key, name)) is not None:
                error_messages.append(why)
            continue
        if not isinstance(value, QuantTensor):
            # FP8 values have the shape of the weight and would be copied without their scales.
            if value is not None and f"{key}_scale_inv" in state_dict and key in state_dict:
                del state_dict[key]
                error_messages.append(
                    f"{key} is {value.dtype}, the state dict holds it as fp8 with scales; "
                    "accepted: the same storage, or quantize_experts(model, 'fp8') first"
                )
            continue
        found = from_tensors(state_dict, key, value.weight)
        if found is not None:
            state_dict[key] = QuantTensor(found)
        elif metadata.get("assign_to_params_buffers") and key in state_dict:
            # A copy would be refused by the tensor, but an assignment would replace it.
            other = state_dict.pop(key)
            error_messages.append(
                f"{key} is stored in {value.stored_in}, the state dict holds {other.dtype}; "
                "accepted: the same storage, or dequantize_experts(model) first"
            )


def to_tensors(weight: PackedWeight, key: str) -> dict[str, Tensor]:
    """Return the state dict entries of one parameter."""
    if weight.storage == "fp8":
        return {key: weight.packed, f"{key}_scale_inv": weight.scales[0]}
    if weight.storage == "mxfp4":
        (scales_EOB,) = weight.scales
        blocks = weight.packed.view(*scales_EOB.shape, mxfp4.BLOCK // 2)
        return {f"{key}_blocks": blocks, f"{key}_scales": scales_EOB}
    scales = nf4.Nf4Scales(*weight.scales)
    described = {
        "quant_type": "nf4",
        "blocksize": nf4.BLOCK,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "shape": weight.stored_shape,
        "nested_blocksize": nf4.NESTED_BLOCK,
        "nested_dtype": "float32",
        "nested_offset": float(scales.offset),
    }
    return {
        key: weight.packed,
        f"{key}.absmax": scales.absmax,
        f"{key}.nested_absmax": scales.nested_absmax,
        f"{key}.nested_quant_map": scales.code,
        f"{key}.quant_map": scales.levels,
        f"{key}.{_QUANT_STATE}": torch.tensor(
            list(json.dumps(described).encode()), dtype=torch.uint8
        ),
    }


def from_tensors(state_dict: dict[str, Any], key: str, like: PackedWeight) -> PackedWeight | None:
    """Take one parameter's entries out of a state dict; return None if some are missing."""
    if (parts := sharded_state.from_parts(state_dict, key, like)) is not None:
        return parts
    if like.storage == "fp8":
        if key not in state_dict or f"{key}_scale_inv" not in state_dict:
            return None
        return replace(like, packed=state_dict[key], scales=(state_dict.pop(f"{key}_scale_inv"),))
    if like.storage == "mxfp4":
        if f"{key}_blocks" not in state_dict or f"{key}_scales" not in state_dict:
            return None
        blocks, scales = (state_dict.pop(f"{key}_{name}") for name in ("blocks", "scales"))
        return replace(like, packed=blocks.flatten(2), scales=(scales,))
    names = ("absmax", "nested_absmax", "nested_quant_map", "quant_map", _QUANT_STATE)
    if key not in state_dict or any(f"{key}.{name}" not in state_dict for name in names):
        return None
    absmax, nested, code, levels, described = (state_dict.pop(f"{key}.{name}") for name in names)
    offset = json.loads(bytes(described.tolist()))["nested_offset"]
    offset = torch.tensor(offset, dtype=torch.float32, device=absmax.device)
    packed = state_dict[key].view(like.packed.shape)
    return replace(like, packed=packed, scales=(absmax, nested, code, offset, levels))
