"""Rewrite saved adapters on experts for another release of PEFT.

For a stored weight [E, d1, d2] PEFT 0.18 makes A [E * r, d1] and B [d2, r * E]. From 0.19 on it
makes A [E * r, d2] and B [d1, r * E], except for transposed experts. Neither release can use the
other's file: the sizes differ or, if d1 = d2, the adapter silently means something else.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.patching.discover import discover

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
SWAPS_SINCE = (0, 19)


def convert_adapter(
    model: nn.Module, source: str | Path, target: str | Path, release: str | None = None
) -> int:
    """Write a saved LoRA adapter as another release of PEFT would have saved it.

    The delta of every weight stays the same. Adapters on other modules are copied unchanged.

    Args:
        model: the model that the adapter was trained on, without adapters, on any device including
            "meta". Only paths and shapes are read.
        source: folder with adapter_config.json and adapter_model.safetensors.
        target: folder to write; must not exist.
        release: PEFT release, such as "0.18"; None means the installed one.

    Returns:
        The number of factor pairs rewritten; 0 if both releases store them alike.

    Raises:
        UnsupportedOptionError: a file is missing, or the target exists.
        UnsupportedModelError: factors do not fit the model's experts.
    """
    source, target = Path(source), Path(target)
    config = _config(source, target)
    written, wanted = config.get("peft_version") or "0.17", release or installed_peft()
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / WEIGHTS)
    pairs = rewrite(model, tensors, written, wanted, str(source / WEIGHTS))
    shutil.copytree(source, target)
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(config | {"peft_version": wanted}, indent=2, sort_keys=True)
    (target / CONFIG).write_text(text + "\n", encoding="utf-8")
    return pairs


def rewrite(
    model: nn.Module, tensors: dict[str, Tensor], written: str, wanted: str, where: str
) -> int:
    """Give the factors of a file, in place of its dictionary's, the layout of another release.

    Args:
        model: the model that the adapter was trained on, without adapters, on any device.
        tensors: the file's, by its keys.
        written, wanted: releases of PEFT.
        where: the file, for errors.

    Returns:
        How many pairs were rewritten.

    Raises:
        UnsupportedModelError: factors do not fit the model's experts, or one lacks the other.
    """
    if _swaps(written) == _swaps(wanted):
        return 0
    experts, pairs = _untransposed_experts(model), 0
    for key in [key for key in tensors if ".lora_A." in key]:
        path, other = _module_of(key), key.replace(".lora_A.", ".lora_B.")
        if path not in experts:
            continue
        if other not in tensors:
            raise UnsupportedModelError(f"{where}: {key} is there and {other} is not")
        tensors[key], tensors[other] = _exchanged(
            tensors[key], tensors[other], experts[path], _swaps(written), f"{where}: {key}"
        )
        pairs += 1
    return pairs


def _config(source: Path, target: Path) -> dict[str, Any]:
    for name in (WEIGHTS, CONFIG):
        if not (source / name).is_file():
            raise UnsupportedOptionError(
                f"convert_adapter: {source / name} is missing; accepted: a folder that PEFT's "
                "save_pretrained wrote"
            )
    if target.exists():
        raise UnsupportedOptionError(f"convert_adapter: {target} exists; accepted: a new folder")
    config: dict[str, Any] = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    return config


def installed_peft() -> str:
    """The installed release."""
    return importlib.metadata.version("peft")


def _swaps(release: str) -> bool:
    return tuple(int(part) for part in release.split(".")[:2]) >= SWAPS_SINCE


def _untransposed_experts(model: nn.Module) -> dict[str, list[tuple[int, ...]]]:
    """Map the path of each experts module that PEFT swaps to the shapes of its 3-D weights.

    PEFT reads the flag ``is_transposed`` alone: Llama 4's experts are [E, in, out] without it.
    """
    found = {}
    for block in discover(model):
        for path, experts in block.experts:
            if not (hasattr(experts, "is_transposed") and experts.is_transposed):
                named = experts.named_parameters(recurse=False)
                found[path] = [tuple(p.shape) for _, p in named if p.dim() == 3]
    return found


def _module_of(key: str) -> str:
    """Return the path, in the plain model, of the module that a saved factor belongs to."""
    path = key.partition(".lora_A.")[0].removeprefix("base_model.model.")
    return ".".join(part for part in path.split(".") if part != "base_layer")


def _exchanged(
    a: Tensor, b: Tensor, shapes: list[tuple[int, ...]], swapped: bool, where: str
) -> tuple[Tensor, Tensor]:
    """Return both factors in the other layout: A and B swap, per expert and rank.

    Args:
        a, b: [E * r, in] and [out, r * E] of the file.
        shapes: shapes of the module's weights, [E, d1, d2].
        swapped: whether "in" is d2.
        where: file and key, for errors.

    Raises:
        UnsupportedModelError: no weight has this size.
    """
    size = (b.shape[0], a.shape[1]) if swapped else (a.shape[1], b.shape[0])
    fitting = [shape[0] for shape in shapes if shape[1:] == size and a.shape[0] % shape[0] == 0]
    if not fitting:
        raise UnsupportedModelError(
            f"{where}: factors of shapes {tuple(a.shape)} and {tuple(b.shape)} fit no weight of "
            f"the model's experts ({', '.join(map(str, shapes))}); accepted: the model that the "
            "adapter was trained on, and a file with the peft_version that wrote it"
        )
    E = fitting[0]
    a_ERI = a.reshape(E, -1, a.shape[1])
    b_ORE = b.reshape(b.shape[0], -1, E)
    new_a = b_ORE.permute(2, 1, 0).reshape(a.shape[0], b.shape[0])
    new_b = a_ERI.permute(2, 1, 0).reshape(a.shape[1], b.shape[1])
    return new_a.contiguous(), new_b.contiguous()
