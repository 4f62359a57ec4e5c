"""Read a saved adapter of any PEFT layout since 0.17 and check all of it against its base."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_patch.errors import MoePatchError, UnsupportedModelError, UnsupportedOptionError
from moe_patch.serving.changes import Added, Change, Replaced
from moe_patch.tools.adapter_files import CONFIG, WEIGHTS, installed_peft, rewrite

NAME = "default"
# These initialisations also change the base's weights, so the file is not the whole change.
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class Adapter(NamedTuple):
    """An adapter and its plain model, both on the meta device except for the factors.

    Attributes:
        folder: folder of the adapter.
        config: content of adapter_config.json.
        plain: the model without adapters.
        changes: name of a parameter in the plain model -> its changes, in PEFT's order.
        aliases: name of a tied parameter -> name of the parameter it shares.
    """

    folder: Path
    config: dict[str, Any]
    plain: nn.Module
    changes: dict[str, list[Change]]
    aliases: dict[str, str]


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return the content of a folder's adapter_config.json.

    Raises:
        UnsupportedOptionError: the folder holds no adapter, or an incomplete one.
        UnsupportedModelError: an adapter of this kind cannot be merged from its file.
    """
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UnsupportedOptionError(
                f"ADAPTER {str(folder)!r} has no {name}; accepted: a complete folder from PEFT's "
                "save_pretrained, in safetensors"
            )
    try:
        found = json.loads((folder / CONFIG).read_bytes())
    except ValueError as error:
        raise UnsupportedOptionError(
            f"{folder / CONFIG}: not valid JSON: {error}; accepted: a complete folder from PEFT's "
            "save_pretrained"
        ) from error
    if not isinstance(found, dict) or found.get("peft_type") != "LORA":
        kind = found.get("peft_type") if isinstance(found, dict) else type(found).__name__
        raise UnsupportedModelError(f"{folder / CONFIG}: peft_type is {kind!r}; accepted: 'LORA'")
    start = str(found.get("init_lora_weights", True)).lower()
    if start.startswith(_CHANGE_THE_BASE):
        raise UnsupportedModelError(
            f"{folder / CONFIG}: init_lora_weights={start!r} also changed the base's weights, so "
            "the adapter is only part of the change; accepted: an adapter saved with "
            "save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    if found.get("lora_bias"):
        raise UnsupportedModelError(
            f"{folder / CONFIG}: lora_bias=True; accepted: lora_bias=False; merge this adapter "
            "with PEFT's merge_and_unload instead"
        )
    return found


def read_adapter(folder: str | Path, plain: nn.Module) -> Adapter:
    """Load an adapter into a copy of the model and check that every tensor has a place.

    Args:
        folder: written by PEFT's ``save_pretrained``, of any release since 0.17.
        plain: the base model on the meta device, without adapters.

    Raises:
        UnsupportedOptionError: files are missing, broken or incomplete.
        UnsupportedModelError: the adapter is for another base, or its kind is not accepted.
    """
    folder = Path(folder)
    config = read_config(folder)
    tensors = _tensors(folder)
    written = config.get("peft_version") or "0.17"
    rewrite(plain, tensors, written, installed_peft(), str(folder / WEIGHTS))
    wrapped = _wrapped(folder, plain, tensors)
    return Adapter(folder, config, plain, _changes(wrapped), _aliases(plain))


def _tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / WEIGHTS, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UnsupportedOptionError(
            f"{folder / WEIGHTS}: not a complete safetensors file: {error}; accepted: a complete "
            "folder from PEFT's save_pretrained"
        ) from error


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Turn an error of any kind from PEFT into one line that names the adapter."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except MoePatchError:
        raise
    except Exception as error:  # PEFT raises ValueError, KeyError, RuntimeError ..
        said = " ".join(str(error).split())
        raise UnsupportedModelError(
            f"ADAPTER {str(folder)!r} does not fit the base: {said[:300]}; accepted: the base "
            "that the adapter was trained on"
        ) from error


def _wrapped(folder: Path, plain: nn.Module, tensors: dict[str, Tensor]) -> Any:
    """Return PEFT's model around a copy of ``plain``, with the factors of the file."""
    from peft import PeftConfig, PeftModel

    with _named(folder):
        config = PeftConfig.from_pretrained(str(folder))
        config.inference_mode = True
        base: Any = copy.deepcopy(plain)
        model = PeftModel(base, config, low_cpu_mem_usage=True, autocast_adapter_dtype=False)
        placed = _as_saved(model, tensors) or _converted(model, tensors)
        result = nn.Module.load_state_dict(model, placed, strict=False, assign=True)
    if unexpected := sorted(result.unexpected_keys):
        raise UnsupportedModelError(
            f"{folder / WEIGHTS}: the base has no module or expert for {unexpected[0]} (first of "
            f"{len(unexpected)}); accepted: the base that the adapter was trained on"
        )
    if missing := [name for name, value in _own(model) if value.is_meta]:
        raise UnsupportedOptionError(
            f"{folder / WEIGHTS}: {missing[0]} is missing (first of {len(missing)}); accepted: a "
            "complete folder from PEFT's save_pretrained"
        )
    return model


def _as_saved(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the file's tensors by the model's names; empty if a key is not one of them.

    PEFT renames keys as transformers renames those of a checkpoint. For two model types it loses
    keys that way. A file whose keys are all the model's own needs no renaming.
    """
    names = {name.replace(f".{NAME}", "", 1): name for name, _ in _own(model)}
    if not set(tensors) <= set(names):
        return {}
    return {names[key]: value for key, value in tensors.items()}


def _converted(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the file's tensors with the names and the layout of PEFT's conversion."""
    from peft.utils import set_peft_model_state_dict

    placed: dict[str, Tensor] = {}

    def keep(state: dict[str, Tensor], **options: Any) -> Any:
        placed.update(state)
        return nn.Module.load_state_dict(model, state, **options)

    # PEFT then moves the loaded values to the base's device, meta, so the caller sets them again.
    vars(model)["load_state_dict"] = keep
    try:
        set_peft_model_state_dict(model, tensors, low_cpu_mem_usage=True)
    finally:
        del vars(model)["load_state_dict"]
    return placed


def _own(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapter's factors and whole modules, with their names in PEFT's model."""
    for name, value in model.named_parameters():
        if _is_own(name):
            yield name, value


def _is_own(name: str) -> bool:
    parts = name.split(".")
    return f".modules_to_save.{NAME}." in f".{name}" or any(
        part.startswith(("lora_", "trainable_tokens_")) for part in parts
    )


def _aliases(plain: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    found = {}
    for name, value in plain.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(value), name)
        if other != name:
            found[name] = other
    return found


_INSIDE = ("base_layer", "token_adapter", "original_module")


def _changes(model: Any) -> dict[str, list[Change]]:
    """Return the changes of each parameter, in the order in which PEFT merges."""
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.utils.other import ModulesToSaveWrapper

    found: dict[str, list[Change]] = {}
    base = model.get_base_model()
    for path, module in base.named_modules():
        plain = _without(path)
        if isinstance(module, ParamWrapper):
            name, E = module.parameter_name, module.num_experts
            found.setdefault(f"{plain}.{name}", []).append(Added(module, name, E, NAME))
        elif isinstance(module, (LoraLayer, TrainableTokensLayer)):
            _refuse_without_weight(plain, module)
            found.setdefault(f"{plain}.weight", []).append(Added(module, "weight", 1, NAME))
        elif isinstance(module, ModulesToSaveWrapper) and NAME in module.modules_to_save:
            for name, value in module.modules_to_save[NAME].named_parameters():
                found[f"{plain}.{name}"] = [Replaced(value.detach())]
    for path, value in base.named_parameters():
        if not value.is_meta and not _is_own(path):
            found.setdefault(_without(path), []).insert(0, Replaced(value.detach(), True))
    return found


def _without(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in _INSIDE)


def _refuse_without_weight(path: str, module: Any) -> None:
    weight = module.get_base_layer()._parameters.get("weight")
    if weight is None or not weight.is_floating_point():
        raise UnsupportedModelError(
            f"{path}: PEFT adapts this layer with {type(module).__name__}; accepted: adapters on "
            "layers with one floating-point weight (Linear, Embedding, convolution) and on "
            "target_parameters"
        )


def place(adapter: Adapter, device: torch.device) -> None:
    """Move all factors except those of stacked experts to a device, in fp32 as PEFT merges."""
    for change in (one for several in adapter.changes.values() for one in several):
        if isinstance(change, Added) and change.experts == 1:
            own = [m for name, m in change.wrapper.named_children() if name != "base_layer"]
            for value in (value for module in own for value in module.parameters()):
                if value.is_floating_point() and not value.is_meta:
                    value.data = value.data.to(device=device, dtype=torch.float32)
