"""Save NF4 experts in this library's own files: read bit for bit, and refused by transformers.

config.json has a model_type that is unknown to transformers, and contains the model's own config.
Weights are in ``moe_patch*.safetensors``, which no class of transformers opens. For a parameter
``P`` the files hold ``<part>_P`` for every part of the storage. Other weights have the same names
as in an ordinary checkpoint of the model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.formats import nf4
from moe_patch.formats.packed import PackedWeight
from moe_patch.formats.tensor import QuantTensor, parameter
from moe_patch.quant import state
from moe_patch.quant.shard_files import Shards

MODEL_TYPE = "moe_patch_nf4"
STEM = "moe_patch"
INDEX = f"{STEM}.index.json"
PARTS = ("packed", *nf4.Nf4Scales._fields)
FORMAT = 1


Shapes = dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]]


class Stored(NamedTuple):
    """A parameter whose parts are not loaded yet: module, name, dtype and full path.

    ``order`` is that of the module's parameters.
    """

    module: nn.Module
    name: str
    dtype: torch.dtype
    where: str
    order: tuple[str, ...]


def entries(packed: dict[str, QuantTensor]) -> dict[str, Tensor]:
    """Return the tensors of NF4 parameters by their names in the files."""
    found: dict[str, Tensor] = {}
    for name, value in packed.items():
        for part, tensor in zip(PARTS, (value.weight.packed, *value.weight.scales), strict=True):
            found[_stored_name(name, part)] = tensor
    return found


def write_config(folder: Path, config: Any, packed: dict[str, QuantTensor], shards: Shards) -> None:
    """Write config.json and the index."""
    about = {
        "model_type": MODEL_TYPE,
        "format": FORMAT,
        "storage": "nf4",
        "experts": sorted(packed),
        "architectures": config.architectures,
        "config": config.to_dict(),
    }
    for name, content in (("config.json", about), (INDEX, shards.index())):
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        (folder / name).write_text(text, encoding="utf-8")


def is_packed_checkpoint(about: dict[str, Any]) -> bool:
    """Return whether the content of a config.json describes such a checkpoint."""
    return about.get("model_type") == MODEL_TYPE


def read_config(path: str, about: dict[str, Any], storage: str) -> Any:
    """Return the model's own config.

    Raises:
        UnsupportedModelError: the checkpoint has another storage than requested, or its format or
            model is unknown.
    """
    from transformers import CONFIG_MAPPING

    if storage != about["storage"]:
        raise UnsupportedModelError(
            f"{path}: the checkpoint stores its experts in {about['storage']}, not in {storage}; "
            f"accepted: {about['storage']!r}"
        )
    model_type = about["config"].get("model_type")
    if about["format"] != FORMAT or model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"{path}: format {about['format']} of {model_type!r}; accepted: format {FORMAT}, and "
            "a model type that the installed transformers has"
        )
    return CONFIG_MAPPING[model_type].from_dict(about["config"])


def read_tensors(path: str, hub: dict[str, Any]) -> dict[str, Tensor]:
    """Return all tensors of the files, memory-mapped where the file system allows it.

    Raises:
        UnsupportedOptionError: a file is missing, truncated or broken.
    """
    from safetensors import SafetensorError, safe_open

    try:
        index = json.loads(Path(_file(path, INDEX, hub)).read_bytes())
        found: dict[str, Tensor] = {}
        for name in sorted(set(index["weight_map"].values())):
            with safe_open(_file(path, name, hub), framework="pt") as opened:
                found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        raise UnsupportedOptionError(
            f"{path}: a file of this checkpoint is missing or broken: {error}; accepted: a "
            "complete checkpoint"
        ) from error
    if missing := sorted(index["weight_map"].keys() - found.keys()):
        raise UnsupportedOptionError(
            f"{path}: {missing[0]} is in {INDEX} but not in the files (first of {len(missing)}); "
            "accepted: a complete checkpoint"
        )
    return found


def shapes(names: list[str], tensors: dict[str, Tensor]) -> Shapes:
    """Return shape and dtype of every part of the named parameters.

    transformers copies a quantisation config several times, so it must not hold the tensors.
    """
    found = {}
    for where in names:
        parts = {part: tensors[_stored_name(where, part)] for part in PARTS}
        found[where] = {part: (tuple(one.shape), one.dtype) for part, one in parts.items()}
    return found


def expect(model: nn.Module, stored: Shapes) -> list[Stored]:
    """Replace the stored parameters by their parts, on the meta device.

    Raises:
        UnsupportedModelError: the model lacks such a parameter, or its size differs.
    """
    waiting = []
    modules = dict(model.named_modules())
    orders = {path: tuple(module._parameters) for path, module in modules.items()}
    for where, parts in stored.items():
        path, _, name = where.rpartition(".")
        module = modules.get(path)
        own = None if module is None else module._parameters.get(name)
        E, rows, half = parts["packed"][0]
        if module is None or own is None or own.shape != (E, rows, 2 * half):
            found = None if own is None else tuple(own.shape)
            raise UnsupportedModelError(
                f"{where}: the checkpoint has shape {(E, rows, 2 * half)}, but config.json needs "
                f"{found}; accepted: files and config.json from the same save"
            )
        del module._parameters[name]
        for part, (shape, dtype) in parts.items():
            empty = torch.empty(shape, dtype=dtype, device="meta")
            module.register_parameter(f"{part}_{name}", nn.Parameter(empty, requires_grad=False))
        # Otherwise transformers would look up the removed parameter to give it random values.
        module._is_hf_initialized = True
        waiting.append(Stored(module, name, own.dtype, where, orders[path]))
    return waiting


def collect(waiting: list[Stored]) -> None:
    """Combine the loaded parts into one packed parameter each."""
    for module, name, dtype, _, order in waiting:
        packed, *scales = (module._parameters.pop(f"{part}_{name}").data for part in PARTS)  # type: ignore[union-attr]
        weight = PackedWeight("nf4", packed, tuple(scales), dtype)
        state.put_back(module, name, parameter(QuantTensor(weight)), order)
        state.watch(module)


def _stored_name(where: str, part: str) -> str:
    path, _, name = where.rpartition(".")
    return f"{path}.{part}_{name}"


def _file(path: str, name: str, hub: dict[str, Any]) -> str:
    if Path(path).is_dir():
        return str(Path(path) / hub.get("subfolder", "") / name)
    from transformers.utils import cached_file

    return str(cached_file(path, name, **hub))
