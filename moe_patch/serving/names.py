"""Map checkpoint tensors to the parameters that transformers builds from them, and back.

The table of names and operations is transformers' own (``get_model_conversion_mapping``). The loop
over the keys follows ``convert_and_load_state_dict_in_model``, without values.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from moe_patch.errors import UnsupportedModelError


@dataclass
class Unit:
    """Checkpoint tensors that become one or a few parameters, with the conversion both ways.

    Attributes:
        target: the first parameter's name.
        targets: names of all parameters.
        converter: transformers' WeightConverter, or None if a tensor is only renamed.
        keys: the converter's source pattern -> checkpoint names, in transformers' order.
        renamed: name in the checkpoint -> name that the converter expects.
    """

    target: str
    targets: tuple[str, ...]
    converter: Any
    keys: dict[str, list[str]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)

    @property
    def sources(self) -> list[str]:
        """Names of all checkpoint tensors in the unit."""
        return [key for keys in self.keys.values() for key in keys]

    def forward(self, values: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Convert checkpoint tensors to parameters.

        Args:
            values: tensors by checkpoint name: all of the unit, or the same number of experts for
                each pattern.
            model: the plain model on the meta device.
        """
        if self.converter is None:
            return {self.target: values[self.sources[0]]}
        converter = copy.deepcopy(self.converter)
        for pattern, keys in self.keys.items():
            for key in keys:
                if key in values:
                    converter.add_tensor(self.target, key, pattern, values[key])
        return _plain(converter.convert(self.target, model=model, config=model.config))

    def backward(self, values: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Convert parameters back to checkpoint tensors, by the names that the converter uses.

        Args:
            values: all parameters of the unit, or the same experts of each.
            model: the plain model on the meta device.
        """
        if self.converter is None:
            return {self.renamed[self.sources[0]]: values[self.target]}
        reverse = self.converter.reverse_transform()
        first = ""
        for name, value in values.items():
            renamed, pattern = reverse.rename_source_key(name)
            first = first or renamed
            reverse.add_tensor(first, name, pattern, value)
        return _plain(reverse.convert(first, model=model, config=model.config))


def _plain(found: dict[str, Any]) -> dict[str, Tensor]:
    return {k: v[0] if isinstance(v, list) else v for k, v in found.items()}


def units_of(model: nn.Module, keys: Iterable[str]) -> dict[str, Unit]:
    """Return the unit that fills each parameter.

    Args:
        model: a plain transformers model on the meta device.
        keys: names of a checkpoint's tensors; names without a place in the model are ignored.

    Returns:
        Parameter name -> unit.
    """
    from transformers.core_model_loading import dot_natural_key

    renamings, converters = _mapping_of(model)
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    there = model.state_dict()
    found: dict[str, Unit] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = _renamed(key, renamings, converters, model, there)
        if name not in there:
            continue
        converter = None if pattern is None else by_pattern[pattern]
        unit = found.setdefault(name, Unit(name, (name,), converter))
        unit.keys.setdefault(pattern or key, []).append(key)
        unit.renamed[key] = _before_conversion(key, renamings) if converter else key
    return {name: unit for first in found.values() for name, unit in _filled(first, there)}


def _mapping_of(model: Any) -> tuple[list[Any], list[Any]]:
    """Return transformers' renamings and converters for a model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    return renamings, [one for one in mapping if isinstance(one, WeightConverter)]


def _renamed(
    key: str, renamings: list[Any], converters: list[Any], model: Any, there: dict[str, Any]
) -> tuple[str, str | None]:
    """Return the parameter that a tensor fills, and the converter's pattern if there is one."""
    from transformers.core_model_loading import rename_source_key

    prefix = model.base_model_prefix
    name, pattern = rename_source_key(key, renamings, converters, prefix, there)
    if name not in there and key in there:
        return rename_source_key(key, [], [], prefix, there)
    return name, pattern


def _before_conversion(key: str, renamings: list[Any]) -> str:
    for one in renamings:
        key, _ = one.rename_source_key(key)
    return key


def _filled(unit: Unit, there: dict[str, Any]) -> list[tuple[str, Unit]]:
    """Return all parameters of a unit; a converter with several targets names only the first."""
    if unit.converter is None or len(unit.converter.target_patterns) == 1:
        return [(unit.target, unit)]
    first, *others = unit.converter.target_patterns
    names = [unit.target, *(unit.target.replace(first, other) for other in others)]
    unit.targets = tuple(name for name in names if name in there)
    return [(name, unit) for name in unit.targets]


def by_expert(unit: Unit, experts: int) -> bool:
    """Return whether each expert has its own checkpoint tensors and converts on its own.

    Args:
        unit: the unit of a stacked parameter.
        experts: number of experts stacked in the parameter.
    """
    if unit.converter is None or len(unit.converter.target_patterns) > 1:
        return False
    first, *others = unit.converter.operations
    if type(first).__name__ != "MergeModulelist" or first.dim != 0:
        return False
    apart = all(_leaves_experts_apart(one) for one in others)
    return apart and all(len(keys) == experts for keys in unit.keys.values())


def _leaves_experts_apart(operation: Any) -> bool:
    axes = {"Concatenate": ("dim",), "Transpose": ("dim0", "dim1"), "Interleave": ("dim",)}
    names = axes.get(type(operation).__name__)
    return names is not None and all(getattr(operation, name) > 0 for name in names)


def names_back(unit: Unit, found: Iterable[str], where: str) -> dict[str, str]:
    """Return the checkpoint's name for each name returned by :meth:`Unit.backward`.

    Raises:
        UnsupportedModelError: transformers cannot convert back to the checkpoint's names.
    """
    back = {renamed: key for key, renamed in unit.renamed.items()}
    if unknown := sorted(set(found) - set(back)):
        raise UnsupportedModelError(
            f"{where}: transformers converts it back to {unknown[0]}, but the checkpoint has "
            f"{', '.join(unit.sources[:3])}; accepted: checkpoints whose conversion can be "
            "reversed; for this one, load the base with transformers, merge with PEFT and save "
            "the result"
        )
    return back
