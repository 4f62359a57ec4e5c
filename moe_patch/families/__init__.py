"""Registry of families: transformers classes -> FamilySpec.

It holds data only; transformers is not imported here. Every module of this package that defines
``FAMILIES`` is registered, in alphabetical order of the module names. Entries for a later release
of transformers than the installed one are left out.
"""

from __future__ import annotations

import importlib
import pkgutil

from torch import nn

from moe_patch.families.installed import installed_release, is_decorated, moe_model_types
from moe_patch.runtime.spec import TIERS, FamilySpec

ROLES = ("experts", "router", "block")

_BY_CLASS: dict[str, list[tuple[FamilySpec, str]]] = {}
_FAMILIES: list[FamilySpec] = []
_LATER: list[FamilySpec] = []


def register_family(spec: FamilySpec) -> None:
    """Add a family, or replace the one that names the same classes.

    If two entries name one class of one module, the earlier entry wins. To change a shipped entry,
    therefore, register it with its class names and module unchanged. An entry for another release
    of transformers than the installed one (``since``, ``until``) has no effect.

    Args:
        spec: checked on construction; its class names are matched against the classes of modules.
    """
    if not _described(spec):
        if spec.since:
            _LATER.append(spec)
        return
    for place, old in enumerate(_FAMILIES):
        if _identity(old) == _identity(spec):
            _FAMILIES[place] = spec
            for entries in _BY_CLASS.values():
                entries[:] = [(spec if s is old else s, role) for s, role in entries]
            return
    _FAMILIES.append(spec)
    for role in ROLES:
        name = getattr(spec, role)
        if name is not None:
            _BY_CLASS.setdefault(name, []).append((spec, role))


def families() -> tuple[FamilySpec, ...]:
    """Return all registered families."""
    return tuple(_FAMILIES)


def later_families() -> tuple[FamilySpec, ...]:
    """Return entries for a later release of transformers than the installed one."""
    return tuple(_LATER)


def later_release(model_types: tuple[str, ...]) -> str:
    """Return the release of transformers that one of these types needs, if it is a later one."""
    return next((spec.since for spec in _LATER if {*model_types} & {*spec.model_types}), "")


def is_shipped(spec: FamilySpec) -> bool:
    """Return whether an entry is one of this package's own, unchanged."""
    # Identity first, because the comparison of all fields with every entry takes milliseconds.
    return any(spec is own for own, _ in _SHIPPED) or any(spec in both for both in _SHIPPED)


def lookup(module: nn.Module) -> tuple[FamilySpec, str] | None:
    """Return the family and role ("experts", "router" or "block") of a module, by its class.

    Base classes count too: FSDP and parametrizations give instances a generated subclass.
    """
    found = _entry(module)
    return None if found is None else found[1:]


def entry_class(module: nn.Module) -> type | None:
    """Return the class of a module, or its base class, that a family's entry names."""
    found = _entry(module)
    return None if found is None else found[0]


def _entry(module: nn.Module) -> tuple[type, FamilySpec, str] | None:
    for cls in type(module).__mro__:
        for spec, role in _BY_CLASS.get(cls.__name__, ()):
            if spec.module is None or f".{spec.module}." in f".{cls.__module__}.":
                return cls, spec, role
    return None


def supported_model_types() -> dict[str, str]:
    """Return the tier of every MoE model type of the installed transformers, sorted by name.

    A type that no entry names takes the lowest tier of the towers in its config. If its config
    describes experts itself, the tier is "experts" if transformers' registry of implementations
    covers them, else "refused". Entries for types that the installed release lacks are left out.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    installed = moe_model_types()
    registered: dict[str, str] = {}
    for spec in _FAMILIES:
        for name in spec.model_types:
            registered[name] = lowest_tier(spec.tier, registered.get(name, spec.tier))

    def tier(name: str) -> str:
        if name in registered:
            return registered[name]
        found = installed[name]
        if found.own:
            return "experts" if is_decorated(found.folder) else "refused"
        return lowest_tier(*map(tier, found.towers))

    names = {*installed, *(name for name in registered if name in CONFIG_MAPPING_NAMES)}
    return {name: tier(name) for name in sorted(names)}


def lowest_tier(*tiers: str) -> str:
    """Return the tier that summarises several blocks or towers: the lowest."""
    return max(tiers, key=TIERS.index)


def _identity(spec: FamilySpec) -> tuple:
    return (spec.module, spec.experts, spec.router, spec.block)


def _described(spec: FamilySpec) -> bool:
    """Return whether an entry describes the installed release of transformers."""
    installed, since, until = (
        [int(part) for part in release.split(".")[:2]]
        for release in (
            installed_release("transformers"),
            spec.since or "0.0",
            spec.until or "999.0",
        )
    )
    return since <= installed < until


for _file in sorted(pkgutil.iter_modules(__path__), key=lambda file: file.name):
    for _spec in vars(importlib.import_module(f"{__name__}.{_file.name}")).get("FAMILIES", ()):
        register_family(_spec)
_SHIPPED = tuple((spec, spec.experts_only()) for spec in _FAMILIES)
