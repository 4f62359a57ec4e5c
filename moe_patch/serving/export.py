"""Write adapters on fused experts in the layouts that inference engines read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_patch.errors import UnsupportedModelError
from moe_patch.runtime.peft_release import swaps_features
from moe_patch.serving.adapter import Adapter
from moe_patch.serving.changes import Added
from moe_patch.serving.checkpoint import Checkpoint
from moe_patch.serving.engines import ENGINES, LINEAR, PER_EXPERT, TOGETHER
from moe_patch.serving.names import Unit, by_expert, names_back, units_of
from moe_patch.serving.write import folder_in_one_step
from moe_patch.tools.adapter_files import CONFIG, WEIGHTS


class Pair(NamedTuple):
    """Two factors whose product B A is the delta, including its scale.

    Attributes:
        a: [r, in], or [E, r, in].
        b: [out, r], or [E, out, r].
    """

    a: Tensor
    b: Tensor


def export(adapter: Adapter, base: Checkpoint, to: str, out: Path) -> int:
    """Write an adapter for an inference engine; see :mod:`moe_patch.serving.engines` for sources.

    The result has one rank for all modules and a scale of 1. Factors are padded with zeros, and
    each module's own scale is in its B.

    Args:
        adapter: the adapter on the base's empty model.
        base: the base checkpoint, for its tensor names.
        to: a key of ENGINES.
        out: folder to create.

    Returns:
        Number of pairs of factors written.

    Raises:
        UnsupportedModelError: names the release that does not read such adapters, and why.
    """
    layout = _layout(adapter, to)
    units = units_of(adapter.plain, base.entries)
    pairs: dict[str, Pair] = {}
    for name, change in _added(adapter, to).items():
        if change.experts == 1:
            pairs[_linear(name, units, to)] = _pair(change)
        elif layout == PER_EXPERT:
            pairs |= _single_experts(adapter.plain, units[name], change, to)
        else:
            pairs[_stacked_name(name)] = _pair(change)
    _complete(pairs, adapter.plain, units, layout)
    rank = max(pair.a.shape[-2] for pair in pairs.values())
    tensors = {}
    for name, pair in pairs.items():
        a, b = _widened(pair, rank)
        if a.dim() == 3:
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.contiguous()
    size = sum(one.numel() * one.element_size() for one in tensors.values())
    with folder_in_one_step(out, size) as folder:
        from safetensors.torch import save_file

        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(_config(adapter, pairs, rank), indent=2, sort_keys=True)
        (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
    return len(pairs)


def _refused(to: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{ENGINES[to].release} {what}; accepted: the merged checkpoint that moe-patch merge "
        "writes, which every engine reads"
    )


def _layout(adapter: Adapter, to: str) -> str:
    name = type(adapter.plain).__name__
    if name not in ENGINES[to].layouts:
        raise _refused(to, f"cannot load an adapter on the experts of {name}")
    return ENGINES[to].layouts[name]


def _added(adapter: Adapter, to: str) -> dict[str, Added]:
    """Return the change of every parameter, each one pair of factors.

    Raises:
        UnsupportedModelError: a change is not one pair, or the engine does not run it.
    """
    if adapter.config.get("use_dora"):
        raise _refused(to, "does not support DoRA")
    found = {}
    for name, changes in adapter.changes.items():
        change = changes[0]
        base = change.wrapper.get_base_layer() if isinstance(change, Added) else None
        has_factors = isinstance(change, Added) and hasattr(change.wrapper, "lora_A")
        if len(changes) > 1 or not isinstance(change, Added) or not has_factors:
            raise _refused(to, f"reads only LoRA factors, but {name} is saved in full")
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if change.experts == 1 and (leaf not in LINEAR or not isinstance(base, nn.Linear)):
            raise _refused(to, f"is not known to run an adapter on {name}")
        found[name] = change
    return found


def _pair(change: Added) -> Pair:
    """Return the factors with the scale in B, oriented so that y = B A x."""
    wrapper: Any = change.wrapper
    a, b = (one[change.adapter].weight.detach() for one in (wrapper.lora_A, wrapper.lora_B))
    scale = wrapper.scaling[change.adapter]
    if change.experts == 1:
        return Pair(a, _scaled(b, scale))
    a_ERI = a.reshape(change.experts, -1, a.shape[1])
    b_EOR = b.reshape(b.shape[0], -1, change.experts).permute(2, 0, 1)
    if not swaps_features(wrapper) and not change.is_transposed:
        # PEFT 0.18 takes the rows of [E, out, in] as inputs and its columns as outputs.
        a_ERI, b_EOR = b_EOR.mT, a_ERI.mT
    return Pair(a_ERI, _scaled(b_EOR, scale))


def _scaled(b: Tensor, scale: float) -> Tensor:
    """Return B times the scale, in the dtype of B if that is exact and in fp32 otherwise."""
    wide = b.float() * scale
    own = wide.to(b.dtype)
    return own if torch.equal(own.float(), wide) else wide


def _linear(name: str, units: dict[str, Unit], to: str) -> str:
    if name not in units or units[name].converter is not None:
        raise _refused(to, f"has {name} under another name, or fused with other weights")
    return units[name].sources[0].removesuffix(".weight")


def _single_experts(plain: nn.Module, unit: Unit, change: Added, to: str) -> dict[str, Pair]:
    """Return a pair per expert tensor: B is split like the weight's rows, and A is shared.

    Raises:
        UnsupportedModelError: the checkpoint's tensors are not rows of single experts.
    """
    kinds = [type(one).__name__ for one in unit.converter.operations] if unit.converter else []
    if not by_expert(unit, change.experts) or kinds not in (
        ["MergeModulelist"],
        ["MergeModulelist", "Concatenate"],
    ):
        raise _refused(
            to,
            "reads one tensor per expert, but the checkpoint has no such tensors for "
            f"{unit.target}",
        )
    pair = _pair(change)
    found = unit.backward({unit.target: pair.b}, plain)
    back = names_back(unit, found, unit.target)
    rows = {back[name]: value for name, value in found.items()}
    return {
        key.removesuffix(".weight"): Pair(pair.a[expert], rows[key])
        for keys in unit.keys.values()
        for expert, key in enumerate(keys)
    }


def _stacked_name(name: str) -> str:
    experts, _, leaf = name.rpartition(".")
    return f"{experts}.base_layer" if leaf == "gate_up_proj" else experts


def _complete(
    pairs: dict[str, Pair], plain: nn.Module, units: dict[str, Unit], layout: str
) -> None:
    """Add zero factors for the unadapted modules that an engine needs as well."""
    names = {
        source.removesuffix(".weight"): unit for unit in units.values() for source in unit.sources
    }
    for name, pair in list(pairs.items()):
        before, _, leaf = name.rpartition(".")
        if pair.a.dim() == 3:
            experts = name.removesuffix(".base_layer")
            for missing in {experts, f"{experts}.base_layer"} - set(pairs):
                pairs[missing] = _zeros_of_stack(pair, plain, experts, missing != experts)
            continue
        for group in _together(name, leaf):
            for other in (f"{before}.{one}" for one in group):
                if other in names and other not in pairs:
                    pairs[other] = _zeros(pair, names[other], other, plain)


def _together(name: str, leaf: str) -> list[tuple[str, ...]]:
    if ".experts." in name:
        return [("gate_proj", "up_proj", "down_proj"), ("w1", "w2", "w3")]
    return [group for group in TOGETHER if leaf in group]


def _zeros(pair: Pair, unit: Unit, name: str, plain: nn.Module) -> Pair:
    shape = plain.get_parameter(unit.target).shape
    rows, columns = shape[-2:]
    if unit.converter is not None:
        rows //= len(unit.keys)
    a = torch.zeros(pair.a.shape[0], columns, dtype=pair.a.dtype)
    return Pair(a, torch.zeros(rows, pair.a.shape[0], dtype=pair.a.dtype))


def _zeros_of_stack(pair: Pair, plain: nn.Module, experts: str, up: bool) -> Pair:
    E, r, _ = pair.a.shape
    module: Any = plain.get_submodule(experts)
    shape = module._parameters["gate_up_proj" if up else "down_proj"].shape
    transposed = hasattr(module, "is_transposed") and module.is_transposed
    rows, columns = (shape[2], shape[1]) if transposed else (shape[1], shape[2])
    a = torch.zeros(E, r, columns, dtype=pair.a.dtype)
    return Pair(a, torch.zeros(E, rows, r, dtype=pair.a.dtype))


def _widened(pair: Pair, rank: int) -> Pair:
    more = rank - pair.a.shape[-2]
    pad = nn.functional.pad
    return Pair(pad(pair.a, (0, 0, 0, more)), pad(pair.b, (0, more)))


def _config(adapter: Adapter, pairs: dict[str, Pair], rank: int) -> dict[str, Any]:
    leaves = {name.removesuffix(".base_layer").rpartition(".")[2] for name in pairs}
    kept = ("base_model_name_or_path", "task_type", "revision")
    return {key: adapter.config.get(key) for key in kept} | {
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(leaves),
        "use_dora": False,
        "use_rslora": False,
    }
