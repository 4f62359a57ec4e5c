"""Files written by this library: safetensors files whose metadata names their kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from moe_patch.errors import UnsupportedOptionError


def write(
    file: str | Path, kind: str, tensors: Mapping[str, Tensor], about: Mapping[str, str]
) -> None:
    """Write tensors from any device, detached; the kind and ``about`` become the file's metadata.

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
    """Read a file written by :func:`write`; return its tensors, on the CPU, and its metadata.

    Args:
        file: path of the file.
        kind: the kind that the file must have.
        writer: name of what writes such files, for the error message.

    Raises:
        UnsupportedOptionError: the file does not exist, is not safetensors, or has another kind.
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
