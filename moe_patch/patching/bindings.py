"""Which forwards a patch binds in a block, and whose forwards are there already."""

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
# Whose decorators belong to a class as its library defines it.
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
    """What gets a bound forward, by module path.

    A router inside a closure of transformers' parallelism is left alone: a forward bound now would
    come before the closure, which turns the router's ids into local ones.
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
    """Return what another library bound to an attribute, or None for the module's own method."""
    if attribute == "forward":
        attribute = attribute_for(module)
    found = module.__dict__.get(attribute)
    own = getattr(type(module), "forward" if attribute == "_old_forward" else attribute)
    if isinstance(found, MethodType) and found.__self__ is module and found.__func__ is own:
        return None
    return None if is_ours(found) else found


def wrapped_by_parallelism(module: nn.Module) -> bool:
    """Whether transformers' tensor or expert parallelism closed over the module's forward."""
    found = foreign_forward(module, "forward")
    return found is not None and origin_of(found).startswith(PARALLELISM)


def replaced_forward(module: nn.Module) -> Any:
    """What another library runs in place of a module's own forward, or None.

    Liger and the kernels library bind a method of another class, others assign a function to the
    class; neither calls what was there. Closures and partials are put around it, by parallelism and
    hooks of transformers and accelerate among others.
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
    """Which of the block's modules runs another library's forward instead of its own, in words."""
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
    """The method that a class puts in place of, or around, the one its family's entry is for.

    A bound forward runs instead of either; what it does in training alone no self-check sees.
    Generated classes (FSDP2, parametrizations) define none.
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
    """Which of the modules whose forwards are ours in a patch has one of the user's, in words."""
    attributes = {path: (b.module, b.attribute) for path, b in bindings if b.patch.role != "lora"}
    served = {path: (module, "forward") for path, module in block.experts}
    for path, (module, attribute) in {**served, **attributes}.items():
        if (found := redefined(module, attribute)) is not None:
            name = type(module).__name__
            return (
                f"{path} ({name}) runs {origin_of(found)}, which is not what the family's entry "
                f"was made for; accepted: {entry_class(module).__name__} as its library defines "  # type: ignore[union-attr]
                "it, or a class with an entry of its own (register_family); hooks do what need "
                "not be in a forward, exclude leaves the block to transformers"
            )
    return None


def watched(block: FoundBlock) -> list[tuple[str, nn.Module]]:
    """Roles and modules that a probe watches; empty where nothing compares with transformers."""
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
    """Whether the experts' own forward takes hidden states, ids and weights."""
    return len(inspect.signature(undecorated_forward(experts)).parameters) == 4
