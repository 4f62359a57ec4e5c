"""Find the MoE blocks of a model by the classes of its modules, through any wrappers."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.families import lookup
from moe_patch.runtime.adapters import is_param_wrapper
from moe_patch.runtime.module_patch import patch_of
from moe_patch.runtime.modules import is_decorated
from moe_patch.runtime.spec import FamilySpec

Named = tuple[str, Any]
# Path of the report row for a model without any MoE block.
WHOLE_MODEL = "(whole model)"
# Attributes that transformers' use_experts_implementation sets on every instance.
DECORATED = ("is_transposed", "is_concatenated", "has_gate", "has_bias", "config")
# Wrappers of a model or a part of it, by class name, and the child that holds the wrapped module.
# The class decides, because models also use `model` and `module` as names of children.
WRAPPERS = {
    "BaseTuner": "model",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "DeepSpeedEngine": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "PeftMixedModel": "base_model",
    "PeftModel": "base_model",
}


@dataclass
class FoundBlock:
    """One MoE block: its modules with their paths, and its family entry.

    ``path`` is the block's module path or, in a family without a block class, the path of the
    module that holds the experts. There may be several ``routers``, because PEFT's modules_to_save
    keeps a second one. ``plain_path`` is the path without the segments that wrappers (PEFT, DDP, a
    compiled module) add. ``mismatch`` says why the entry fits only the experts; ``routers`` is then
    empty. ``reason`` says why the block is refused.
    """

    path: str
    spec: FamilySpec
    block: nn.Module | None = None
    routers: list[Named] = field(default_factory=list)
    experts: list[Named] = field(default_factory=list)
    wrappers: list[Named] = field(default_factory=list)
    reason: str = ""
    plain_path: str = ""
    mismatch: str = ""

    def experts_only(self, mismatch: str) -> FoundBlock:
        """Return the block with its router and its own forward left to transformers."""
        return replace(self, spec=self.spec.experts_only(), routers=[], mismatch=mismatch)

    def spec_of(self, router: nn.Module) -> FamilySpec:
        """Return a router's entry: the block's, or the router's own in a family with two kinds."""
        if any(cls.__name__ == self.spec.router for cls in type(router).__mro__):
            return self.spec
        found = lookup(router)
        return self.spec if found is None else found[0]

    @property
    def choosers(self) -> list[tuple[nn.Module, FamilySpec]]:
        """The modules that choose experts, each with its entry: the routers, or the block."""
        if self.block is not None and self.spec.chooses_in_block:
            return [(self.block, self.spec)]
        return [(router, self.spec_of(router)) for _, router in self.routers]

    @property
    def refused(self) -> bool:
        """Return whether the block cannot be patched."""
        return bool(self.reason)

    @property
    def model_type(self) -> str:
        """Return the model type of the experts' config, or else the family's first."""
        for _, experts in self.experts:
            if hasattr(experts, "config"):
                return experts.config.model_type
        return self.spec.model_types[0]


def discover(model: nn.Module) -> list[FoundBlock]:
    """Return all MoE blocks in module order; unknown ones are refused, with a reason."""
    blocks: dict[str, FoundBlock] = {}
    named = list(model.named_modules())
    for path, module in named:
        found = lookup(module) or _decorated(module)
        if found is not None:
            _place(blocks, path, module, *found)
        elif (reason := _looks_like_moe(module)) and _inside(path, blocks) is None:
            blocks[path] = refused_block(path, module, reason)
    for path, module in named:
        if is_param_wrapper(module):
            _add_wrapper(blocks, path, module)
    added = {f"{path}.{child}".lstrip(".") for path, m in named if (child := _wrapped_child(m))}
    for block in blocks.values():
        block.plain_path = _without(added, block.path)
    reasons = ((block, _experts_alone(block)) for block in blocks.values())
    return [block.experts_only(why) if why else block for block, why in reasons]


def _place(
    blocks: dict[str, FoundBlock], path: str, module: nn.Module, spec: FamilySpec, role: str
) -> None:
    """Add a block, or a router or experts module of one, to its entry in ``blocks``."""
    owner = path if role == "block" else _inside(path, blocks)
    if owner is None:
        owner = _holder(path)
    block = blocks.setdefault(owner, FoundBlock(owner, spec))
    if role == "block":
        block.block = module
    else:
        (block.routers if role == "router" else block.experts).append((path, module))
    if spec.tier == "refused":
        block.reason = spec.reason


def _add_wrapper(blocks: dict[str, FoundBlock], path: str, wrapper: Any) -> None:
    """Add an adapter's wrapper to the block whose experts it wraps."""
    owner = _inside(path, blocks)
    base = wrapper.get_base_layer()
    if owner is not None and any(base is experts for _, experts in blocks[owner].experts):
        blocks[owner].wrappers.append((path, wrapper))


def _experts_alone(block: FoundBlock) -> str:
    """Return why an earlier patch bound only the experts, from their record; else empty."""
    patches = (patch_of(experts) for _, experts in block.experts)
    return next((r.reason for r in patches if r is not None and r.role == "experts"), "")


def refused_block(path: str, module: nn.Module, reason: str) -> FoundBlock:
    """Return a refused block for a module without a family entry."""
    spec = FamilySpec(model_types=("unknown",), tier="refused", reason=reason)
    return FoundBlock(path, spec, block=module, reason=reason)


def selected(block: FoundBlock, include: tuple[str, ...], exclude: tuple[str, ...]) -> bool:
    """Return whether glob patterns select a block (no include pattern selects every block)."""
    chosen = not include or any(_matches(block, pattern) for pattern in include)
    return chosen and not any(_matches(block, pattern) for pattern in exclude)


def unmatched(blocks: list[FoundBlock], **options: tuple[str, ...]) -> str:
    """Describe the first pattern that matches no block; empty if every pattern matches one."""
    for option, patterns in options.items():
        for pattern in patterns:
            if not any(_matches(block, pattern) for block in blocks):
                return (
                    f"{option} pattern {pattern!r} matches no MoE block; there are "
                    f"{some_paths(blocks)}; correct the pattern or leave it out"
                )
    return ""


def some_paths(blocks: list[FoundBlock]) -> str:
    """Return the number of blocks and the first three paths, for messages about patterns."""
    paths = ", ".join(repr(block.plain_path) for block in blocks[:3])
    return f"{len(blocks)}: {paths}{', ...' if len(blocks) > 3 else ''}"


def _matches(block: FoundBlock, pattern: str) -> bool:
    # A pattern for the bare model must also match inside PEFT, DDP and torch.compile.
    return any(fnmatch.fnmatchcase(path, pattern) for path in (block.path, block.plain_path))


def _wrapped_child(module: nn.Module) -> str | None:
    """Return the name of the child that a wrapper wraps, or None if the module is no wrapper."""
    return next(
        (WRAPPERS[c.__name__] for c in type(module).__mro__ if c.__name__ in WRAPPERS), None
    )


def _without(added: set[str], path: str) -> str:
    """Return a path without the segments at which the paths in ``added`` end."""
    parts = path.split(".")
    return ".".join(p for i, p in enumerate(parts) if ".".join(parts[: i + 1]) not in added)


def _inside(path: str, owners: Iterable[str]) -> str | None:
    """Return the innermost block path that contains ``path``; the root's path is empty."""
    around = (o for o in owners if o in ("", path) or path.startswith(f"{o}."))
    return max(around, key=len, default=None)


def _holder(path: str) -> str:
    """Return the path of the module that holds an experts or router, ignoring PEFT's wrappers."""
    parts = path.split(".")
    for wrapped in ("base_layer", "original_module", "modules_to_save"):
        if wrapped in parts:
            parts = parts[: parts.index(wrapped)]
    return ".".join(parts[:-1])


def _decorated(module: Any) -> tuple[FamilySpec, str] | None:
    """Return an entry of tier "experts" for a decorated experts class without one, or None."""
    if not all(name in module.__dict__ for name in DECORATED) or not is_decorated(module):
        return None
    model_type = module.config.model_type
    return FamilySpec(
        model_types=(model_type,), experts=type(module).__name__, tier="experts"
    ), "experts"


def _looks_like_moe(module: nn.Module) -> str | None:
    """Say why an unregistered module looks like an MoE block, or return None."""
    experts = module._modules.get("experts")
    if isinstance(experts, (nn.ModuleList, nn.ModuleDict)):
        return (
            f"{type(module).__module__}.{type(module).__name__} keeps its experts as a "
            f"{type(experts).__name__} of single MLPs; accepted: experts stored as 3-D "
            "parameters by a registered family"
        )
    return None


def place_of(found: FoundBlock, weight: Tensor) -> torch.device:
    """Return where a block computes: on its router's device, if its experts are on the host."""
    offloaded = any((p := patch_of(e)) is not None and p.seat for _, e in found.experts)
    parameters = (p for _, router in found.routers for p in router.parameters())
    beside = next(parameters, None) if offloaded else None
    return weight.device if beside is None else beside.device
