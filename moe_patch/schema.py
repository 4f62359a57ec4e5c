"""Checks of options against a dataclass: a wrong key, type or word gives a one-line error."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from moe_patch.errors import UnsupportedOptionError

# Only plain types are checked here. The class itself checks enums, nested dataclasses, protocols.
CHECKED = {
    bool: "a bool (true, false)", int: "an int", float: "a number", str: "a string",
    dict: "a mapping", list: "a list",
}  # fmt: skip
UNIONS = (typing.Union, types.UnionType)


def nearest(value: Any, accepted: Iterable[str]) -> str | None:
    """Return the accepted name closest to a value, or None if none is close."""
    return next(iter(difflib.get_close_matches(str(value), accepted, n=1)), None)


def check_known(what: str, value: Any, accepted: Iterable[str]) -> None:
    """Refuse a name that is not accepted.

    Raises:
        UnsupportedOptionError: suggests the closest accepted name, or lists all if none is close.
    """
    known = sorted(accepted)
    if value not in known:
        near = nearest(value, known)
        hint = f"accepted: {', '.join(known)}" if near is None else f"did you mean {near!r}?"
        raise UnsupportedOptionError(f"{what} {value!r}; {hint}")


def check_choice(where: str, value: Any, accepted: Iterable[str]) -> None:
    """Refuse a value that is not one of the accepted words.

    Raises:
        UnsupportedOptionError: lists all accepted words.
    """
    words = list(accepted)
    if value not in words:
        raise UnsupportedOptionError(f"{where} is {value!r}; accepted: {', '.join(words)}")


def check_type(where: str, value: Any, hint: Any) -> None:
    """Refuse a value of the wrong type; hints that are not built from plain types are not checked.

    Raises:
        UnsupportedOptionError: names the key, the value and the accepted types.
    """
    members = typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,)
    origins = {typing.get_origin(member) or member for member in members}
    if not origins <= {*CHECKED, type(None), typing.Literal}:
        return
    literals = [m for m in members if typing.get_origin(m) is typing.Literal]
    words = [word for member in literals for word in typing.get_args(member)]
    if _fits(value, origins, words):
        return
    wanted = [*(words_for for t, words_for in CHECKED.items() if t in origins), *map(repr, words)]
    raise UnsupportedOptionError(f"{where} is {value!r}; expected {' or '.join(wanted)}")


def _fits(value: Any, plain: Iterable[Any], words: Iterable[Any]) -> bool:
    # Compare exact types: bool is a subclass of int. An int is accepted where a float is.
    kinds = {*plain, int} if float in plain else {*plain}
    return type(value) in kinds or any(
        type(value) is type(word) and value == word for word in words
    )


def check_factor(where: str, value: float) -> None:
    """Refuse a loss factor that makes no sense in training.

    Raises:
        UnsupportedOptionError: it is negative or not finite.
    """
    if not 0 <= value < math.inf:
        raise UnsupportedOptionError(
            f"{where} is {value!r}; accepted: a finite number >= 0 (a negative factor would "
            "reward what the loss penalises)"
        )


def check_fields(where: str, instance: Any) -> None:
    """Check the fields of a dataclass instance with :func:`check_type`.

    Raises:
        UnsupportedOptionError: for the first value of a wrong type.
    """
    hints = typing.get_type_hints(type(instance))
    for field in dataclasses.fields(instance):
        check_type(f"{where}: {field.name}", getattr(instance, field.name), hints[field.name])


def check_mapping(where: str, given: Any, cls: type, exclude: Iterable[str] = ()) -> None:
    """Check keys and plain types of ``given`` against the init fields of the dataclass ``cls``.

    Raises:
        UnsupportedOptionError: not a mapping, an unknown key, or a value of a wrong type.
    """
    if not isinstance(given, Mapping):
        raise UnsupportedOptionError(f"{where} is {given!r}; expected a mapping")
    accepted = {f.name for f in dataclasses.fields(cls) if f.init} - set(exclude)
    for key in given:
        check_known(f"{where}: unknown key", key, accepted)
    hints = typing.get_type_hints(cls)
    for key, value in given.items():
        check_type(f"{where}.{key}", value, hints[key])
