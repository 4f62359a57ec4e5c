"""Markers for Triton releases that were tested on the user's own card.

``moe-patch selftest --trust`` writes a marker (:mod:`moe_patch.tools.trust`). It is valid for
exactly one version of Triton, of torch and of this library, and one compute capability. Any other
marker is ignored, with a message.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from moe_patch._version import __version__
from moe_patch.errors import UnsupportedOptionError

# The only compute capability of the Hopper kernels.
CAPABILITY = (9, 0)


class Marker(NamedTuple):
    """Outcome of a test on the user's card.

    Attributes:
        in_front: packed weights may be decoded inside the kernel, directly before each product.
        hazards: one line for each register that is overwritten while a product may still read it.
        fp8: experts may be multiplied in FP8.
    """

    in_front: bool
    hazards: tuple[str, ...]
    fp8: bool = False


def combination() -> dict[str, Any]:
    """Return the versions and the capability for which a marker is valid."""
    return {
        "triton": triton.__version__,
        "torch": torch.__version__,
        "capability": list(CAPABILITY),
        "moe_patch": __version__,
    }


def path() -> Path:
    """Return the path of this combination's marker, in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    sm = "".join(map(str, CAPABILITY))
    name = f"triton-{triton.__version__}-torch-{torch.__version__}-sm{sm}-{__version__}.json"
    return Path(folder) / "moe_patch" / name


def read() -> tuple[Marker | None, str]:
    """Return this combination's marker or None, and why an existing one was ignored or ""."""
    place = path()
    try:
        found = json.loads(place.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except (OSError, ValueError) as error:
        return None, f"the marker {place} is ignored: it cannot be read ({error})"
    if (why := _unlike(found)) is not None:
        return None, f"the marker {place} is ignored: {why}"
    return Marker(found["in_front"], tuple(found["hazards"]), found["fp8"]), ""


def _unlike(found: Any) -> str | None:
    """Return why the content of a file is not a marker of this combination, or None."""
    if not isinstance(found, dict):
        return "it is not a JSON object"
    for name, value in combination().items():
        if found.get(name) != value:
            return f"it is for {name} {found.get(name)}, found {value}"
    in_front, fp8, hazards = (found.get(name) for name in ("in_front", "fp8", "hazards"))
    if not isinstance(in_front, bool) or not isinstance(fp8, bool) or not isinstance(hazards, list):
        return "in_front or fp8 (true or false) or hazards (a list) is missing"
    if (in_front or fp8) and hazards:
        return "it allows decoding in front of the product, or FP8 products, despite hazards"
    return None


def write(marker: Marker, **about: Any) -> Path:
    """Write this combination's marker atomically, with ``about`` for a human reader.

    Raises:
        UnsupportedOptionError: the folder cannot be written.
    """
    place = path()
    text = json.dumps(combination() | marker._asdict() | about, indent=2) + "\n"
    with _refused(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, place)
        except BaseException:
            os.unlink(name)
            raise
    return place


def check_writable() -> None:
    """Refuse an unwritable folder before a long test runs.

    Raises:
        UnsupportedOptionError: the folder cannot be written.
    """
    place = path()
    with _refused(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place.parent):
            pass


def forget() -> Path | None:
    """Remove this combination's marker; return its path, or None if there was none.

    Raises:
        UnsupportedOptionError: the folder cannot be written.
    """
    place = path()
    with _refused(place):
        try:
            place.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return None
    return place


@contextlib.contextmanager
def _refused(place: Path) -> Any:
    try:
        yield
    except OSError as error:
        raise UnsupportedOptionError(
            f"the marker {place} cannot be written ({error.strerror}); accepted: a writable cache "
            "folder; set XDG_CACHE_HOME to one"
        ) from error
