"""Compile into a temporary folder if Triton cannot write its cache."""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import triton

Result = TypeVar("Result")
_WARNED: list[str] = []


def compiling(launch: Callable[..., Result], /, *args: Any, **constants: Any) -> Result:
    """Return ``launch(*args, **constants)``; retry with a temporary cache if a write failed.

    A read-only cache still provides the kernels it contains. The temporary folder replaces it only
    while a kernel compiles, and is deleted when the process ends.

    Raises:
        OSError: the cause is not the cache.
    """
    try:
        return launch(*args, **constants)
    except OSError as error:
        if not _refused(error):
            raise
        why = str(error)
    folder = _folder_of_process()
    if not _WARNED:
        _WARNED.append(why)
        warnings.warn(
            f"moe_patch: Triton cannot write its cache {triton.knobs.cache.dir} ({why}); kernels "
            f"are compiled into {folder.name}, for this process only; set TRITON_CACHE_DIR to a "
            "writable folder",
            stacklevel=2,
        )
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder.name
        return launch(*args, **constants)


def _refused(error: OSError) -> bool:
    """Return whether an error concerns a file in Triton's cache, or the cache is not writable."""
    folder = triton.knobs.cache.dir
    if isinstance(error.filename, str) and Path(error.filename).is_relative_to(folder):
        return True
    try:  # The error of a full disk names no file, so try to write one.
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 12))
    except OSError:
        return True
    return False


@functools.cache
def _folder_of_process() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="moe_patch-triton-")
