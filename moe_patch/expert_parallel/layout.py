"""Read from transformers' DTensor weights which experts a rank holds and who has other batches.

    release       experts over    batches over                 copies of an expert
    5.17, 5.18    no name         "fsdp", never both           none
    from 5.19     "ep"            "dp_replicate" and "fsdp"    "dp_replicate" and "efsdp"

FSDP2 shards the copies of an expert further and gathers them for each forward. Its own mesh, if the
user gives none, has no name either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from moe_patch.errors import UnsupportedModelError
from moe_patch.runtime.adapters import base_of, is_param_wrapper

BATCHES, UNNAMED = frozenset({"dp_replicate", "fsdp", "efsdp"}), ""
EXPERTS_NDIM = 3


class Held(NamedTuple):
    """The experts that this rank holds of one parameter.

    Attributes:
        mesh: 1-D mesh of the ranks that hold all experts together.
        first, size, total: this rank's experts are first .. first + size - 1 of ``total``.
        copies: groups of ranks that hold the same experts, largest axis first.
    """

    mesh: DeviceMesh
    first: int
    size: int
    total: int
    copies: tuple[Any, ...]


def batch_axes(model: nn.Module) -> frozenset[str]:
    """Return the names of mesh axes over which FSDP2 divides weights and batches."""
    unnamed = any(isinstance(module, FSDPModule) for module in model.modules())
    return BATCHES | {UNNAMED} if unnamed else BATCHES


def held_experts(parameter: Tensor, where: str, batches: frozenset[str]) -> Held | None:
    """Return which experts of a 3-D parameter this rank holds; None if every rank uses all.

    Args:
        parameter: the weight as the experts module stores it, [E, rows, columns].
        where: name of the parameter, for errors.
        batches: :func:`batch_axes` of the model.

    Raises:
        UnsupportedModelError: tensor parallelism divides each expert, or the experts do not divide
            evenly.
    """
    if not isinstance(parameter, DTensor) or parameter.ndim != EXPERTS_NDIM:
        return None
    axis = _model_axis(parameter, batches)
    if axis is None:
        return None
    mesh, placement = parameter.device_mesh, parameter.placements[axis]
    name, ranks = _names(mesh)[axis], mesh.size(axis)
    if placement.dim != 0:  # type: ignore[attr-defined]
        raise UnsupportedModelError(
            f"{where}: tensor parallelism ({placement} over {ranks} ranks of {name!r}) divides "
            "each expert, and no adapter fits a part of an expert; accepted: whole experts on each "
            f"rank; load with DistributedConfig(tp_size={ranks}, ep_size={ranks}), or before "
            f"transformers 5.19 with tp_size={ranks} and enable_expert_parallel=True"
        )
    total = parameter.shape[0]
    if total % ranks:
        raise UnsupportedModelError(
            f"{where}: {total} experts over {ranks} ranks of {name!r}; accepted: a number of ranks "
            "that divides the experts"
        )
    size = total // ranks
    copies = [mesh.get_group(i) for i in range(mesh.ndim) if i != axis and mesh.size(i) > 1]
    own = mesh if mesh.ndim == 1 else mesh[name]
    return Held(own, own.get_local_rank() * size, size, total, tuple(copies))


def refuse_divided(
    module: nn.Module, where: str, batches: frozenset[str], only: str | None = None
) -> None:
    """Refuse an adapter on a dense module that tensor parallelism divides.

    Args:
        module: the module under the adapter.
        where: its path, for errors.
        batches: :func:`batch_axes` of the model.
        only: the one adapted parameter; None means all.

    Raises:
        UnsupportedModelError: it does.
    """
    for name, p in module.named_parameters(recurse=False):
        if not isinstance(p, DTensor) or p.ndim == EXPERTS_NDIM or only not in (None, name):
            continue
        axis = _model_axis(p, batches)
        if axis is not None:
            over = _names(p.device_mesh)[axis]
            raise UnsupportedModelError(
                f"{where}.{name}: tensor parallelism ({p.placements[axis]} over {over!r}) divides "
                "the module that an adapter is on; accepted: modules that each rank holds whole; "
                "adapt the experts alone, or use DistributedConfig(fsdp_size=..., ep_size=...)"
            )


def batch_groups(model: nn.Module) -> tuple[list[Any], int]:
    """Return the groups of ranks with other batches, and the number of batches in one step."""
    batches = batch_axes(model)
    for p in model.parameters():
        if isinstance(p, DTensor) and p.ndim != EXPERTS_NDIM:
            mesh, names = p.device_mesh, _names(p.device_mesh)
            axes = [i for i in range(mesh.ndim) if names[i] in batches and mesh.size(i) > 1]
            if axes:
                groups = [mesh.get_group(i) for i in axes]
                count = 1
                for i in axes:
                    count *= mesh.size(i)
                return groups, count
    return [], 1


def experts_wrappers(model: nn.Module) -> Iterator[tuple[str, Any, Held]]:
    """Yield path, wrapper and held experts of each of PEFT's wrappers around sharded experts.

    Raises:
        UnsupportedModelError: as :func:`held_experts`.
    """
    batches = batch_axes(model)
    for path, module in model.named_modules():
        if is_param_wrapper(module):
            wrapper: Any = module
            name = wrapper.parameter_name
            parameter = base_of(wrapper)._parameters.get(name)
            where = f"{path.replace('.base_layer', '')}.{name}"
            if parameter is not None:
                held = held_experts(parameter, where, batches)
                if held is not None:
                    yield path, wrapper, held


def placements(held: Held, rank_of_factor: int) -> tuple[Placement, Placement]:
    """Return how factors A and B are divided, in PEFT's layouts.

    PEFT stores A as [E * R, in], expert by expert, and B as [out, R * E], rank by rank. So a rank's
    part of B is strided.
    """
    return Shard(0), _StridedShard(1, split_factor=rank_of_factor)


def _model_axis(parameter: DTensor, batches: frozenset[str]) -> int | None:
    """Return the axis of the mesh that divides a parameter for good, not until FSDP2 gathers it."""
    mesh, names = parameter.device_mesh, _names(parameter.device_mesh)
    for i, placement in enumerate(parameter.placements):
        divided = isinstance(placement, Shard | _StridedShard)
        if divided and names[i] not in batches and mesh.size(i) > 1:
            return i
    return None


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or (UNNAMED,) * mesh.ndim
