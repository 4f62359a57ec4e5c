"""Expand ``~`` and environment variables in the paths of a training file, or refuse them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from moe_patch.errors import UnsupportedOptionError

# Keys whose value may be a path; a hub id contains neither ``~`` nor ``$``.
KEYS = (
    "output_dir", "model", "model.path", "tokenizer", "tokenizer.source", "data", "data.source",
    "training.resume_from_checkpoint", "training.logging_dir", "training.deepspeed",
    "training.fsdp_config", "training.accelerator_config", "moe_patch.debug_dir",
)  # fmt: skip
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def expand_paths(node: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Copy a YAML node with the variables and ``~`` of its paths expanded.

    Raises:
        UnsupportedOptionError: a variable is unset or empty, or there is no home folder (names the
            key).
    """
    expanded = dict(node)
    for key in KEYS:
        parent, _, child = key.partition(".")
        value = expanded.get(parent)
        if not child and isinstance(value, str):
            expanded[parent] = expand(value, f"{where}: {key}")
        elif child and isinstance(value, Mapping) and isinstance(value.get(child), str):
            expanded[parent] = {**value, child: expand(value[child], f"{where}: {key}")}
    return expanded


def expand(path: str, where: str) -> str:
    """Expand a leading ``~``, ``$NAME`` and ``${NAME}`` in a path.

    Raises:
        UnsupportedOptionError: a variable is unset or empty, or there is no home folder.
    """

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if not os.environ.get(name):
            raise UnsupportedOptionError(
                f"{where} is {path!r}; the environment variable {name} is unset or empty; "
                "set it, or write the path out"
            )
        return os.environ[name]

    full = _VARIABLE.sub(value, path)
    if "${" in _VARIABLE.sub("", path):
        raise UnsupportedOptionError(
            f"{where} is {path!r}; accepted variables: $NAME and ${{NAME}}, without defaults"
        )
    if not path.startswith("~"):
        return full
    home = os.path.expanduser(full)
    if home.startswith("~"):
        raise UnsupportedOptionError(
            f"{where} is {path!r}; there is no home folder for it; write the path out"
        )
    return home
