"""Find an adapter's base, for commands that take an adapter: its folder and its empty model."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe_patch.cli import models
from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.serving.adapter import read_config

_WANTED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py")


def add_adapter(parser: argparse.ArgumentParser, *, option: bool = False) -> None:
    """Add the argument ADAPTER, or the option ``--adapter``, and ``--base``."""
    name = "--adapter" if option else "adapter"
    parser.add_argument(name, metavar="ADAPTER", help="folder written by PEFT's save_pretrained")
    add_base(parser)


def add_base(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--base``."""
    parser.add_argument(
        "--base",
        metavar="MODEL",
        help="folder or hub id of the base model; default: the one that the adapter names",
    )


def base_folder(adapter: str, base: str | None) -> Path:
    """Return the folder of the base's files; download them if the base is a hub id.

    Raises:
        UnsupportedOptionError: the folder holds no adapter, or the base cannot be loaded.
        UnsupportedModelError: the adapter's kind is not accepted.
    """
    config = read_config(adapter)
    name = base or config.get("base_model_name_or_path")
    if not name:
        raise UnsupportedOptionError(
            f"ADAPTER {adapter!r} does not name its base model; accepted: --base MODEL"
        )
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    with models.explained(
        f"base model {name!r} is neither a folder nor a hub id that can be reached (name another "
        "with --base MODEL)"
    ):
        revision = None if base else config.get("revision")
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_WANTED)))


def plain_model(folder: Path, adapter: str) -> tuple[Any, nn.Module]:
    """Return the base's config and its model on the meta device, in the adapter's model class.

    Raises:
        UnsupportedModelError: the base's quantisation cannot be read, or there is no class.
    """
    import transformers

    from moe_patch.quant.stored import stored

    config = models.load_config(str(folder))
    found = stored(config)
    if found is not None and not (found.is_read and found.method in ("fp8", "mxfp4")):
        raise UnsupportedModelError(
            f"base model {str(folder)!r} is quantised with {found.method}; accepted: 16 or 32 "
            "bits, FP8 in blocks of 128 x 128, MXFP4; name the checkpoint that it was quantised "
            "from"
        )
    own = copy.deepcopy(config)
    for one in (own, own.get_text_config()):
        if hasattr(one, "quantization_config"):
            del one.quantization_config
    auto = read_config(adapter).get("auto_mapping") or {}
    if hasattr(transformers, auto.get("base_model_class") or ""):
        own.architectures = [auto["base_model_class"]]
    return config, models.build(own, torch.float32, "meta")
