"""Save models with packed experts: FP8 and MXFP4 as published, NF4 in files of this library.

FP8 is written as DeepSeek and Qwen publish it: each expert tensor of the checkpoint's own layout
in e4m3, with ``weight_scale_inv`` beside it. MXFP4 is written as for gpt-oss: ``P_blocks`` and
``P_scales``. transformers reads both. For NF4 experts transformers has no layout. On an unknown
quant_method it only warns, and leaves the experts at random values. So NF4 files have a model_type
and file names that transformers refuses (see :mod:`moe_patch.quant.packed_checkpoint`).
"""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.formats import fp8
from moe_patch.formats.tensor import QuantTensor
from moe_patch.quant import packed_checkpoint, state
from moe_patch.quant.shard_files import INDEX, Shards, new_folder
from moe_patch.quant.sharded_state import is_sharded

_SAVING = "save_pretrained"
_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [fp8.BLOCK, fp8.BLOCK],
}


def guard_saving(model: nn.Module) -> None:
    """Make ``save_pretrained`` of every transformers model in ``model`` write packed experts."""
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.__dict__.setdefault(_SAVING, functools.partial(_save_pretrained, module))


def free_saving(model: nn.Module) -> None:
    """Undo :func:`guard_saving`."""
    for module in model.modules():
        if getattr(module.__dict__.get(_SAVING), "func", None) is _save_pretrained:
            del module.__dict__[_SAVING]


def _save_pretrained(
    model: Any,
    save_directory: str | Path,
    is_main_process: bool = True,
    max_shard_size: int | str = "5GB",
    **others: Any,
) -> None:
    """Write a model with packed experts, completely or not at all; others as transformers does.

    Args:
        model: a transformers model without adapters.
        save_directory: a folder that holds no model yet.
        is_main_process: False writes nothing.
        max_shard_size: largest size of a file in bytes, or as "5GB".
        others: options of transformers' method; none is accepted if experts are packed.

    Raises:
        UnsupportedModelError: names the adapters, or the experts that no such file can hold, or
            that are sharded.
        UnsupportedOptionError: the folder holds a model, the disk is full, or an option is not
            accepted.
    """
    _refuse_sharded(model)
    packed = {name: p for name, p in model.named_parameters() if isinstance(p, QuantTensor)}
    if not packed:
        others |= {"is_main_process": is_main_process, "max_shard_size": max_shard_size}
        return type(model).save_pretrained(model, save_directory, **others)
    if given := [name for name, value in others.items() if value not in (None, False)]:
        raise UnsupportedOptionError(
            f"save_pretrained: {given[0]} is not accepted while experts are packed; accepted: "
            "is_main_process, max_shard_size"
        )
    _refuse_other_packing(model)
    _refuse_tied(model, packed)
    (storage,) = _storages(packed)
    plain = _plain(model, packed)
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    if storage == "nf4":
        tensors = plain | packed_checkpoint.entries(packed)
        shards = Shards(tensors, packed_checkpoint.STEM, max_shard_size)
    else:
        entries = _fp8_entries if storage == "fp8" else _mxfp4_entries
        tensors = plain | entries(model, packed)
        config.quantization_config = _quantisation(model, storage, packed)
        shards = Shards(tensors, "model", max_shard_size)
    if not is_main_process:
        return
    with new_folder(save_directory, shards.nbytes) as folder:
        if storage == "nf4":
            packed_checkpoint.write_config(folder, config, packed, shards)
        else:
            config.save_pretrained(folder)
            if len(shards) > 1:
                shards.write_index(folder / INDEX)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        shards.write(folder)


def _refuse_sharded(model: Any) -> None:
    """Refuse packed experts of which this process holds a part.

    Raises:
        UnsupportedModelError: names the first.
    """
    if parts := [name for name, p in model.named_parameters() if is_sharded(p)]:
        raise UnsupportedModelError(
            f"save_pretrained: {parts[0]} is packed and sharded; accepted: save_pretrained of the "
            "PEFT model, a sharded state dict, or a model that is not sharded"
        )


def _storages(packed: dict[str, QuantTensor]) -> set[str]:
    """Return the single storage of all packed experts.

    Raises:
        UnsupportedModelError: the experts have several storages.
    """
    found = {value.stored_in for value in packed.values()}
    if len(found) > 1:
        raise UnsupportedModelError(
            f"save_pretrained: experts are stored in {' and '.join(sorted(found))}, but a "
            "checkpoint can have only one quantisation; accepted: one storage for all experts, "
            "or model.state_dict()"
        )
    return found


def _refuse_other_packing(model: Any) -> None:
    """Refuse adapters, and modules that another library packs.

    Raises:
        UnsupportedModelError: names the first.
    """
    peft = sys.modules.get("peft.tuners.tuners_utils")
    for path, module in model.named_modules():
        if peft is not None and isinstance(module, peft.BaseTunerLayer):
            raise UnsupportedModelError(
                f"save_pretrained: {path} holds adapters, which a model checkpoint cannot hold; "
                "accepted: save_pretrained of the PEFT model, or unload() first"
            )
        if type(module).__module__.startswith(("bitsandbytes.", "transformers.integrations.")):
            raise UnsupportedModelError(
                f"save_pretrained: {path} is a {type(module).__name__}, which moe_patch cannot "
                "write; accepted: models in which only experts are packed, or model.state_dict()"
            )


def _refuse_tied(model: Any, packed: dict[str, QuantTensor]) -> None:
    """Refuse experts that several modules share, because files would hold copies of them.

    Raises:
        UnsupportedModelError: names the first.
    """
    seen = {p.packed.data_ptr(): name for name, p in packed.items()}
    for name, p in model.named_parameters(remove_duplicate=False):
        if isinstance(p, QuantTensor) and (first := seen[p.packed.data_ptr()]) != name:
            raise UnsupportedModelError(
                f"save_pretrained: {first} and {name} share one packed parameter; accepted: "
                "experts that are not tied, or model.state_dict()"
            )


def _plain(model: Any, packed: dict[str, QuantTensor]) -> dict[str, Tensor]:
    """Return all other entries by their checkpoint names, each tied one once."""
    entries = model.state_dict()
    for name, value in packed.items():
        for own in state.to_tensors(value.weight, name):
            del entries[own]
    for name in model._keys_to_ignore_on_save or ():
        entries.pop(name, None)
    for name, source in model.all_tied_weights_keys.items():
        both = name in entries and source in entries
        if both and entries[name].data_ptr() == entries[source].data_ptr():
            del entries[name]
    return _stored(model, entries)


def _stored(model: Any, entries: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return entries as named and split by transformers' own ``save_pretrained``."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(entries)))


def _fp8_entries(model: Any, packed: dict[str, QuantTensor]) -> dict[str, Tensor]:
    """Return values and scales, split by the same conversions.

    Raises:
        UnsupportedModelError: see :func:`_check_cut`.
    """
    entries: dict[str, Tensor] = {}
    for name, one in packed.items():
        weight = one.weight
        values = _stored(model, {name: weight.packed})
        _check_cut(model.config.model_type, values, weight.shape[0])
        entries |= values
        for key, scales in _stored(model, {name: weight.scales[0]}).items():
            # transformers 5.9 to 5.20 drop all axes of length one, not only that of the experts.
            blocks = [-(-length // fp8.BLOCK) for length in values[key].shape]
            entries[f"{key}_scale_inv"] = scales.reshape(blocks)
    return entries


def _check_cut(model_type: str, values: dict[str, Tensor], experts: int) -> None:
    """Refuse stored tensors of one projection that share scales with another."""
    name, value = next(iter(values.items()))
    if value.dim() != 2:
        raise UnsupportedModelError(
            f"save_pretrained: checkpoints of {model_type} hold all experts in one tensor "
            f"({name}), which transformers cannot read in FP8; accepted: nf4, model.state_dict(), "
            "or dequantize_experts first"
        )
    if len(values) > experts and value.shape[0] % fp8.BLOCK:
        raise UnsupportedModelError(
            f"save_pretrained: {name} has {value.shape[0]} rows; a checkpoint stores gate and up "
            f"separately, but here they share a block of {fp8.BLOCK} rows; accepted: multiples of "
            f"{fp8.BLOCK} rows, nf4, model.state_dict(), or dequantize_experts first"
        )


def _mxfp4_entries(model: Any, packed: dict[str, QuantTensor]) -> dict[str, Tensor]:
    entries: dict[str, Tensor] = {}
    for name, value in packed.items():
        entries |= state.to_tensors(value.weight, name)
    return entries


def _quantisation(model: Any, storage: str, packed: dict[str, QuantTensor]) -> dict[str, Any]:
    """Return the config's entry, which leaves every Linear and all unpacked experts as they are."""
    holders = {name.rpartition(".")[0] for name in packed}
    kept = [
        path
        for path, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding))
        or (path.endswith(".experts") and path not in holders)
    ]
    method = _FP8 if storage == "fp8" else {"quant_method": "mxfp4"}
    return method | {"modules_to_not_convert": kept}
