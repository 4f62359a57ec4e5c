"""Finding MoE blocks in a model by the classes of its modules, whatever wraps them."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from moe_patch.families import lookup
from moe_patch.runtime.adapters import is_param_wrapper
from moe_patch.runtime.modules import is_decorated
from moe_patch.runtime.record import record_of
from moe_patch.runtime.spec import FamilySpec

Named = tuple[str, Any]
# The path of the row that stands for a model without any MoE block.
WHOLE_MODEL = "(whole model)"
# What transformers' use_experts_implementation sets on every instance of a class it decorates.
DECORATED = ("is_transposed", "is_concatenated", "has_gate", "has_bias", "config")
# What wraps a model or a part of it, by class name, and the child that holds what is wrapped. By
# class, since `model` and `module` are names of a model's own children too.
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
    """One MoE block: its modules with their paths, and the family entry that serves them.

    ``path`` is the block's module path; where a family has no block class, that of the module that
    holds the experts. ``routers`` may be several (PEFT's modules_to_save keeps a second one).
    ``plain_path`` is the path without what wrappers (PEFT, DDP, a compiled module) add to it.
    ``mismatch`` says why the entry serves the experts alone; ``routers`` is then empty.
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
        """The same block with its router and its own forward left to transformers."""
        return replace(self, spec=self.spec.experts_only(), routers=[], mismatch=mismatch)

    def spec_of(self, router: nn.Module) -> FamilySpec:
        """The entry that serves a router: the block's, or its own where a family has two kinds."""
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
        """Whether the block cannot be patched."""
        return bool(self.reason)

    @property
    def model_type(self) -> str:
        """The model type of the experts' own config, else the family's first."""
        for _, experts in self.experts:
            if hasattr(experts, "config"):
                return experts.config.model_type
        return self.spec.model_types[0]


def discover(model: nn.Module) -> list[FoundBlock]:
    """All MoE blocks of a model, in module order; unknown ones come back refused, with a reason."""
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
    """Put a block, or a router or experts module of one, into its row."""
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
    """Add an adapter's wrapper to the block whose experts it is around."""
    owner = _inside(path, blocks)
    base = wrapper.get_base_layer()
    if owner is not None and any(base is experts for _, experts in blocks[owner].experts):
        blocks[owner].wrappers.append((path, wrapper))


def _experts_alone(block: FoundBlock) -> str:
    """The reason why a patch serves the experts alone, from the record on them; else empty."""
    records = (record_of(experts) for _, experts in block.experts)
    return next((r.reason for r in records if r is not None and r.role == "experts"), "")


def refused_block(path: str, module: nn.Module, reason: str) -> FoundBlock:
    """What stands for a module that no family entry serves."""
    spec = FamilySpec(model_types=("unknown",), tier="refused", reason=reason)
    return FoundBlock(path, spec, block=module, reason=reason)


def selected(block: FoundBlock, include: tuple[str, ...], exclude: tuple[str, ...]) -> bool:
    """Whether glob patterns select a block (no include pattern means every block)."""
    chosen = not include or any(_matches(block, pattern) for pattern in include)
    return chosen and not any(_matches(block, pattern) for pattern in exclude)


def unmatched(blocks: list[FoundBlock], **options: tuple[str, ...]) -> str:
    """What is wrong with the first pattern that matches no block, by option; else empty."""
    for option, patterns in options.items():
        for pattern in patterns:
            if not any(_matches(block, pattern) for block in blocks):
                return (
                    f"{option} pattern {pattern!r} matches no MoE block; there are "
                    f"{some_paths(blocks)}; correct the pattern or leave it out"
                )
    return ""


def some_paths(blocks: list[FoundBlock]) -> str:
    """The number of blocks and the paths of the first, for messages about patterns."""
    paths = ", ".join(repr(block.plain_path) for block in blocks[:3])
    return f"{len(blocks)}: {paths}{', ...' if len(blocks) > 3 else ''}"


def _matches(block: FoundBlock, pattern: str) -> bool:
    # A pattern outlives wrapping: one for the bare model holds inside PEFT, DDP and torch.compile.
    return any(fnmatch.fnmatchcase(path, pattern) for path in (block.path, block.plain_path))


def _wrapped_child(module: nn.Module) -> str | None:
    """The name of the child that a wrapper wraps; None where the module is no wrapper."""
    return next(
        (WRAPPERS[c.__name__] for c in type(module).__mro__ if c.__name__ in WRAPPERS), None
    )


def _without(added: set[str], path: str) -> str:
    """A path without the segments at which the paths in ``added`` end."""
    parts = path.split(".")
    return ".".join(p for i, p in enumerate(parts) if ".".join(parts[: i + 1]) not in added)


def _inside(path: str, owners: Iterable[str]) -> str | None:
    """The innermost block path that contains ``path``; the root's path is empty."""
    around = (o for o in owners if o in ("", path) or path.startswith(f"{o}."))
    return max(around, key=len, default=None)


def _holder(path: str) -> str:
    """The path of the module that holds an experts or router module, through PEFT's wrappers."""
    parts = path.split(".")
    for wrapped in ("base_layer", "original_module", "modules_to_save"):
        if wrapped in parts:
            parts = parts[: parts.index(wrapped)]
    return ".".join(parts[:-1])


def _decorated(module: Any) -> tuple[FamilySpec, str] | None:
    """An experts module that transformers' decorator serves and no entry names: tier experts."""
    if not all(name in module.__dict__ for name in DECORATED) or not is_decorated(module):
        return None
    model_type = module.config.model_type
    return FamilySpec(
        model_types=(model_type,), experts=type(module).__name__, tier="experts"
    ), "experts"


def _looks_like_moe(module: nn.Module) -> str | None:
    """Why an unregistered module is taken for an MoE block, in words for the report; else None."""
    experts = module._modules.get("experts")
    if isinstance(experts, (nn.ModuleList, nn.ModuleDict)):
        return (
            f"{type(module).__module__}.{type(module).__name__} keeps its experts as a "
            f"{type(experts).__name__} of single MLPs; accepted: experts stored as 3-D "
            "parameters by a registered family"
        )
    return None
