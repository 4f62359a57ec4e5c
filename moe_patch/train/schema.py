"""Checks of a YAML mapping against a dataclass: a wrong key or type becomes one clear line."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from moe_patch.errors import UnsupportedOptionError

# Other hints (enums, nested dataclasses, protocols) are left to the class that owns them.
CHECKED = {bool: "a bool", int: "an int", float: "a number", str: "a string", dict: "a mapping"}


def nearest(value: Any, accepted: Iterable[str]) -> str | None:
    """The accepted name that a value may have been meant for."""
    return next(iter(difflib.get_close_matches(str(value), accepted, n=1)), None)


def check_known(what: str, value: Any, accepted: Iterable[str]) -> None:
    """Refuse a name that is not among the accepted ones.

    Raises:
        UnsupportedOptionError: names the nearest accepted one, or all of them when none is near.
    """
    known = sorted(accepted)
    if value not in known:
        near = nearest(value, known)
        hint = f"accepted: {', '.join(known)}" if near is None else f"did you mean {near!r}?"
        raise UnsupportedOptionError(f"{what} {value!r}; {hint}")


def check_type(where: str, value: Any, hint: Any) -> None:
    """Refuse a value that no member of the hint accepts, as far as the hint is of plain types.

    Raises:
        UnsupportedOptionError: names the key, the value and the accepted types.
    """
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = [typing.get_origin(m) or m for m in (typing.get_args(hint) if union else (hint,))]
    plain = [m for m in members if m in CHECKED]
    if value is None and type(None) in members:
        return
    if not plain or any(m not in CHECKED and m is not type(None) for m in members):
        return
    # bool is a subclass of int, and a whole number is a fine float.
    if any(type(value) is m or (m is float and type(value) is int) for m in plain):
        return
    wanted = " or ".join(CHECKED[m] for m in plain)
    raise UnsupportedOptionError(f"{where} is {value!r}; expected {wanted}")


def check_mapping(where: str, given: Any, cls: type, exclude: Iterable[str] = ()) -> None:
    """Check keys and plain types of ``given`` against the init fields of the dataclass ``cls``.

    Raises:
        UnsupportedOptionError: for anything but a mapping, an unknown key or a wrong type.
    """
    if not isinstance(given, Mapping):
        raise UnsupportedOptionError(f"{where} is {given!r}; expected a mapping")
    accepted = {f.name for f in dataclasses.fields(cls) if f.init} - set(exclude)
    for key in given:
        check_known(f"{where}: unknown key", key, accepted)
    hints = typing.get_type_hints(cls)
    for key, value in given.items():
        check_type(f"{where}.{key}", value, hints[key])
