"""The record a patch leaves on each module it touches, and how forwards are bound and unbound.

Everything lives on instances: the record in ``module.__dict__["_moe_patch"]``, a bound forward as
``functools.partial(function, module)``. Both survive deepcopy and pickle pointing at the copy,
which closures and bound methods do not.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moe_patch.config import PatchConfig
from moe_patch.errors import UnsupportedOptionError
from moe_patch.runtime.modules import has_accelerate_hook

if TYPE_CHECKING:
    from moe_patch.runtime.spec import FamilySpec

RECORD = "_moe_patch"
_MARK = "_moe_patch_bound"


@dataclass
class ModulePatch:
    """What was done to one module.

    Attributes:
        role: "router", "experts", "block", "lora" or "refused".
        spec: the family entry.
        config: the options of the patch.
        active: cleared by undo; bound functions then run the class's own forward.
        slots: names of the instance attributes that were bound.
        saved: what was in each slot or attribute that was replaced (absent key = was absent).
        self_check: "passed", "off" or "skipped: why".
        reason: why a module is refused or served differently from the rule.
        taps: what records or replays this module just now (signals/slot.py), or None. An attribute
            here, because compiled code notices when it changes.
        probe: what looks at this module's calls (debug/probe.py), or None.
        factors: of an experts module during a call: adapters' factors by parameter, or None.
        taken: the parameters whose factors were read in that call. Attributes here, as ``taps`` is.
        caller: the ident of the thread that makes that call, by the key "thread"; else empty.
    """

    role: str
    spec: FamilySpec
    config: PatchConfig
    active: bool = True
    slots: list[str] = field(default_factory=list)
    saved: dict[str, Any] = field(default_factory=dict)
    self_check: str = ""
    reason: str = ""
    taps: Any = None
    probe: Any = None
    factors: dict[str, Any] | None = None
    taken: tuple[str, ...] = ()
    caller: dict[str, int] = field(default_factory=dict)


def record_of(module: nn.Module) -> ModulePatch | None:
    """The module's active record, or None."""
    record = module.__dict__.get(RECORD)
    return record if record is not None and record.active else None


def handed_down(module: nn.Module) -> dict[str, Any]:
    """Factors by parameter that PEFT's wrappers handed down for the call that is running.

    Also while the patch is switched off for a moment.

    Raises:
        UnsupportedOptionError: another thread's call is running.
    """
    record = module.__dict__.get(RECORD)
    if record is None or (factors := record.factors) is None:
        return {}
    if not torch.compiler.is_compiling():
        me = threading.get_ident()
        # Reading claims nothing, because only take_back releases a claim.
        _refuse_second_thread(me, record.caller.get("thread", me), type(module).__name__)
    return factors


def hand_down(record: ModulePatch, factors: dict[str, Any], where: str) -> dict[str, Any] | None:
    """Give an experts module factors for one call, beside those of wrappers around this one.

    Args:
        record: of the experts module.
        factors: by parameter.
        where: names the module and parameter in errors.

    Returns:
        What was handed down before, for :func:`take_back`.

    Raises:
        UnsupportedOptionError: another thread's call is running.
    """
    if not torch.compiler.is_compiling():
        me = threading.get_ident()
        # A single atomic step: if two threads come at once, one is refused.
        _refuse_second_thread(me, record.caller.setdefault("thread", me), where)
    previous = record.factors
    record.factors = {**(previous or {}), **factors}
    record.taken = ()
    return previous


def take_back(record: ModulePatch, previous: dict[str, Any] | None) -> None:
    """Undo :func:`hand_down`."""
    record.factors = previous
    if previous is None:
        record.taken = ()
        if not torch.compiler.is_compiling():
            record.caller.clear()


def _refuse_second_thread(me: int, owner: int, where: str) -> None:
    """Raise unless the running call is this thread's: a record holds the factors of one call."""
    if owner == me:
        return
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    raise UnsupportedOptionError(
        f"{where}: thread {names.get(me, me)!r} calls these experts with adapters while thread "
        f"{names.get(owner, owner)!r} is running them with its own, and the two would mix; "
        "accepted: one forward at a time of a model with adapters; hold a lock around the "
        "forward, or give each thread a copy of the model"
    )


def bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``function(module, record, ...)`` bindable as ``module.forward``.

    The result looks up the module's record on each call and hands it over; on a module whose patch
    was undone (a hook may still hold the old forward) the class's own forward runs.
    """
    return bound_method("forward")(function)


def bound_method(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """:func:`bound` for another method than forward."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            record = record_of(module)
            if record is None:
                return getattr(type(module), name)(module, *args, **kwargs)
            if record.probe is not None:
                call = functools.partial(function, module, record)
                return record.probe.run(call, module, args, kwargs)
            if record.taps is not None and record.role == "router":
                call = functools.partial(function, module, record, **kwargs)
                return record.taps.heard(call, record, args)
            return function(module, record, *args, **kwargs)

        # As callers see it: without the record, which is looked up.
        signature = inspect.signature(function)
        parameters = [p for place, p in enumerate(signature.parameters.values()) if place != 1]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        setattr(run, _MARK, True)
        return run

    return decorate


def is_ours(value: Any) -> bool:
    """Whether a function found on an instance was bound by this library."""
    return isinstance(value, functools.partial) and hasattr(value.func, _MARK)


def origin_of(function: Any) -> str:
    """The qualified name of what was found on an instance: a function's own, else its class's."""
    if isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def slot_for(module: nn.Module) -> str:
    """Where a forward has to be bound: behind accelerate's hook if there is one."""
    return "_old_forward" if has_accelerate_hook(module) else "forward"


def bind(
    module: nn.Module, function: Callable[..., Any], record: ModulePatch, slot: str = "forward"
) -> None:
    """Bind a :func:`bound` function as an instance attribute and leave the record."""
    if slot == "forward":
        slot = slot_for(module)
    if slot in module.__dict__:
        record.saved[slot] = module.__dict__[slot]
    module.__dict__[slot] = functools.partial(function, module)
    record.slots.append(slot)
    module.__dict__[RECORD] = record


def unbind(module: nn.Module) -> None:
    """Undo :func:`bind`, also when a hook has moved our forward to another slot since."""
    record = module.__dict__.pop(RECORD)
    record.active = False
    for slot in {*record.slots, "forward", "_old_forward"}:
        if not is_ours(module.__dict__.get(slot)):
            continue
        if slot in record.saved:
            module.__dict__[slot] = record.saved[slot]
        elif slot == "_old_forward":
            module.__dict__[slot] = MethodType(type(module).forward, module)
        else:
            del module.__dict__[slot]
