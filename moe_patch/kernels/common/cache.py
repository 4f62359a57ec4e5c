"""Compiling where Triton cannot write its cache: into a folder of this process."""

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
    """Return ``launch(*args, **constants)``, again where Triton's cache refused what was compiled.

    A cache that can be read only still gives the kernels that it holds. The folder in its place is
    set while one kernel compiles, and lives as long as the process.

    Raises:
        OSError: for another reason than the cache.
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
            f"are compiled into {folder.name}, for this process alone; set TRITON_CACHE_DIR to a "
            "folder that can be written",
            stacklevel=2,
        )
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder.name
        return launch(*args, **constants)


def _refused(error: OSError) -> bool:
    """Return whether an error is of a file in Triton's cache, or the cache takes none."""
    folder = triton.knobs.cache.dir
    if isinstance(error.filename, str) and Path(error.filename).is_relative_to(folder):
        return True
    try:  # a full disk names no file
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 12))
    except OSError:
        return True
    return False


@functools.cache
def _folder_of_process() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="moe_patch-triton-")
