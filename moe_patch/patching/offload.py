"""Give experts their seats in host memory, and take them back: the option ``offload_experts``.

A weight that is in host memory already stays the same tensor at the same address; CUDA locks its
pages in place. One on a device is moved, and unpatch_model moves it back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.config import PatchConfig
from moe_patch.errors import MoePatchError, UnsupportedModelError, UnsupportedOptionError
from moe_patch.formats.tensor import QuantTensor, parameter
from moe_patch.patching.discover import FoundBlock
from moe_patch.runtime.described import layout_of, read_glu
from moe_patch.runtime.experts import read_tensors
from moe_patch.runtime.module_patch import mark_ours, patch_of
from moe_patch.runtime.modules import has_accelerate_hook, is_sharded
from moe_patch.runtime.offload import Offload, Seat, parts_of
from moe_patch.runtime.spec import FamilySpec

Seated = tuple[Any, Seat]


def check_offload(block: FoundBlock) -> None:
    """Refuse a block whose experts cannot stay in host memory.

    Raises:
        UnsupportedModelError: names the module and what it has.
    """
    for path, experts in block.experts:
        if why := _why_not(experts, block.spec):
            raise UnsupportedModelError(
                f"{path} ({type(experts).__name__}): offload_experts: {why}; accepted: whole, "
                "plain or quantised experts that the fused kernels run; exclude such blocks, or "
                "leave offload_experts out"
            )
    if not block.experts:
        raise UnsupportedModelError(
            f"{block.path}: offload_experts: it has no experts module; exclude it, or leave "
            "offload_experts out"
        )


def computes_here(weight: Tensor, config: PatchConfig) -> bool:
    """Return whether an expert weight is on the device that will compute with it.

    The operator checks the device of meta weights and of those in host memory in each call.
    """
    return not weight.is_meta and not (config.offload_experts and weight.device.type == "cpu")


def _why_not(experts: Any, spec: FamilySpec) -> str | None:
    if spec.experts_forward is not None or read_glu(experts, spec) is None:
        return "its activation, norm or experts run in torch's own products"
    if has_accelerate_hook(experts):
        return "accelerate's hook moves its weights (device_map)"
    if experts._modules.get("parametrizations") is not None:
        return "its weights have a parametrization"
    for name in _names(experts, spec):
        weight = experts._parameters.get(name)
        if weight is None:
            return f"it has no parameter {name} of its own"
        if weight.is_meta or is_sharded(weight) or hasattr(weight, "ds_id"):
            return f"its {name} is on meta or sharded"
    return None


def _names(experts: Any, spec: FamilySpec) -> tuple[str, str]:
    return layout_of(experts, spec).up_name, "down_proj"


def take_seats(blocks: list[FoundBlock]) -> list[Seated]:
    """Move the experts of all blocks to host memory and lock it; all of them or none.

    Experts that have a seat keep it, and are locked again if their weights were replaced.

    Raises:
        UnsupportedOptionError: there is too little host memory, or it cannot be locked.
    """
    found = [(path, e, block.spec) for block in blocks for path, e in block.experts]
    offload, moved = Offload(), dict[int, Any]()
    seated, new = list[Seated](), list[Seated]()
    _check_memory([p for _, e, spec in found for p in _weights(e, spec)])
    try:
        for index, (path, experts, spec) in enumerate(found):
            patch = patch_of(experts)
            seat = None if patch is None else patch.seat
            if seat is None:
                seat = Seat(offload, index, f"{path} ({type(experts).__name__})")
                new.append((experts, seat))
            seated.append((experts, seat))
            for name in _names(experts, spec):
                _to_host(experts, name, seat, moved)
            weights = read_tensors(experts, layout_of(experts, spec), torch.float32, "auto", False)
            seat.read(weights.weights, lock=torch.cuda.is_available())
    except (MoePatchError, RuntimeError):
        for experts, seat in new:
            give_back(experts, seat)
        raise
    return seated


def _weights(experts: Any, spec: FamilySpec) -> Iterator[Tensor]:
    for name in _names(experts, spec):
        weight = experts._parameters[name]
        yield from parts_of(weight.weight if isinstance(weight, QuantTensor) else weight)


def _to_host(experts: Any, name: str, seat: Seat, moved: dict[int, Any]) -> None:
    weight = experts._parameters[name]
    if weight.device.type != "cpu":
        seat.homes[name] = weight.device
        _move(experts, name, torch.device("cpu"), moved)


def _move(experts: Any, name: str, device: torch.device, moved: dict[int, Any]) -> None:
    """Move a parameter; one that several modules hold stays one.

    A plain parameter stays the same object.
    """
    weight: Any = experts._parameters[name]
    if isinstance(weight, QuantTensor):
        if id(weight) not in moved:
            # Keep the old one too, as its id must not be used again.
            packed: Any = weight.to(device)
            moved[id(weight)] = parameter(packed), weight
        experts._parameters[name] = moved[id(weight)][0]
    elif weight.device != device:
        weight.data = weight.data.to(device)


def hold(experts: Any, seat: Seat) -> None:
    """Bind what keeps the weights where they are: the seat, and a ``_apply`` that skips them."""
    patch = patch_of(experts)
    assert patch is not None
    patch.seat = seat
    experts.__dict__["_apply"] = functools.partial(_apply, experts)


def held_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that a patch keeps in host memory."""
    held = set()
    for experts in model.modules():
        patch = patch_of(experts)
        if patch is not None and patch.seat is not None:
            held |= {id(experts._parameters[name]) for name in _names(experts, patch.spec)}
    return held


def give_back(experts: Any, seat: Seat) -> None:
    """Undo :func:`take_seats` and :func:`hold`: unlock the memory, and move back what was moved."""
    seat.unlock()
    experts.__dict__.pop("_apply", None)
    for name, device in seat.homes.items():
        _move(experts, name, device, {})
    seat.homes.clear()


@mark_ours
def _apply(experts: Any, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Run ``nn.Module._apply`` on all but the weights in host memory.

    ``to``, ``cuda`` and their like are this method; it is an instance attribute.

    Raises:
        UnsupportedOptionError: the function changes the dtype.
    """
    patch = patch_of(experts)
    assert patch is not None
    held = {name: experts._parameters[name] for name in _names(experts, patch.spec)}
    for name, weight in held.items():
        changed = function(torch.empty(0, dtype=weight.dtype)).dtype
        if changed != weight.dtype:
            raise UnsupportedOptionError(
                f"{patch.seat.where}.{name}: a change from {weight.dtype} to {changed} was "
                "requested, but offload_experts keeps the weights where they are; accepted: "
                "another device; change the dtype before patch_model"
            )
    try:
        experts._parameters |= dict.fromkeys(held)
        return type(experts)._apply(experts, function, recurse)
    finally:
        experts._parameters |= held


def _check_memory(weights: list[Tensor]) -> None:
    """Refuse weights on a device that host memory has no room for.

    Raises:
        UnsupportedOptionError: says how much is needed and available.
    """
    own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in weights
           if t.device.type != "cpu"}  # fmt: skip
    needed, free = sum(own.values()), available_memory()
    if free is not None and needed > free:
        raise UnsupportedOptionError(
            f"offload_experts: the experts need {needed / 2**30:.1f} GiB of host memory, "
            f"{free / 2**30:.1f} GiB are available; accepted: more memory, a smaller storage "
            "(quantize_experts), or offload_experts=False"
        )


def available_memory() -> int | None:
    """Return the bytes of host memory that are free or reclaimable; None if not on Linux."""
    file = Path("/proc/meminfo")
    if not file.is_file():
        return None
    rows = dict(line.split(":") for line in file.read_text().splitlines())
    free = int(rows["MemAvailable"].split()[0]) * 1024
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int(used.read_text()))
    return free
