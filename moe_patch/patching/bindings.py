"""Choose the forwards that a patch binds in a block, and detect those of other libraries."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from moe_patch.config import PatchConfig
from moe_patch.families import entry_class
from moe_patch.patching.discover import FoundBlock, Named
from moe_patch.runtime import forward
from moe_patch.runtime.module_patch import ModulePatch, attribute_for, is_ours, origin_of
from moe_patch.runtime.modules import undecorated_forward

PARALLELISM = ("transformers.distributed.", "transformers.integrations.tensor_parallel.")
# Decorators from these packages are part of a class as its own library defines it.
DECORATING = ("transformers", "torch")


class Binding(NamedTuple):
    """One forward to bind: the arguments of :func:`moe_patch.runtime.module_patch.bind`."""

    module: Any
    function: Callable[..., Any]
    patch: ModulePatch
    attribute: str


def bindings_of(
    block: FoundBlock, config: PatchConfig, self_check: str = ""
) -> list[tuple[str, Binding]]:
    """Return what to bind in a block: (module path, binding) pairs.

    A router whose forward transformers' parallelism has wrapped in a closure is left alone. The
    closure maps the router's ids to local ones, and a forward bound now would run before it.
    """
    spec = block.spec
    todo: list[tuple[str, Binding]] = []

    def add(found: Named, function: Any, role: str, attribute: str = "forward") -> None:
        if function is not None:
            path, module = found
            own = block.spec_of(module) if role == "router" else spec
            why = block.mismatch if role == "experts" else ""
            patch = ModulePatch(role, own, config, self_check=self_check, reason=why)
            todo.append((path, Binding(module, function, patch, attribute)))

    for router in block.routers:
        if wrapped_by_parallelism(router[1]):
            continue
        own = block.spec_of(router[1])
        common = forward.router_forward if own.routing else None
        add(router, own.router_forward or common, "router")
    if block.block is not None:
        common = forward.block_forward if spec.shared else None
        if spec.chooses_in_block:
            common = forward.choice_forward
        add((block.path, block.block), spec.block_forward or common, "block", spec.block_slot)
    for experts in block.experts:
        common = forward.bound_experts_forward if spec.layout else None
        add(experts, spec.experts_forward or common, "experts")
    for wrapper in block.wrappers:
        add(wrapper, None if config.fuse_lora == "off" else forward.lora_forward, "lora")
    return todo


def foreign_forward(module: nn.Module, attribute: str) -> Any:
    """Return the forward that another library bound as an attribute of a module, or None.

    A module's own method bound on its own instance does not count.
    """
    if attribute == "forward":
        attribute = attribute_for(module)
    found = module.__dict__.get(attribute)
    own = getattr(type(module), "forward" if attribute == "_old_forward" else attribute)
    if isinstance(found, MethodType) and found.__self__ is module and found.__func__ is own:
        return None
    return None if is_ours(found) else found


def wrapped_by_parallelism(module: nn.Module) -> bool:
    """Return whether transformers' tensor or expert parallelism wraps the module's forward."""
    found = foreign_forward(module, "forward")
    return found is not None and origin_of(found).startswith(PARALLELISM)


def replaced_forward(module: nn.Module) -> Any:
    """Return the function that another library runs in place of a module's own forward, or None.

    Liger and the kernels library bind a method of another class; others assign a function to the
    class. Neither calls the original. Closures and partials, such as the hooks of accelerate and
    of transformers' parallelism, wrap the original and do not count.
    """
    found = foreign_forward(module, "forward")
    if found is not None:
        return found if isinstance(found, MethodType) else None
    if is_ours(module.__dict__.get(attribute_for(module))):
        return None
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    found = vars(owner)["forward"]
    around = not isinstance(found, FunctionType) or found.__closure__ is not None
    return None if around or found.__module__ == owner.__module__ else found


def overridden(block: FoundBlock) -> str | None:
    """Say which module of the block runs another library's forward instead of its own, if any."""
    whole = [(block.path, block.block)] if block.block is not None else []
    for path, module in [*whole, *block.routers, *block.experts]:
        if (found := replaced_forward(module)) is not None:
            return (
                f"{path} ({type(module).__name__}) runs {origin_of(found)} instead of its own "
                "forward; switch that off for the MoE blocks (use_liger_kernel with "
                "liger_kernel_config={'swiglu': False}; use_kernels=False), or leave moe_patch out"
            )
    return None


def redefined(module: nn.Module, name: str) -> Any:
    """Return the method with which a class replaces or wraps the one its family's entry describes.

    A bound forward would run instead of either. The self-check cannot see a change that acts only
    in training. Generated classes (FSDP2, parametrizations) define no such method.
    """
    own = entry_class(module)
    if own is None:
        return None
    owner = next(cls for cls in type(module).__mro__ if cls is own or name in vars(cls))
    if owner is not own:
        return vars(owner)[name]
    found = vars(own).get(name)
    if not isinstance(found, FunctionType) or found.__closure__ is None:
        return None
    written = found.__globals__["__name__"].partition(".")[0]
    return None if written in (own.__module__.partition(".")[0], *DECORATING) else found


def overridden_by_user(block: FoundBlock, bindings: Iterable[tuple[str, Binding]]) -> str | None:
    """Say which module that the patch would bind has a method of the user's, if any."""
    attributes = {path: (b.module, b.attribute) for path, b in bindings if b.patch.role != "lora"}
    served = {path: (module, "forward") for path, module in block.experts}
    for path, (module, attribute) in {**served, **attributes}.items():
        if (found := redefined(module, attribute)) is not None:
            name = type(module).__name__
            return (
                f"{path} ({name}) runs {origin_of(found)}, which the family's entry does not "
                f"describe; accepted: {entry_class(module).__name__} as its library defines "  # type: ignore[union-attr]
                "it, or a class with an entry of its own (register_family); use a hook if the "
                "change need not be in a forward, or exclude the block"
            )
    return None


def watched(block: FoundBlock) -> list[tuple[str, nn.Module]]:
    """Return roles and modules for a probe to watch; empty if they cannot be compared."""
    spec = block.spec
    if spec.block_forward is not None and spec.block_slot == "forward":
        return [] if block.block is None else [("block", block.block)]
    experts = [("experts", module) for _, module in block.experts if _as_in_transformers(module)]
    if len(experts) < len(block.experts):
        return []
    routers = [
        ("router", module)
        for _, module in block.routers
        if (own := block.spec_of(module)).routing is not None
        and own.router_forward is None
        and own.returns is None
    ]
    return [*experts, *routers] if experts else []


def _as_in_transformers(experts: nn.Module) -> bool:
    """Return whether the experts' own forward takes hidden states, ids and weights."""
    return len(inspect.signature(undecorated_forward(experts)).parameters) == 4
