"""Recognise what users pass in place of a model's folder: adapters, GGUF, bare weights."""

from __future__ import annotations

import json
from pathlib import Path

from moe_patch.errors import UnsupportedOptionError

CONFIG = "config.json"
ADAPTER = "adapter_config.json"
GGUF = b"GGUF"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def refuse_other_kind(name: str, what: str) -> None:
    """Refuse a local path that holds something other than a model of transformers.

    Args:
        name: a path or hub id; hub ids and paths that do not exist are left to transformers.
        what: beginning of the error message, such as "MODEL".

    Raises:
        UnsupportedOptionError: says what the path is and what to pass instead.
    """
    path = Path(name)
    found = _file(path) if path.is_file() else _folder(path) if path.is_dir() else None
    if found is not None:
        raise UnsupportedOptionError(f"{what} {name!r} {found}")


def _file(path: Path) -> str | None:
    if path.name == CONFIG:
        return None
    with path.open("rb") as file:
        is_gguf = file.read(len(GGUF)) == GGUF
    if is_gguf or path.suffix == ".gguf":
        return (
            "is a GGUF file, which moe_patch does not read; name the checkpoint it was made "
            f"from, a folder with a {CONFIG}"
        )
    if path.suffix in WEIGHTS:
        return f"is a file of weights only; name the folder that holds it and the {CONFIG}"
    return f"is a file; accepted: a folder with a {CONFIG}, or a hub id"


def _folder(path: Path) -> str | None:
    files = sorted(one.name for one in path.iterdir())
    weights = [name for name in files if Path(name).suffix in WEIGHTS]
    models = [name for name in weights if not name.startswith(("adapter_", "training_args"))]
    if ADAPTER in files and not models:
        base = _json(path / ADAPTER).get("base_model_name_or_path")
        of = f" of {base!r}" if base else ""
        return f"is a PEFT adapter{of}, not a model; name the base model that carries it"
    if CONFIG in files:
        about = _json(path / CONFIG)
        if "_class_name" in about and "model_type" not in about:
            return f"is a {about['_class_name']} of diffusers, not a model of transformers"
        return None
    return _without_config(path, files, models)


def _without_config(path: Path, files: list[str], models: list[str]) -> str | None:
    whole = [*path.glob(f"*/{CONFIG}"), *path.glob(f"snapshots/*/{CONFIG}")]
    parts = ", ".join(sorted(str(one.parent.relative_to(path)) for one in whole))
    if "model_index.json" in files:
        return (
            "is a pipeline of diffusers, not a model of transformers; name the folder of one "
            f"part{f' ({parts})' if parts else ''}"
        )
    if parts:
        return f"holds no {CONFIG}, but its subfolders do; name one: {parts}"
    if any(name.endswith(".gguf") for name in files):
        return (
            "holds GGUF files, which moe_patch does not read; name the checkpoint they were "
            f"made from, a folder with a {CONFIG}"
        )
    if models:
        return (
            f"holds weights ({models[0]}) without the {CONFIG} that says which model they belong "
            "to; put that file beside them"
        )
    if any(name in files for name in TOKENIZER):
        return f"holds a tokenizer and no model; name a folder with a {CONFIG}"
    return None


def _json(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError:  # the code that loads the file reports that it is broken
        return {}
    return found if isinstance(found, dict) else {}
