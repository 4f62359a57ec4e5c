"""patch_model and its undo: resolve and check everything first, then bind.

A failure before binding leaves the model exactly as it was. Weights are never moved, copied,
renamed or wrapped; classes, configs that others share, and process-wide state are never written.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from moe_patch import forward, selfcheck
from moe_patch.backend import choose_backend
from moe_patch.bindings import bindings_of, foreign_forward, origin_of
from moe_patch.blockcheck import check_block
from moe_patch.config import PatchConfig
from moe_patch.discover import FoundBlock, discover, selected
from moe_patch.errors import PatchStateError, UnsupportedModelError, UnsupportedOptionError
from moe_patch.experts_module import read_glu, stored_weight
from moe_patch.families import families
from moe_patch.families.spec import FamilySpec, read
from moe_patch.lora import fusion_obstacle
from moe_patch.lora_targets import missed_experts
from moe_patch.record import RECORD, ModulePatch, bind, record_of, unbind
from moe_patch.report import patch_report

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
        UnsupportedModelError: no MoE block, or one that cannot be patched (with ``strict``).
        UnsupportedOptionError: an option is unknown, wrong, or cannot hold on this model.
        PatchStateError: the model is already patched with another config.
    """
    parsed = PatchConfig.parse(config, **options)
    if parsed is None:
        logger.info("moe_patch: false, the model is left as it is")
        return model
    again = _check_state(model, parsed)
    blocks = [b for b in discover(model) if selected(b.path, parsed.include, parsed.exclude)]
    refused = _resolve(model, blocks, parsed)
    checks = (
        {}
        if not parsed.self_check
        else _self_checks([b for b in blocks if b.path not in refused], parsed)
    )
    forward.register_experts()
    bound = 0
    for block in blocks:
        if block.path in refused:
            _mark_refused(block, parsed, refused[block.path])
        else:
            bound += _bind_block(block, parsed, checks.get(block.path, "off"))
    if again:
        logger.info(
            "moe_patch: already patched with an equal config; %d modules bound that were new", bound
        )
    else:
        _announce_conflict(blocks)
    if note := missed_experts(model):
        warnings.warn(f"moe_patch: {note}", stacklevel=2)
    return model


def unpatch_model(model: Model) -> Model:
    """Undo :func:`patch_model` exactly; one call undoes any number of equal patches.

    Raises:
        PatchStateError: the model is not patched.
    """
    touched = [m for m in model.modules() if m.__dict__.get(RECORD) is not None]
    if not touched:
        raise PatchStateError(f"{type(model).__name__} is not patched; call patch_model first")
    for module in touched:
        record = module.__dict__[RECORD]
        if "config" in record.saved:
            module.config = record.saved.pop("config")
        unbind(module)
    return model


@contextmanager
def patched(model: Model, config: Any = None, **options: Any) -> Iterator[Model]:
    """Patch for the duration of a ``with`` block; arguments as :func:`patch_model`."""
    patch_model(model, config, **options)
    try:
        yield model
    finally:
        unpatch_model(model)


def _check_state(model: nn.Module, config: PatchConfig) -> bool:
    """Whether the model already carries this patch.

    Raises:
        PatchStateError: it carries another one.
    """
    configs = {record.config for m in model.modules() if (record := record_of(m)) is not None}
    if configs - {config}:
        raise PatchStateError(
            f"{type(model).__name__} is already patched with {next(iter(configs - {config}))}; "
            f"asked for {config}; call unpatch_model first"
        )
    return bool(configs)


def _resolve(model: nn.Module, blocks: list[FoundBlock], config: PatchConfig) -> dict[str, str]:
    """Check every block; the refused ones by path with the reason.

    Raises:
        UnsupportedModelError: nothing to patch, or a refusal under ``strict``.
        UnsupportedOptionError: an option that cannot hold on some block.
    """
    refused = {block.path: why for block in blocks if (why := _refusal(block, config)) is not None}
    if not blocks:
        known = ", ".join(sorted({t for spec in families() for t in spec.model_types}))
        where = " among the selected paths" if config.include or config.exclude else ""
        raise UnsupportedModelError(
            f"{type(model).__module__}.{type(model).__name__}: no MoE block found{where}; "
            f"accepted model types: {known}"
        )
    if refused and config.strict:
        path, reason = next(iter(refused.items()))
        raise UnsupportedModelError(
            f"{path}: {reason} ({len(refused)} of {len(blocks)} MoE blocks); strict=False leaves "
            "such blocks to transformers"
        )
    if refused:
        path, reason = next(iter(refused.items()))
        warnings.warn(
            f"moe_patch leaves {len(refused)} of {len(blocks)} MoE blocks to transformers, "
            f"first {path}: {reason}",
            stacklevel=3,
        )
    return refused


def _refusal(block: FoundBlock, config: PatchConfig) -> str | None:
    if block.refused:
        return block.reason
    if not block.experts and block.spec.experts is not None:
        return "no experts module found in the block"
    for path, (module, _, _, slot) in bindings_of(block, config):
        foreign = foreign_forward(module, slot)
        if foreign is not None:
            name = f"{path} ({type(module).__name__})"
            return f"{name} already has a {slot} bound by {origin_of(foreign)}"
    try:
        _check_attributes(block)
        for path, experts in block.experts:
            _check_experts_module(path, experts, block.spec, config)
    except UnsupportedModelError as error:
        return str(error)
    _check_lora(block, config)
    return None


def _check_attributes(block: FoundBlock) -> None:
    """Every attribute that the family entry names is there, before a forward asks for it.

    Raises:
        UnsupportedModelError: one is missing (names class, attribute, versions).
    """
    for _, router in block.routers:
        own = block.spec_of(router)
        for source in [*own.params.values(), own.bias]:
            if isinstance(source, str):
                read(router, source)
    spec = block.spec
    if block.block is not None and spec.shared is not None and spec.block_forward is None:
        for name in (spec.router_attr, spec.shared, spec.shared_gate):
            if name is not None:
                read(block.block, name)


def _check_experts_module(
    path: str, experts: nn.Module, spec: FamilySpec, config: PatchConfig
) -> None:
    if spec.experts_forward is None and spec.layout is None and not hasattr(experts, "config"):
        raise UnsupportedModelError(
            f"{path} ({type(experts).__name__}) has no config to choose an implementation by"
        )
    if spec.experts_forward is None or spec.layout is not None:
        read_glu(experts, spec)
        weight = stored_weight(experts, spec)
        if not weight.is_meta:
            choose_backend(config.backend, weight.device, weight.dtype)


def _check_lora(block: FoundBlock, config: PatchConfig) -> None:
    if config.fuse_lora != "require":
        return
    for path, wrapper in block.wrappers:
        if why := fusion_obstacle(wrapper):
            raise UnsupportedOptionError(
                f"{path}: fuse_lora='require' cannot hold: {why}; use fuse_lora='auto'"
            )


def _self_checks(blocks: list[FoundBlock], config: PatchConfig) -> dict[str, str]:
    results: dict[tuple, str] = {}
    by_path = {}
    for block in blocks:
        kind = selfcheck.kind_of(block)
        # A block that could not be checked speaks for itself only.
        if results.get(kind) != "passed":
            results[kind] = selfcheck.check(block, config.backend)
            if results[kind] == "passed" and block.spec.has_own_forwards:
                with selfcheck.sandbox(block):
                    check_block(block, [b for _, b in bindings_of(block, config)])
        by_path[block.path] = results[kind]
    return by_path


def _bind_block(block: FoundBlock, config: PatchConfig, self_check: str) -> int:
    """Bind what is not bound yet; the number of modules bound."""
    spec = block.spec
    bound = 0
    for _, binding in bindings_of(block, config, self_check):
        if record_of(binding.module) is None:
            bind(*binding)
            bound += 1
    for _, experts in block.experts:
        if record_of(experts) is None:
            _point_at_registry(
                experts, forward.ExpertsPatch("experts", spec, config, self_check=self_check)
            )
            bound += 1
    return bound


def _point_at_registry(experts: Any, record: ModulePatch) -> None:
    """Choose our experts function through a private copy of the config that the module reads."""
    record.saved["config"] = experts.config
    own = copy.copy(experts.config)
    own._experts_implementation_internal = forward.EXPERTS_NAME
    experts.config = own
    experts.__dict__[RECORD] = record


def _mark_refused(block: FoundBlock, config: PatchConfig, reason: str) -> None:
    anchor = (
        block.block
        if block.block is not None
        else next(m for _, m in [*block.experts, *block.routers])
    )
    anchor.__dict__[RECORD] = ModulePatch("refused", block.spec, config, reason=reason)


def _announce_conflict(blocks: list[FoundBlock]) -> None:
    for block in blocks:
        for _, experts in block.experts:
            record = record_of(experts)
            chosen = (
                record.saved["config"]._experts_implementation
                if record and "config" in record.saved
                else None
            )
            if chosen not in (None, "eager", "grouped_mm"):
                logger.warning(
                    "moe_patch: experts_implementation=%r was set on the model; the patch wins "
                    "until unpatch_model",
                    chosen,
                )
                return


__all__ = ["patch_model", "patch_report", "patched", "unpatch_model"]
