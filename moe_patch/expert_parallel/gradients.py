"""Gradients of adapters when ranks have batches of their own.

FSDP2 averages the gradients of the parameters that it shards. Adapters that were attached later
are not among them. Each gets a hook which averages a new gradient over all batches before autograd
accumulates it, so that several backward passes per step stay right.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from moe_patch.expert_parallel.layout import Held


def average_factors(parameters: Sequence[Tensor], held: Held, batches: int) -> None:
    """Average gradients of divided factors: a rank has seen the tokens of all its mesh's batches.

    Args:
        parameters: DTensors over ``held.mesh``.
        held: the experts that they belong to; their other copies have seen other batches.
        batches: number of batches in one step.
    """
    if batches > 1:
        for p in parameters:
            _hook(p, functools.partial(_mean_of_part, held.copies, batches))


def average_replicas(parameters: list[Tensor], groups: list[Any], batches: int) -> None:
    """Average gradients of plain parameters over ranks with other batches."""
    if batches > 1:
        for p in parameters:
            _hook(p, functools.partial(_mean, groups, batches))


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients down to a total norm over all ranks; return the norm before.

    ``torch.nn.utils.clip_grad_norm_`` refuses a mixture of plain and divided gradients.
    transformers' Trainer clips as this function does.

    Args:
        model: the model after backward.
        max_norm: largest norm allowed.

    Returns:
        A scalar that is equal on all ranks.
    """
    by_mesh: dict[Any, list[Tensor]] = defaultdict(list)
    for p in model.parameters():
        if p.grad is not None:
            by_mesh[p.grad.device_mesh if isinstance(p.grad, DTensor) else None].append(p)
    norms = []
    for parameters in by_mesh.values():
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms))
    for parameters in by_mesh.values():
        clip_grads_with_norm_(parameters, max_norm, total)
    return total


def _hook(parameter: Tensor, hook: Any) -> None:
    """Register a hook that also acts if the parameter is frozen now and trained later."""
    trained = parameter.requires_grad
    parameter.requires_grad_(True)
    parameter.register_hook(hook)
    parameter.requires_grad_(trained)


def _mean(groups: list[Any], batches: int, grad: Tensor) -> Tensor:
    grad = grad / batches
    for group in groups:
        dist.all_reduce(grad, group=group)
    return grad


def _mean_of_part(groups: tuple[Any, ...], batches: int, grad: Tensor) -> Tensor:
    assert isinstance(grad, DTensor)
    local = _mean(list(groups), batches, grad.to_local())
    return DTensor.from_local(
        local, grad.device_mesh, grad.placements, run_check=False, shape=grad.shape,
        stride=grad.stride(),
    )  # fmt: skip
