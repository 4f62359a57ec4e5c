"""Choose the forwards that a patch binds in a block, and detect those of other libraries."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from moe_patch.config import PatchConfig
from moe_patch.families import entry_class
from moe_patch.patching.discover import FoundBlock, Named
from moe_patch.runtime import forward
from moe_patch.runtime.adapters import is_param_wrapper
from moe_patch.runtime.module_patch import ModulePatch, attribute_for, is_ours, origin_of
from moe_patch.runtime.modules import undecorated_forward

PARALLELISM = ("transformers.distributed.", "transformers.integrations.tensor_parallel.")
# Decorators from these packages are part of a class as its own library defines it.
DECORATING = ("transformers", "torch")
SWITCH_OFF = (
    "switch that off for the MoE blocks (use_liger_kernel with liger_kernel_config="
    "{'swiglu': False}; use_kernels=False; do not import a library that replaces classes when it "
    "is imported), or leave moe_patch out"
)


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
    class, compiled or not. A closure or partial that holds the original, or our forward, wraps it
    and does not count; nor do those of transformers' parallelism.
    """
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    found = foreign_forward(module, "forward")
    if found is not None:
        wraps = wrapped_by_parallelism(module) or _holds_own(found, owner)
        return found if isinstance(found, MethodType) or not wraps else None
    if is_ours(module.__dict__.get(attribute_for(module))):
        return None
    found = vars(owner)["forward"]
    return None if _holds_own(found, owner) else found


def _holds_own(found: Any, owner: type) -> bool:
    """Return whether a callable is, wraps or closes over a function of a class's own module.

    Our own bound forwards count as well.
    """
    todo, seen = [found], set()
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if is_ours(each) or isinstance(each, FunctionType) and each.__module__ == owner.__module__:
            return True
        todo += _held_by(each)
    return False


def _held_by(function: Any) -> list[Any]:
    """Return what a callable holds: the function of a method, arguments of a partial, cells."""
    if isinstance(function, MethodType):
        return [function.__func__]
    if isinstance(function, (functools.partial, functools.partialmethod)):
        return [function.func, *function.args, *function.keywords.values()]
    if isinstance(function, FunctionType):
        return [*_cells(function), *vars(function).values()]
    if callable(function) and not isinstance(function, (nn.Module, type)):
        return [*vars(function).values()] if hasattr(function, "__dict__") else []
    return []


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents


def overridden(block: FoundBlock) -> str | None:
    """Say which module of the block runs another library's forward instead of its own, if any."""
    whole = [(block.path, block.block)] if block.block is not None else []
    for path, module in [*whole, *block.routers, *block.experts]:
        if (found := replaced_forward(module)) is not None:
            return (
                f"{path} ({type(module).__name__}) runs {origin_of(found)} instead of its own "
                f"forward; {SWITCH_OFF}"
            )
    return None


def no_experts(block: FoundBlock) -> str:
    """Say why a block has no experts of its family, naming those of another library."""
    found: Any = None if block.block is None else block.block._modules.get("experts")
    while found is not None and is_param_wrapper(found):
        found = found.get_base_layer()
    other = ""
    if found is not None and type(found).__name__ == block.spec.experts:
        return (
            f"its experts ({block.spec.experts}) belong to another block as well; accepted: "
            "experts of its own, or exclude all but one of the blocks that share them"
        )
    if found is not None:
        fp8 = type(found).__name__ == "FP8Experts"
        way = ", which quantize_experts(model, 'fp8') takes over" if fp8 else f"; {SWITCH_OFF}"
        other = f"; its experts are {origin_of(type(found))}{way}"
    return f"no {block.spec.experts} found in the block{other}"


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
    experts = {path: (module, "forward") for path, module in block.experts}
    for path, (module, attribute) in {**experts, **attributes}.items():
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
