"""Files of this library's own: safetensors whose metadata says which kind it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from moe_patch.errors import UnsupportedOptionError


def write(
    file: str | Path, kind: str, tensors: Mapping[str, Tensor], about: Mapping[str, str]
) -> None:
    """Write tensors, detached and from whatever device, with ``about`` and the kind beside them.

    Raises:
        UnsupportedOptionError: the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    try:
        save_file(plain, str(file), {"format": kind, **about})
    except (OSError, SafetensorError) as error:
        raise UnsupportedOptionError(f"{file}: cannot be written: {error}") from error


def read(file: str | Path, kind: str, writer: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file that :func:`write` wrote, on the CPU, and what is said about them.

    Args:
        file: its path.
        kind: what it must be.
        writer: what writes such files, for the error.

    Raises:
        UnsupportedOptionError: there is no such file, or it is of another kind.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt") as opened:
            about = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UnsupportedOptionError(f"{file}: not a safetensors file: {error}") from error
    if about.get("format") != kind:
        raise UnsupportedOptionError(
            f"{file}: format is {about.get('format')!r}; accepted: {kind!r}, which {writer} writes"
        )
    return tensors, about
