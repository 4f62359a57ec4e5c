"""Patch a model and undo it: resolve and check everything first, then bind.

A failure before binding leaves the model exactly as it was. Weights are never moved, copied,
renamed or wrapped. Classes, shared configs and process-wide state are never written.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from moe_patch.config import PatchConfig
from moe_patch.debug import probe
from moe_patch.errors import PatchStateError, UnsupportedModelError
from moe_patch.patching.bindings import bindings_of, watched
from moe_patch.patching.by_name import ExpertsPatch, register_experts
from moe_patch.patching.checks import self_checks
from moe_patch.patching.data_parallel import leave_packed_out, readmit_packed
from moe_patch.patching.discover import FoundBlock
from moe_patch.patching.lora_targets import missed_experts
from moe_patch.patching.merging import PATCH, free_merging, guard_merging
from moe_patch.patching.offload import give_back, hold, take_seats
from moe_patch.patching.resolve import (
    chosen_blocks,
    fitted,
    refusals,
    warn_of,
    warn_of_mismatches,
)
from moe_patch.patching.window import require_window
from moe_patch.runtime.forward import EXPERTS_NAME
from moe_patch.runtime.module_patch import PATCH_KEY, ModulePatch, bind, patch_of, unbind

logger = logging.getLogger("moe_patch")
Model = TypeVar("Model", bound=nn.Module)


def patch_model(model: Model, config: Any = None, **options: Any) -> Model:
    """Run a model's MoE blocks on this library, in place.

    Args:
        model: a transformers model, bare or inside PEFT, DDP or a compiled wrapper.
        config: None or True (defaults), False (leave the model alone), a PatchConfig, a mapping or
            a YAML node.
        options: single options, see :class:`PatchConfig`.

    Returns:
        The same object.

    Raises:
        UnsupportedModelError: this is no model, it has no MoE block, or a block cannot be patched
            (``strict``); or transformers or PEFT is too old.
        UnsupportedOptionError: an option is unknown or wrong, or this model cannot have it.
        PatchStateError: the model is already patched with another config.
    """
    parsed = PatchConfig.parse(config, **options)
    if parsed is None:
        logger.info("moe_patch: false, the model is left as it is")
        return model
    again = _check_state(model, parsed)
    require_window(model)
    found = chosen_blocks(model, parsed)
    blocks = fitted(found)
    refused = refusals(model, blocks, parsed)
    checks = self_checks(blocks, parsed, refused) if parsed.self_check else {}
    warn_of(refused, blocks)
    warn_of_mismatches(found, [b for b in blocks if b.path not in refused])
    register_experts()
    patched_blocks = [b for b in blocks if b.path not in refused]
    seats = take_seats(patched_blocks) if parsed.offload_experts else []
    bound = _bind_all(found, blocks, parsed, refused, checks)
    for seated in seats:
        hold(*seated)
    if parsed.shadow_check or parsed.debug_nan:
        probe.attach(model, {b.path: watched(b) for b in patched_blocks}, parsed)
    guard_merging(model, PATCH)
    leave_packed_out(model)
    if again:
        logger.info("moe_patch: already patched with an equal config; bound %d new modules", bound)
    else:
        _announce_conflict(blocks)
    if note := missed_experts(model):
        warnings.warn(f"moe_patch: {note}", stacklevel=2)
    return model


def _bind_all(
    found: list[FoundBlock],
    blocks: list[FoundBlock],
    config: PatchConfig,
    refused: dict[str, str],
    checks: dict[str, str],
) -> int:
    """Bind the accepted blocks and mark the others; return the number of newly bound modules.

    Args:
        found: the blocks as discovered.
        blocks: the same blocks after fitting: some with only their experts.
        config: the patch's options.
        refused: reasons by block path.
        checks: self-check results by block path.
    """
    bound = 0
    for before, block in zip(found, blocks, strict=True):
        if block.path in refused:
            _mark_refused(before, config, refused[block.path])
            continue
        if block.mismatch and not before.mismatch:
            _give_back(before)
        bound += _bind_block(block, config, checks.get(block.path, "off"))
    return bound


def unpatch_model(model: Model) -> Model:
    """Undo :func:`patch_model` exactly; one call undoes any number of equal patches.

    Raises:
        PatchStateError: the model is not patched.
    """
    touched = _touched(model)
    if not touched:
        raise PatchStateError(f"{type(model).__name__} is not patched; call patch_model first")
    readmit_packed(model)
    for module in touched:
        _undo(module)
    free_merging(model, PATCH)
    return model


def _undo(module: Any) -> None:
    patch = module.__dict__[PATCH_KEY]
    if patch.seat is not None:
        give_back(module, patch.seat)
    if "config" in patch.saved:
        module.config = patch.saved.pop("config")
    unbind(module)


@contextmanager
def patched(model: Model, config: Any = None, **options: Any) -> Iterator[Model]:
    """Patch for the duration of a ``with`` block; takes the arguments of :func:`patch_model`.

    A model that already carried an equal patch stays patched, and ``False`` patches nothing.
    """
    patched_before = bool(_touched(model))
    patch_model(model, config, **options)
    try:
        yield model
    finally:
        if not patched_before and _touched(model):
            unpatch_model(model)


def _touched(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if PATCH_KEY in module.__dict__]


def _check_state(model: nn.Module, config: PatchConfig) -> bool:
    """Return whether the model already carries this patch.

    Raises:
        PatchStateError: it carries another patch.
        UnsupportedModelError: it is no model.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"patch_model was given {type(model).__name__} {str(model)[:80]!r}; accepted: a model, "
            "as from_pretrained returns it"
        )
    configs = {patch.config for m in model.modules() if (patch := patch_of(m)) is not None}
    for carried in configs - {config}:
        raise PatchStateError(
            f"{type(model).__name__} is already patched with {carried.unlike(config)}; this call "
            f"has {config.unlike(carried)}; call patch_model with the same options as before (it "
            "binds what is new), or unpatch_model first"
        )
    return bool(configs)


def _bind_block(block: FoundBlock, config: PatchConfig, self_check: str) -> int:
    """Bind the modules that are not bound yet; return their number."""
    _unmark_refused(block)
    spec = block.spec
    bound = 0
    for _, binding in bindings_of(block, config, self_check):
        if patch_of(binding.module) is None:
            bind(*binding)
            bound += 1
    for _, experts in block.experts:
        if patch_of(experts) is None:
            _point_at_registry(
                experts,
                ExpertsPatch("experts", spec, config, self_check=self_check, reason=block.mismatch),
            )
            bound += 1
    return bound


def _point_at_registry(experts: Any, patch: ModulePatch) -> None:
    """Select our experts function in a private copy of the config that the module reads."""
    patch.saved["config"] = experts.config
    own = copy.copy(experts.config)
    own._experts_implementation_internal = EXPERTS_NAME
    experts.config = own
    experts.__dict__[PATCH_KEY] = patch


def _mark_refused(block: FoundBlock, config: PatchConfig, reason: str) -> None:
    """Leave the block to transformers, even if an earlier call patched it."""
    _give_back(block)
    _anchor(block).__dict__[PATCH_KEY] = ModulePatch("refused", block.spec, config, reason=reason)


def _give_back(block: FoundBlock) -> None:
    """Undo what an earlier call bound in the block."""
    bound = [block.block, *(m for _, m in [*block.routers, *block.experts, *block.wrappers])]
    for module in bound:
        if module is not None and PATCH_KEY in module.__dict__:
            _undo(module)


def _unmark_refused(block: FoundBlock) -> None:
    """Remove the record of an earlier refusal, because the block is patched now."""
    patch = patch_of(_anchor(block))
    if patch is not None and patch.role == "refused":
        del _anchor(block).__dict__[PATCH_KEY]


def _anchor(block: FoundBlock) -> nn.Module:
    """Return the module that carries a refused block's record."""
    if block.block is not None:
        return block.block
    return next(module for _, module in [*block.experts, *block.routers])


def _announce_conflict(blocks: list[FoundBlock]) -> None:
    for block in blocks:
        for _, experts in block.experts:
            patch = patch_of(experts)
            chosen = (
                patch.saved["config"]._experts_implementation
                if patch and "config" in patch.saved
                else None
            )
            if chosen is not None and chosen != EXPERTS_NAME:
                # Either may be transformers' default rather than the user's choice: do not warn.
                usual = chosen in ("eager", "grouped_mm")
                logger.log(
                    logging.INFO if usual else logging.WARNING,
                    "moe_patch: experts_implementation=%r was set on the model, and the patch runs "
                    "the experts in its place until unpatch_model; to keep %r, leave moe_patch out",
                    chosen,
                    chosen,
                )
                return
