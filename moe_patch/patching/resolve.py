"""Find out, before anything is bound, which blocks can be patched and why others cannot."""

from __future__ import annotations

import warnings

from torch import nn

from moe_patch.config import PatchConfig
from moe_patch.errors import EntryMismatchError, UnsupportedModelError, UnsupportedOptionError
from moe_patch.families import is_shipped, later_release
from moe_patch.families.installed import installed_release
from moe_patch.formats.weights import projection, require_float
from moe_patch.ops.backend import choose_backend, refuse_batch_invariant
from moe_patch.patching.bindings import (
    bindings_of,
    foreign_forward,
    no_experts,
    overridden,
    overridden_by_user,
)
from moe_patch.patching.discover import (
    DECORATED,
    WHOLE_MODEL,
    FoundBlock,
    discover,
    refused_block,
    selected,
    some_paths,
    unmatched,
)
from moe_patch.patching.entry_fit import mismatch
from moe_patch.patching.offload import check_offload, computes_here
from moe_patch.patching.window import OLDEST_TRANSFORMERS
from moe_patch.runtime.adapters import HELD_KEY, adapted_twice, why_not_fused
from moe_patch.runtime.described import layout_of, read_glu
from moe_patch.runtime.experts import stored_weight
from moe_patch.runtime.module_patch import origin_of, patch_of
from moe_patch.runtime.spec import FamilySpec, read


def chosen_blocks(model: nn.Module, config: PatchConfig) -> list[FoundBlock]:
    """Return the MoE blocks that a config's patterns select, or a refused one if there are none.

    Raises:
        UnsupportedModelError: under ``strict``, no block is selected.
        UnsupportedOptionError: under ``strict``, a pattern matches none of the model's blocks.
    """
    blocks = discover(model)
    chosen = [block for block in blocks if selected(block, config.include, config.exclude)]
    wrong = unmatched(blocks, include=config.include, exclude=config.exclude)
    if blocks and wrong:
        if config.strict:
            raise UnsupportedOptionError(f"{type(model).__name__}: {wrong}")
        if chosen:  # if nothing is chosen, the caller warns once about that instead
            warnings.warn(f"moe_patch: {wrong}", stacklevel=3)
    return chosen or [nothing_found(model, blocks, config)]


def nothing_found(model: nn.Module, blocks: list[FoundBlock], config: PatchConfig) -> FoundBlock:
    """Return a refused block for a model without a selected MoE block, for warning and report.

    Raises:
        UnsupportedModelError: under ``strict``.
    """
    reason = f"{type(model).__module__}.{type(model).__name__}: no MoE block found"
    if blocks:
        reason += (
            f" among the selected paths (include {list(config.include)}, exclude "
            f"{list(config.exclude)}); there are {some_paths(blocks)}; change the patterns"
        )
    elif later := later_release((_model_type(model),)):
        installed = installed_release("transformers")
        reason += f"; its family entry needs transformers {later} or newer, found {installed}"
    else:
        reason += "; accepted: the model types that `moe-patch families` lists"
    if config.strict:
        raise UnsupportedModelError(reason)
    return refused_block(WHOLE_MODEL, model, reason)


def _model_type(model: nn.Module) -> str:
    """Return the model type of a model's config; empty for a module without one."""
    config = model.__dict__.get("config")
    return "" if config is None else str(config.model_type)


def refusals(model: nn.Module, blocks: list[FoundBlock], config: PatchConfig) -> dict[str, str]:
    """Check every block; return the reasons of the refused ones by path.

    Raises:
        UnsupportedModelError: a refusal under ``strict``, or nn.DataParallel.
        UnsupportedOptionError: under ``strict``, some block cannot have an option.
    """
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise UnsupportedModelError(
            f"{type(model).__name__}: nn.DataParallel copies modules with their bound forwards, "
            "which then run the first device's weights; use DistributedDataParallel (torchrun or "
            "accelerate launch), or one visible device"
        )
    refused = {block.path: why for block in blocks if (why := _refusal(block, config)) is not None}
    if refused and config.strict:
        path, reason = next(iter(refused.items()))
        raise UnsupportedModelError(
            f"{path}: {reason} ({len(refused)} of {len(blocks)} MoE blocks); strict=False leaves "
            "such blocks to transformers"
        )
    return refused


def warn_of(refused: dict[str, str], blocks: list[FoundBlock]) -> None:
    """Warn once about the blocks that a patch leaves to transformers, if any."""
    if refused:
        path, reason = next(iter(refused.items()))
        warnings.warn(
            f"moe_patch leaves {len(refused)} of {len(blocks)} MoE blocks to transformers, "
            f"first {path}: {reason}",
            stacklevel=3,
        )


def falls_to_experts(block: FoundBlock) -> bool:
    """Return whether to patch only the experts if the entry does not fit the rest of the block.

    A user-registered entry is refused instead, because the entry itself may be wrong.
    """
    spec = block.spec
    return bool(block.experts) and spec.runs_experts_alone and is_shipped(spec)


def fitted(blocks: list[FoundBlock]) -> list[FoundBlock]:
    """Reduce blocks to their experts if their classes lack attributes that the entry reads.

    A class lacks an attribute if none of its modules has it. A module that lost an attribute which
    others have is refused later, because transformers' own code would not run on it either.
    """
    lacks = [_misfit(block) if falls_to_experts(block) else "" for block in blocks]
    fit = {_classes(block) for block, why in zip(blocks, lacks, strict=True) if not why}
    return [
        block.experts_only(why) if why and _classes(block) not in fit else block
        for block, why in zip(blocks, lacks, strict=True)
    ]


def _classes(block: FoundBlock) -> tuple[type, ...]:
    return type(block.block), *(type(router) for _, router in block.routers)


def _misfit(block: FoundBlock) -> str:
    """Say what the block's classes lack of what the entry reads; else empty."""
    try:
        _check_attributes(block)
    except EntryMismatchError as error:
        return str(error)
    return ""


def warn_of_mismatches(found: list[FoundBlock], patched: list[FoundBlock]) -> None:
    """Warn once about new blocks whose router and block stay with transformers, if any."""
    known = {block.path for block in found if block.mismatch}
    new = [block for block in patched if block.mismatch and block.path not in known]
    if new:
        warnings.warn(
            f"moe_patch patches only the experts of {len(new)} of {len(found)} MoE blocks, first "
            f"{new[0].path}: {new[0].mismatch}",
            stacklevel=3,
        )


def _refusal(block: FoundBlock, config: PatchConfig) -> str | None:
    if block.refused:
        return block.reason
    if not block.experts and block.spec.experts is not None:
        return no_experts(block)
    bindings = bindings_of(block, config)
    for path, (module, _, _, attribute) in bindings:
        # Another library may wrap our forward after patching; this does not prevent patching again.
        foreign = foreign_forward(module, attribute) if patch_of(module) is None else None
        if foreign is not None:
            name = f"{path} ({type(module).__name__})"
            return (
                f"{name} already has a {attribute} bound by {origin_of(foreign)}, which the patch "
                "would replace; bind it after patch_model, or leave moe_patch out"
            )
    if (conflict := overridden(block) or overridden_by_user(block, bindings)) is not None:
        return conflict
    try:
        _check_attributes(block)
        for path, experts in block.experts:
            _check_experts_module(path, experts, block.spec, config)
        _check_batch_invariant(block, config)
        if config.offload_experts:
            check_offload(block)
        _check_lora(block, config)
    except UnsupportedModelError as error:
        return str(error)
    except UnsupportedOptionError as error:
        if config.strict:
            raise
        return str(error)
    return None


def _lacks_router(block: FoundBlock) -> bool:
    """Return whether the entry names a router class and the block has no such router."""
    # Experts passed without a block (a replayed call) cannot lack a router.
    around = block.block is not None or block.path != ""
    named = block.spec.routing is not None and block.spec.router is not None
    return around and named and not block.routers


def _check_attributes(block: FoundBlock) -> None:
    """Check that every attribute named by the family entry exists, before a forward reads it.

    Raises:
        EntryMismatchError: one is missing (names class, attribute and versions).
    """
    spec = block.spec
    for owner, own in block.choosers:
        for source in [*own.params.values(), own.bias]:
            if isinstance(source, str):
                read(owner, source)
    if _lacks_router(block):
        raise mismatch(
            block.block or block.experts[0][1], f"there is no {spec.router} in the block"
        )
    if block.block is not None and spec.shared is not None and spec.block_forward is None:
        for name in (spec.router_attr, spec.shared, spec.shared_gate):
            if name is not None:
                read(block.block, name)


def _check_experts_module(
    path: str, experts: nn.Module, spec: FamilySpec, config: PatchConfig
) -> None:
    if spec.experts_forward is None and spec.layout is None:
        missing = [name for name in DECORATED if name not in experts.__dict__]
        if missing:
            import transformers

            raise UnsupportedModelError(
                f"{path} ({type(experts).__name__}): transformers {transformers.__version__} does "
                f"not cover this class with its experts registry (no {', '.join(missing)}); "
                f"{_accepted_release(spec)}"
            )
    if spec.experts_forward is None or spec.layout is not None:
        read_glu(experts, spec)
        weight, layout = stored_weight(experts, spec), layout_of(experts, spec)
        # A pruned weight is no parameter; a parametrization may compute floats from packed bytes.
        computed = [projection(experts, "down_proj")] if layout.fused else []
        named = experts.named_parameters()
        stored = (p for name, p in named if "parametrizations" not in name.split("."))
        for tensor in (weight, *computed, *stored):
            require_float(tensor, f"{path} ({type(experts).__name__})")
        if computes_here(weight, config):
            choose_backend(config.backend, weight.device, weight.dtype, config.batch_invariant)


def _accepted_release(spec: FamilySpec) -> str:
    """Name the releases that can run a family's experts, as far as its entry tells."""
    later = later_release(spec.model_types)
    if later:
        return f"needs transformers {later} or newer"
    return (
        f"accepted: a class that transformers {OLDEST_TRANSFORMERS} or newer decorates with "
        "use_experts_implementation"
    )


def _check_batch_invariant(block: FoundBlock, config: PatchConfig) -> None:
    if not config.batch_invariant:
        return
    if not block.experts:
        refuse_batch_invariant(
            f"{block.path}: the experts of this family run as torch's own products"
        )
    for path, experts in block.experts:
        if read_glu(experts, block.spec) is None:
            refuse_batch_invariant(f"{path} ({type(experts).__name__}): its own activation or norm")


def _check_lora(block: FoundBlock, config: PatchConfig) -> None:
    for path, wrapper in block.wrappers:
        if config.fuse_lora == "off" and HELD_KEY in wrapper.__dict__:
            reason = "fuse_lora='off' cannot hold on experts divided over ranks; use 'auto'"
            raise UnsupportedModelError(f"{path}: {reason}")
    if config.fuse_lora != "off" and (twice := adapted_twice(block.wrappers)):
        raise UnsupportedModelError(twice)
    if config.fuse_lora != "require":
        return
    for path, wrapper in block.wrappers:
        if why := why_not_fused(wrapper):
            raise UnsupportedOptionError(
                f"{path}: fuse_lora='require' cannot hold: {why}; use fuse_lora='auto'"
            )
