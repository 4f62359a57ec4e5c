"""quantize_experts and its undo: replace the expert parameters of a model in place."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.formats.packed import STORAGES, PackedWeight, check_packable, pack
from moe_patch.formats.tensor import QuantTensor, parameter
from moe_patch.formats.weights import foreign_class
from moe_patch.patching import data_parallel, merging
from moe_patch.patching.discover import FoundBlock, discover, selected, unmatched
from moe_patch.quant import saving, state
from moe_patch.quant.fp8_checkpoint import adopt
from moe_patch.quant.ties import refuse_outside, tied
from moe_patch.runtime.adapters import is_param_wrapper
from moe_patch.runtime.described import layout_of, read_glu
from moe_patch.runtime.modules import is_sharded
from moe_patch.runtime.spec import FamilySpec

logger = logging.getLogger("moe_patch")
Model = TypeVar("Model", bound=nn.Module)


class Projection(NamedTuple):
    """One expert parameter of a model; ``transposed`` means storage as [E, in, out]."""

    path: str
    module: Any
    name: str
    transposed: bool

    @property
    def where(self) -> str:
        return f"{self.path}.{self.name}"

    @property
    def stored(self) -> Tensor:
        return self.module._parameters[self.name]


def quantize_experts(
    model: Model,
    storage: str,
    *,
    device: torch.device | str | None = None,
    pack_on: torch.device | str | None = None,
    include: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
) -> Model:
    """Store the experts of a model in 4 or 8 bits, in place, and freeze them.

    Everything is checked before anything changes. Projections are packed one at a time, and the
    16-bit weight is freed before the next one. So with a model on the CPU and ``device="cuda"``,
    the GPU never holds more than a piece of one 16-bit weight.

    Call it before or after :func:`patch_model`, and before or after adding PEFT adapters. Experts
    that already have this storage are left alone. Experts of an FP8 checkpoint are checked first
    and used as they are. Experts that share a parameter share its packed form.

    Args:
        model: a transformers model, bare or inside PEFT.
        storage: "nf4" (double quantisation, as bitsandbytes stores it) or "fp8" (e4m3, one scale
            per 128 x 128 block).
        device: device of the packed experts; None keeps each weight on its device.
        pack_on: device that packs; None is that of the packed experts.
        include, exclude: glob patterns on block paths, as in :class:`PatchConfig`.

    Returns:
        The same object.

    Raises:
        UnsupportedOptionError: unknown storage, or a pattern that matches no block.
        UnsupportedModelError: no MoE block, or experts that cannot be packed, by name. That
            includes experts with a merged adapter, and experts tied to an unquantised parameter.
    """
    if storage not in STORAGES:
        raise UnsupportedOptionError(
            f"quantize_experts: storage is {storage!r}; accepted: {', '.join(STORAGES)} (mxfp4 can "
            "only be loaded from checkpoints that have it: load_quantized)"
        )
    blocks = discover(model)
    if blocks and (wrong := unmatched(blocks, include=include, exclude=exclude)):
        raise UnsupportedOptionError(f"quantize_experts: {wrong}")
    if storage == "fp8":
        adopt(model, include, exclude)
    todo = []
    for one in expert_projections(model, include, exclude):
        _check(one, storage)
        if not isinstance(one.stored, QuantTensor):
            todo.append(one)
    _refuse_merged(model, todo)
    refuse_outside(model, todo)
    for group in tied(todo):
        first = group[0][0]
        target = first.stored.device if device is None else torch.device(device)
        put(group, pack_at(first.stored, storage, pack_on, target, first.where))
    saving.guard_saving(model)
    merging.guard_merging(model, merging.QUANTIZE)
    logger.info("moe_patch: %d expert parameters stored in %s", len(todo), storage)
    return model


def pack_at(
    weight: Tensor,
    storage: str,
    pack_on: torch.device | str | None,
    device: torch.device,
    where: str,
) -> PackedWeight:
    """Pack a weight on one device (None: the last) for another; see formats.packed.pack."""
    if pack_on is None:
        return pack(weight, storage, device, where)
    found = pack(weight, storage, torch.device(pack_on), where)
    scales = tuple(scale.to(device) for scale in found.scales)
    return replace(found, packed=found.packed.to(device), scales=scales)


def put(group: list[list[Projection]], packed: PackedWeight) -> None:
    """Replace parameters that share memory by one packed weight."""
    for same in group:
        made = parameter(QuantTensor(packed))
        for one in same:
            setattr(one.module, one.name, made)
            state.watch(one.module)


def ignore_in_ddp(model: nn.Module) -> None:
    """Make DistributedDataParallel ignore packed experts, as ``patch_model`` does by itself.

    Needed only for a model that DDP wraps before it is patched. After adding adapters to a patched
    model, call ``patch_model`` again.

    Args:
        model: the model that DDP (or a Trainer) will wrap, adapters included.
    """
    data_parallel.leave_packed_out(model)


def dequantize_experts(model: Model, dtype: torch.dtype | None = None) -> Model:
    """Undo :func:`quantize_experts`: replace packed experts by frozen, dequantised parameters.

    Args:
        model: a model with quantised experts.
        dtype: dtype of the weights; None means their dtype before quantisation.

    Raises:
        UnsupportedModelError: the model has no quantised experts.
    """
    todo = [
        Projection(path, module, name, False)
        for path, module in model.named_modules()
        for name, value in module._parameters.items()
        if isinstance(value, QuantTensor)
    ]
    if not todo:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no quantised experts; call quantize_experts first"
        )
    for group in tied(todo):
        first: Any = group[0][0]
        weight = first.stored.weight
        value = weight.to(dtype or weight.dtype).experts(0, weight.shape[0]).contiguous()
        for same in group:
            made = nn.Parameter(value, requires_grad=False)
            for one in same:
                setattr(one.module, one.name, made)
    saving.free_saving(model)
    merging.free_merging(model)
    data_parallel.readmit_packed(model)
    return model


def expert_projections(
    model: nn.Module, include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()
) -> Iterator[Projection]:
    """Yield the expert parameters of a model that can be quantised, in module order.

    Raises:
        UnsupportedModelError: no MoE block is selected, or a block's experts cannot be quantised.
    """
    blocks = [b for b in discover(model) if selected(b, include, exclude)]
    if not blocks:
        raise UnsupportedModelError(
            f"{type(model).__module__}.{type(model).__name__}: no MoE block to quantise; "
            "moe_patch.supported_model_types() lists the accepted ones"
        )
    for block in blocks:
        if block.refused:
            raise UnsupportedModelError(f"{block.path}: {block.reason}; use exclude to skip it")
        if not block.experts:
            raise UnsupportedModelError(
                f"{block.path}: it has no experts module to quantise; use exclude to skip it"
            )
        yield from block_projections(block)


def pack_block(block: FoundBlock, storage: str, device: torch.device) -> None:
    """Pack the experts of one block, as :func:`quantize_experts` does for a model.

    Raises:
        UnsupportedModelError: experts that cannot be quantised.
    """
    for one in block_projections(block):
        put([[one]], pack(one.stored.detach(), storage, device, one.where))


def block_projections(block: FoundBlock) -> Iterator[Projection]:
    """Yield the expert parameters of one block; see :func:`expert_projections`."""
    for path, experts in block.experts:
        if (why := _why_not(experts, block.spec)) is not None:
            raise UnsupportedModelError(
                f"{path} ({type(experts).__name__}): cannot be quantised: {why}; use exclude to "
                "skip it"
            )
        layout = layout_of(experts, block.spec)
        for name in (layout.up_name, "down_proj"):
            yield Projection(path, experts, name, layout.is_transposed)


def _why_not(experts: nn.Module, spec: FamilySpec) -> str | None:
    layout = layout_of(experts, spec)
    if experts._modules.get("parametrizations") is not None:
        return "its parameters have a parametrization"
    for name in (layout.up_name, "down_proj"):
        if experts._parameters.get(name) is None:
            return f"it has no parameter {name} of its own"
    if read_glu(experts, spec, layout) is None:
        return "the fused experts do not support its activation"
    if experts._parameters[layout.up_name].shape[0] != experts._parameters["down_proj"].shape[0]:  # type: ignore[union-attr]
        return "its projections differ in their number of experts"
    return None


def _refuse_merged(model: nn.Module, todo: list[Projection]) -> None:
    """Refuse experts with a merged adapter, which could not be unmerged from packed bytes."""
    for module in model.modules():
        if not is_param_wrapper(module):
            continue
        wrapper: Any = module
        for one in todo:
            if wrapper.merged and one.module is wrapper.get_base_layer():
                raise UnsupportedModelError(
                    f"{one.path} ({type(one.module).__name__}): cannot be quantised: adapters "
                    f"{', '.join(map(repr, wrapper.merged_adapters))} are merged into its "
                    f"{wrapper.parameter_name}; accepted: unmerge_adapter() or merge_and_unload() "
                    "first"
                )


def _check(one: Projection, storage: str) -> None:
    """Refuse what :func:`pack` would refuse, and weights that already have another storage."""
    weight = one.stored
    if isinstance(weight, QuantTensor):
        if weight.weight.storage != storage:
            raise UnsupportedModelError(
                f"{one.where} is stored in {weight.weight.storage} already; accepted: {storage}, "
                "or dequantize_experts first"
            )
        return
    foreign = foreign_class(weight) is not None or is_sharded(weight)
    if foreign or weight.is_meta or hasattr(weight, "ds_id"):
        raise UnsupportedModelError(
            f"{one.where}: {type(weight.data).__name__} on {weight.device} cannot be quantised; "
            "accepted: plain, unsharded weights on a device other than meta (quantise before "
            "FSDP2 shards; expert and tensor parallelism take experts in 16 bits)"
        )
    check_packable(weight, storage, one.where)
