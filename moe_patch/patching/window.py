"""Check at patch time that transformers and PEFT are not older than the supported releases."""

from __future__ import annotations

import sys

from torch import nn

from moe_patch.errors import UnsupportedModelError
from moe_patch.families.installed import installed_release
from moe_patch.runtime.adapters import is_param_wrapper

OLDEST_TRANSFORMERS = "5.9"
OLDEST_PEFT = "0.18"


def require_window(model: nn.Module) -> None:
    """Refuse releases whose experts or adapters this library does not support.

    Args:
        model: PEFT's release matters only if the model holds adapters on parameters.

    Raises:
        UnsupportedModelError: transformers or PEFT is too old (names found and needed versions).
    """
    require_transformers(type(model).__name__)
    if "peft" in sys.modules and any(map(is_param_wrapper, model.modules())):
        _require("peft", OLDEST_PEFT, type(model).__name__)


def require_transformers(where: str) -> None:
    """Refuse a release of transformers that is too old.

    Args:
        where: what needs it, for the error.

    Raises:
        UnsupportedModelError: names found and needed versions.
    """
    _require("transformers", OLDEST_TRANSFORMERS, where)


def too_old(package: str, oldest: str) -> str:
    """Say which release of a package was found and which is needed; empty if it is new enough."""
    found = installed_release(package)
    if _release(found) >= _release(oldest):
        return ""
    return f"needs {package} {oldest} or newer, found {found}"


def _require(package: str, oldest: str, where: str) -> None:
    if why := too_old(package, oldest):
        raise UnsupportedModelError(
            f"{where}: moe_patch {why}; install a newer {package}, or leave moe_patch out"
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
