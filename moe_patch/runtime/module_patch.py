"""ModulePatch: the patch of one module, and functions to bind and unbind forwards.

All state is on instances: the patch is ``module.__dict__["_moe_patch"]``, and a bound forward is
``functools.partial(function, module)``. After deepcopy or pickle both refer to the copy. Closures
and bound methods would still refer to the original.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from moe_patch.config import PatchConfig
from moe_patch.errors import UnsupportedOptionError
from moe_patch.runtime.fp8 import Copies
from moe_patch.runtime.modules import has_accelerate_hook

if TYPE_CHECKING:
    from moe_patch.runtime.spec import FamilySpec

Function = TypeVar("Function", bound=Callable[..., Any])
PATCH_KEY = "_moe_patch"
_MARK = "_moe_patch_bound"


@dataclass
class ModulePatch:
    """The patch of one module.

    Attributes:
        role: "router", "experts", "block", "lora" or "refused".
        spec: family entry.
        config: options of the patch.
        active: cleared by undo; bound functions then run the class's own forward.
        attributes: names of the instance attributes that were bound.
        saved: previous values of the replaced attributes (no key if an attribute did not exist).
        self_check: "passed", "off" or "skipped: why".
        reason: why a module is refused or patched differently from other modules.
        taps: Taps (runtime/taps.py) while this module is recorded or replayed, or None. It is an
            attribute of the patch so that compiled code recompiles when it changes.
        probe: Probe (debug/probe.py) that checks this module's calls, or None.
        factors: on an experts module, factors of adapters by parameter during a call; else None.
        used: parameters whose factors were read in that call. Attributes for the same reason as
            ``taps``.
        seat: Seat (runtime/offload.py) of experts in host memory, or None.
        caller: {"thread": ident} of the thread that makes that call; empty outside a call.
        copies: on an experts module, transposed copies of its packed weights (runtime/fp8.py).
    """

    role: str
    spec: FamilySpec
    config: PatchConfig
    active: bool = True
    attributes: list[str] = field(default_factory=list)
    saved: dict[str, Any] = field(default_factory=dict)
    self_check: str = ""
    reason: str = ""
    taps: Any = None
    probe: Any = None
    factors: dict[str, Any] | None = None
    used: tuple[str, ...] = ()
    seat: Any = None
    caller: dict[str, int] = field(default_factory=dict)
    copies: Copies = field(default_factory=Copies)


def patch_of(module: nn.Module) -> ModulePatch | None:
    """Return the active patch of a module, or None."""
    patch = module.__dict__.get(PATCH_KEY)
    return patch if patch is not None and patch.active else None


def current_factors(module: nn.Module) -> dict[str, Any]:
    """Return the factors, by parameter, that PEFT's wrappers passed for the current call.

    Also works while the patch is temporarily inactive.

    Raises:
        UnsupportedOptionError: a call of another thread is running.
    """
    patch = module.__dict__.get(PATCH_KEY)
    if patch is None or (factors := patch.factors) is None:
        return {}
    if not torch.compiler.is_compiling():
        me = threading.get_ident()
        # Reading claims nothing, because only restore_factors releases a claim.
        _refuse_second_thread(me, patch.caller.get("thread", me), type(module).__name__)
    return factors


def set_factors(patch: ModulePatch, factors: dict[str, Any], where: str) -> dict[str, Any] | None:
    """Pass factors to an experts module for one call, in addition to those of outer wrappers.

    Args:
        patch: patch of the experts module.
        factors: factors by parameter.
        where: name of the module and parameter, for errors.

    Returns:
        The previous factors, for :func:`restore_factors`.

    Raises:
        UnsupportedOptionError: a call of another thread is running.
    """
    if not torch.compiler.is_compiling():
        me = threading.get_ident()
        # setdefault is atomic: if two threads arrive at once, one is refused.
        _refuse_second_thread(me, patch.caller.setdefault("thread", me), where)
    previous = patch.factors
    patch.factors = {**(previous or {}), **factors}
    patch.used = ()
    return previous


def restore_factors(patch: ModulePatch, previous: dict[str, Any] | None) -> None:
    """Undo :func:`set_factors`."""
    patch.factors = previous
    if previous is None:
        patch.used = ()
        if not torch.compiler.is_compiling():
            patch.caller.clear()


def _refuse_second_thread(me: int, owner: int, where: str) -> None:
    """Raise if the running call is another thread's: a patch holds the factors of one call."""
    if owner == me:
        return
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    raise UnsupportedOptionError(
        f"{where}: thread {names.get(me, me)!r} calls these experts with adapters while thread "
        f"{names.get(owner, owner)!r} is running them with its own adapters, and the two would "
        "mix; accepted: one forward at a time of a model with adapters; hold a lock around the "
        "forward, or give each thread a copy of the model"
    )


def bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``function(module, patch, ...)`` bindable as ``module.forward``.

    On each call, the result looks up the module's patch and passes it to the function. After the
    patch is undone, it runs the class's own forward: a hook may still hold the bound one.
    """
    return bound_method("forward")(function)


def bound_method(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return :func:`bound` for a method other than forward."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            patch = patch_of(module)
            if patch is None:
                return getattr(type(module), name)(module, *args, **kwargs)
            if patch.probe is not None:
                call = functools.partial(function, module, patch)
                return patch.probe.run(call, module, args, kwargs)
            if patch.taps is not None and patch.role == "router":
                call = functools.partial(function, module, patch, **kwargs)
                return patch.taps.observe_router(call, patch, args)
            return function(module, patch, *args, **kwargs)

        # The public signature lacks the patch, which is looked up.
        signature = inspect.signature(function)
        parameters = [p for place, p in enumerate(signature.parameters.values()) if place != 1]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return mark_ours(run)

    return decorate


def mark_ours(function: Function) -> Function:
    """Mark a function that is bound as ``functools.partial(function, module)``."""
    setattr(function, _MARK, True)
    return function


def is_ours(value: Any) -> bool:
    """Return whether this library bound a function that was found on an instance."""
    return isinstance(value, functools.partial) and hasattr(value.func, _MARK)


def origin_of(function: Any) -> str:
    """Return the qualified name of a function, or of the class of another callable."""
    if isinstance(function, (functools.partial, functools.partialmethod)):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def attribute_for(module: nn.Module) -> str:
    """Return the attribute to bind a forward to: the one behind accelerate's hook, if any."""
    return "_old_forward" if has_accelerate_hook(module) else "forward"


def bind(
    module: nn.Module, function: Callable[..., Any], patch: ModulePatch, attribute: str = "forward"
) -> None:
    """Bind a :func:`bound` function as an instance attribute, and store the patch."""
    if attribute == "forward":
        attribute = attribute_for(module)
    if attribute in module.__dict__:
        patch.saved[attribute] = module.__dict__[attribute]
    module.__dict__[attribute] = functools.partial(function, module)
    patch.attributes.append(attribute)
    module.__dict__[PATCH_KEY] = patch


def unbind(module: nn.Module) -> None:
    """Undo :func:`bind`, even if a hook has since moved our forward to another attribute."""
    patch = module.__dict__.pop(PATCH_KEY)
    patch.active = False
    for attribute in {*patch.attributes, "forward", "_old_forward"}:
        if not is_ours(module.__dict__.get(attribute)):
            continue
        if attribute in patch.saved:
            module.__dict__[attribute] = patch.saved[attribute]
        elif attribute == "_old_forward":
            module.__dict__[attribute] = MethodType(type(module).forward, module)
        else:
            del module.__dict__[attribute]
