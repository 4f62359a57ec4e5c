"""Save divided adapters as PEFT's ordinary file, and refuse to merge them.

``save_pretrained`` of the PeftModel is bound on the instance: PEFT's own would write each rank's
part under the whole adapter's name.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.expert_parallel.layout import Held, experts_wrappers
from moe_patch.expert_parallel.together import together

_MERGING = ("merge_adapter", "merge_and_unload")


def guard(model: Any) -> None:
    """Bind saving on a PeftModel with divided adapters, and refusals on its tuner."""
    model.__dict__["save_pretrained"] = functools.partial(save_pretrained, model)
    for name in _MERGING:
        model.base_model.__dict__.setdefault(name, functools.partial(_refuse_merge, name))


def save_pretrained(
    model: Any,
    save_directory: str | Path,
    selected_adapters: list[str] | None = None,
    is_main_process: bool = True,
    **options: Any,
) -> None:
    """Write PEFT's ordinary files on rank 0. Every rank has to call this.

    Factors come to rank 0 one projection at a time, and from its device to its CPU.

    Args:
        model: a PeftModel with divided adapters.
        save_directory: as PEFT's.
        selected_adapters: names of adapters; None saves all.
        is_main_process: ignored, since rank 0 writes; transformers' Trainer passes it.
        options: other options of PEFT's method, without ``state_dict``.

    Raises:
        UnsupportedOptionError: a state dict was given.
        PatchStateError: another rank failed.
    """
    if options.pop("state_dict", None) is not None:
        raise UnsupportedOptionError(
            "save_pretrained: state_dict is not accepted for adapters that are divided over ranks, "
            "because each rank has only a part of them; accepted: no state_dict"
        )
    names = list(model.peft_config) if selected_adapters is None else selected_adapters
    with together("save_pretrained"):
        state = _whole_state(model, names)
        if dist.get_rank() == 0:
            type(model).save_pretrained(
                model, str(save_directory), selected_adapters=names, state_dict=state, **options
            )


def _whole_state(model: Any, names: list[str]) -> dict[str, Tensor]:
    """Return the state dict with whole factors on the CPU of rank 0; without them elsewhere.

    Divided weights of the base model are left out, since no adapter's file holds them.
    """
    state = {k: v for k, v in model.state_dict().items() if not isinstance(v, DTensor)}
    for path, wrapper, held in experts_wrappers(model):
        for name in names:
            if name not in wrapper.lora_A:
                continue
            a, b = (holders[name].weight for holders in (wrapper.lora_A, wrapper.lora_B))
            R = a.shape[0] // held.total
            parts = _gather(a, held)
            if parts:
                state[f"{path}.lora_A.{name}.weight"] = torch.cat(parts)
            parts = _gather(b, held)
            if parts:
                by_rank = [part.view(-1, R, held.size) for part in parts]
                whole = torch.cat(by_rank, dim=2).view(-1, R * held.total)
                state[f"{path}.lora_B.{name}.weight"] = whole
    return state


def _gather(factor: DTensor, held: Held) -> list[Tensor]:
    """Return every rank's part on the CPU of rank 0, in order of the experts; else nothing."""
    group = held.mesh.get_group()
    members = dist.get_process_group_ranks(group)
    if 0 not in members:
        return []  # other copies of the same experts
    local = factor.to_local().detach().contiguous()
    sent = local.view(torch.uint8)  # bytes: a backend need not know the dtype
    if dist.get_rank() != 0:
        dist.gather(sent, dst=0, group=group)
        return []
    received = [torch.empty_like(sent) for _ in members]
    dist.gather(sent, received, dst=0, group=group)
    return [part.cpu().view(local.dtype) for part in received]


def _refuse_merge(name: str, *_: Any, **__: Any) -> None:
    raise UnsupportedModelError(
        f"{name}: nothing can be merged into experts that are divided over ranks; no weight was "
        "changed; accepted: save the adapter, then merge it into the checkpoint in one process "
        "(moe-patch merge)"
    )
