"""State dicts of quantised experts that FSDP2 shards: one DTensor for each part of a parameter.

Keys of a parameter ``P``, whatever its storage: ``P`` is the bytes (uint8), sharded as the
parameter is, and ``P_<name>`` is a tensor of scales. The scales of single experts are sharded with
them; those of all experts are the same on every rank. No key has a dot after ``P``, and no value is
in 8-bit floats. Both would stop accelerate and torch.distributed.checkpoint, which look each key up
in the model, and gloo.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_patch.formats import nf4
from moe_patch.formats.packed import PackedWeight
from moe_patch.formats.shard import QuantShard
from moe_patch.runtime.modules import is_sharded as is_dtensor

if TYPE_CHECKING:  # its import would take `import moe_patch` a quarter of its time
    from torch.distributed.tensor import DTensor

# Scales of single experts come first.
FIELDS = {"nf4": nf4.Nf4Scales._fields, "fp8": ("scale_inv",), "mxfp4": ("scales",)}


def rank0_only() -> bool:
    """Return whether FSDP takes the weights from one process (``cpu_ram_efficient_loading``).

    accelerate then compares the state dict of the whole model with that of the sharded one.
    """
    from transformers.integrations import is_fsdp_enabled

    return bool(is_fsdp_enabled())


def to_parts(weight: PackedWeight, key: str) -> dict[str, Tensor]:
    """Return the plain tensors of one parameter, or of one rank's experts."""
    own, *shared = weight.scales
    values = [
        own.view(weight.packed.shape[0], *_scale_shape(weight)),
        *(t.view(-1) for t in shared),
    ]
    names = [f"{key}_{field}" for field in FIELDS[weight.storage]]
    return {key: weight.packed.view(torch.uint8), **dict(zip(names, values, strict=True))}


def from_parts(
    state_dict: dict[str, Any], key: str, like: PackedWeight, first: int = 0
) -> PackedWeight | None:
    """Take the entries of :func:`to_parts` out of a state dict, all but ``key``; None without.

    Args:
        state_dict: entries are local, or those of all experts.
        key: of the bytes.
        like: the parameter to be loaded, which may be one rank's part.
        first: its first expert among all.
    """
    names = [f"{key}_{field}" for field in FIELDS[like.storage]]
    packed = state_dict.get(key)
    if packed is None or packed.dtype != torch.uint8 or any(n not in state_dict for n in names):
        return None
    packed, own = (_rows(t, first, like) for t in (packed, state_dict.pop(names[0])))
    shared = [_local(state_dict.pop(name)) for name in names[1:]]
    own = own.flatten() if like.storage == "nf4" else own
    shared = [t.view(old.shape) for t, old in zip(shared, like.scales[1:], strict=True)]
    return replace(like, packed=packed.view(like.packed.dtype), scales=(own, *shared))


def save(module: nn.Module, state_dict: dict[str, Any], key: str, name: str) -> None:
    """Replace the entry of a sharded parameter by its parts, as DTensors over local memory."""
    from torch.distributed.tensor import Replicate

    value: DTensor = state_dict[key]
    shard: Any = value.to_local()
    everywhere = [Replicate()] * value.device_mesh.ndim
    parts = to_parts(shard.weight, key)
    for place, (part_key, part) in enumerate(parts.items()):
        shape = part.shape if place > 1 else torch.Size((shard.total, *part.shape[1:]))
        state_dict[part_key] = _dtensor(part, value, shape, everywhere if place > 1 else None)
        if place:
            _stand_in(module, f"{name}{part_key.removeprefix(key)}", part.dtype)


def load(module: nn.Module, state_dict: dict[str, Any], key: str, name: str) -> str | None:
    """Put a sharded parameter in the place of its parts; return an error's text, or None."""
    value: Any = module._parameters[name]
    shard = value.to_local()
    found, why = from_parts(state_dict, key, shard.weight, _first_expert(value)), None
    if found is not None:
        own = shard.like(found, found.packed.shape[0])
        state_dict[key] = _dtensor(own, value, value.shape)
    elif key in state_dict and not is_sharded(state_dict[key]):
        other = state_dict.pop(key)
        why = (
            f"{key} is sharded and stored in {shard.held_weight.storage}, the state dict holds "
            f"{other.dtype} without its scales; accepted: a state dict of a sharded model in the "
            "same storage"
        )
    _keep_stand_ins(module, state_dict, key, name)
    return why


def _stand_in(module: nn.Module, name: str, dtype: torch.dtype) -> None:
    """Register a frozen scalar for a key, which other libraries look up among the parameters.

    accelerate reads its dtype. torch leaves a key out together with frozen parameters only if it is
    one. A scalar on the CPU is the only tensor that torch does not take for the model's device.
    """
    if name not in module._parameters:
        empty = torch.zeros((), dtype=dtype, device="cpu")
        module.register_parameter(name, nn.Parameter(empty, requires_grad=False))


def _keep_stand_ins(module: nn.Module, state_dict: dict[str, Any], key: str, name: str) -> None:
    """Let a load leave the scalars of :func:`save` as they are."""
    for field in {field for fields in FIELDS.values() for field in fields}:
        if (value := module._parameters.get(f"{name}_{field}")) is not None:
            state_dict[f"{key}_{field}"] = value.data


def is_sharded(value: Any) -> bool:
    """Return whether a parameter is quantised and sharded."""
    return is_dtensor(value) and isinstance(value.to_local(), QuantShard)


def _dtensor(local: Tensor, like: DTensor, shape: torch.Size, placements: Any = None) -> DTensor:
    from torch.distributed.tensor import DTensor

    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(
        local,
        like.device_mesh,
        placements or like.placements,
        run_check=False,
        shape=shape,
        stride=stride,
    )


def _scale_shape(weight: PackedWeight) -> tuple[int, ...]:
    own = weight.scales[0]
    if weight.storage != "nf4":
        return tuple(own.shape[1:])
    _, rows, columns = weight.stored_shape
    return (rows * columns // nf4.BLOCK,)


def _first_expert(value: DTensor) -> int:
    """Return this rank's first expert among all."""
    (dim,) = (dim for dim, placement in enumerate(value.placements) if placement.is_shard())
    mesh = value.device_mesh
    return mesh.get_local_rank(dim) * -(-value.shape[0] // mesh.size(dim))


def _rows(value: Tensor, first: int, like: PackedWeight) -> Tensor:
    """Return the experts of ``like`` from a DTensor, or from a tensor of all experts."""
    local, count = _local(value), like.packed.shape[0]
    return local if local.shape[0] == count else local[first : first + count]


def _local(value: Any) -> Tensor:
    return value.to_local() if is_dtensor(value) else value
