"""Attach, load and divide PEFT adapters on experts that transformers has divided over ranks.

PEFT sizes factors by the whole weight's shape. Here it creates them on the CPU, around placeholders
of that shape that hold one number; then each rank keeps its experts' part. So every factor has the
value that one process with the same seed would give it, and no device holds all factors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from moe_patch.errors import PatchStateError, UnsupportedModelError
from moe_patch.expert_parallel.gradients import average_factors, average_replicas
from moe_patch.expert_parallel.layout import (
    Held,
    batch_axes,
    batch_groups,
    experts_wrappers,
    held_experts,
    placements,
    refuse_divided,
)
from moe_patch.expert_parallel.saving import guard
from moe_patch.expert_parallel.together import (
    adapter_parameters,
    refuse_differences,
    several,
    together,
)
from moe_patch.runtime.adapters import HELD_KEY, base_of, is_param_wrapper

_REDUCED = "_moe_patch_reduced"
_MESH = "_device_mesh"  # of a PreTrainedModel that transformers distributed


def attach_adapter(
    model: nn.Module, peft_config: Any, adapter_name: str = "default", **options: Any
) -> Any:
    """Attach a new adapter as PEFT does; each rank keeps the factors of its own experts.

    Every rank has to call this, after the same ``torch.manual_seed``. Call :func:`patch_model`
    afterwards: PEFT alone cannot run adapters on divided experts.

    Args:
        model: a transformers model from ``from_pretrained(distributed_config=...)``, or the
            PeftModel of an earlier call.
        peft_config: a ``peft.LoraConfig``.
        adapter_name: name of the adapter.
        options: options of ``peft.get_peft_model`` (for a PeftModel of its ``add_adapter``).

    Returns:
        A PeftModel. Its ``save_pretrained`` writes PEFT's ordinary file; every rank has to call it.

    Raises:
        UnsupportedModelError: the adapter is on what tensor parallelism divides, or differs between
            ranks. The adapter is taken off again.
        PatchStateError: another rank failed.
    """
    with together("attach_adapter"):
        found = _attached(model, peft_config, adapter_name, options)
    return _divided_or_removed(found, model, adapter_name)


def load_adapter(
    model: nn.Module,
    folder: str | Path,
    adapter_name: str = "default",
    is_trainable: bool = False,
    **options: Any,
) -> Any:
    """Load an adapter from PEFT's ordinary file, saved by any number of ranks.

    Args:
        model, adapter_name: as for :func:`attach_adapter`.
        folder: what ``save_pretrained`` wrote; the same on every rank.
        is_trainable: False freezes the adapter.
        options: options of PeftModel's ``load_adapter``.

    Raises:
        UnsupportedModelError, PatchStateError: as :func:`attach_adapter`.
    """
    from peft import PeftConfig

    with together("load_adapter"):
        peft_config = PeftConfig.from_pretrained(str(folder))
        peft_config.inference_mode = not is_trainable
        found = _attached(model, peft_config, adapter_name, {})
        # The adapter exists already, so that PEFT only reads the file, onto the CPU.
        found.load_adapter(
            str(folder), adapter_name, is_trainable=is_trainable, torch_device="cpu", **options
        )
    return _divided_or_removed(found, model, adapter_name)


def shard_adapters(model: Any) -> Any:
    """Divide adapters that PEFT attached itself, before or after transformers divided the experts.

    Every rank has to call this, with equal adapters. :func:`attach_adapter` and
    :func:`load_adapter` call it. Dense adapters stay whole on each rank; if ranks have batches of
    their own, their gradients are averaged.

    Args:
        model: a PeftModel.

    Returns:
        The same object.

    Raises:
        UnsupportedModelError: the adapter is on what tensor parallelism divides, or differs between
            ranks, or is no PeftModel.
        PatchStateError: an adapter is merged; or another rank failed.
    """
    if not hasattr(model, "peft_config"):
        raise UnsupportedModelError(
            f"shard_adapters: {type(model).__name__} carries no adapter; accepted: a PeftModel"
        )
    if not several():
        return model
    with together("shard_adapters"):
        wrappers = list(experts_wrappers(model))
        _refuse(model)
    names = adapter_parameters(model)
    refuse_differences(model, names)
    groups, batches = batch_groups(model)
    for _, wrapper, held in wrappers:
        divided = [p for adapter in wrapper.lora_A for p in _divide(wrapper, adapter, held)]
        average_factors(divided, held, batches)
    parameters = dict(model.named_parameters())
    plain = [parameters[name] for name in names if not isinstance(parameters[name], DTensor)]
    new = [p for p in plain if not p.__dict__.get(_REDUCED)]
    average_replicas(new, groups, batches)
    for p in new:
        p.__dict__[_REDUCED] = True
    if wrappers:
        guard(model)
    return model


def _attached(model: nn.Module, peft_config: Any, name: str, options: dict[str, Any]) -> Any:
    """Return PEFT's model with a new adapter, whose factors of divided experts are on the CPU."""
    from peft import PeftModel, get_peft_model

    with _placeholders(model):
        if isinstance(model, PeftModel):
            model.add_adapter(name, peft_config, **options)
            return model
        return get_peft_model(model, peft_config, adapter_name=name, **options)


def _divided_or_removed(found: Any, model: nn.Module, adapter_name: str) -> Any:
    """Divide a new adapter; take it off again if that is refused."""
    added_to_it, divided = found is model, False
    try:
        shard_adapters(found)
        divided = True
    finally:
        if not divided:
            if added_to_it:
                found.delete_adapter(adapter_name)
            else:
                found.unload()
    return found


def _refuse(model: nn.Module) -> None:
    """Refuse merged adapters, and adapters on modules that tensor parallelism divides."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    batches = batch_axes(model)
    for path, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            if module.merged:
                raise PatchStateError(
                    f"{path}: the adapter is merged into the weight; accepted: adapters as "
                    "attached or loaded; call unmerge_adapter first"
                )
            base = base_of(module)
            only = module.parameter_name if is_param_wrapper(module) else None
            refuse_divided(base, path.replace(".base_layer", ""), batches, only)


@contextmanager
def _placeholders(model: nn.Module) -> Iterator[None]:
    """Put CPU tensors of the whole shape, without memory, in place of divided expert weights.

    The model's mesh is hidden too. With it, PEFT would follow the rules for experts of the
    tensor-parallel plan, which do not apply under expert parallelism.
    """
    batches = batch_axes(model)
    meshes = {m: m.__dict__[_MESH] for m in model.modules() if _MESH in m.__dict__}
    stored: list[tuple[nn.Module, str, nn.Parameter]] = []
    for path, module in model.named_modules():
        for name, p in module._parameters.items():
            if p is not None and held_experts(p, f"{path}.{name}", batches) is not None:
                stored.append((module, name, p))
    for holder in meshes:
        holder.__dict__[_MESH] = None
    for module, name, p in stored:
        shape_only = torch.empty(1, dtype=p.dtype).expand(p.shape)
        module._parameters[name] = nn.Parameter(shape_only, requires_grad=p.requires_grad)
    try:
        yield
    finally:
        for holder, mesh in meshes.items():
            holder.__dict__[_MESH] = mesh
        for module, name, p in stored:
            stand_in = module._parameters[name]
            assert stand_in is not None
            p.requires_grad_(stand_in.requires_grad)
            module._parameters[name] = p


def _divide(wrapper: Any, adapter: str, held: Held) -> list[nn.Parameter]:
    """Keep this rank's part of an adapter's factors; return the new parameters, if any.

    PEFT's layouts are A [E * R, in], expert by expert, and B [out, R * E], rank by rank.
    """
    holders = wrapper.lora_A[adapter], wrapper.lora_B[adapter]
    a, b = (holder.weight for holder in holders)
    if isinstance(a, DTensor):
        return []
    R = a.shape[0] // held.total
    own = slice(held.first, held.first + held.size)
    parts = (
        a.detach().view(held.total, R, -1)[own].reshape(held.size * R, -1),
        b.detach().view(-1, R, held.total)[:, :, own].reshape(-1, R * held.size),
    )
    device = base_of(wrapper)._parameters[wrapper.parameter_name].device
    made = []
    for holder, whole, part, placement in zip(
        holders, (a, b), parts, placements(held, R), strict=True
    ):
        # A clone, so that the whole factor's memory is freed.
        local = part.to(device, copy=True, memory_format=torch.contiguous_format)
        new = nn.Parameter(
            DTensor.from_local(
                local, held.mesh, [placement], run_check=False, shape=whole.shape,
                stride=whole.stride(),
            ),
            requires_grad=whole.requires_grad,
        )  # fmt: skip
        holder.weight = new
        made.append(new)
    wrapper.__dict__[HELD_KEY] = held.size
    return made
