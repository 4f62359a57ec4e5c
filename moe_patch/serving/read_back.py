"""Compare an exported adapter with the original: each delta, expert by expert.

Deltas are computed from the exported files as the engines compute them, and compared with PEFT's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_patch.errors import UnsupportedModelError
from moe_patch.serving.adapter import Adapter, read_adapter, read_config
from moe_patch.serving.changes import Added
from moe_patch.serving.checkpoint import PLAIN, Checkpoint
from moe_patch.serving.names import Unit, names_back, units_of
from moe_patch.serving.proof import Weight, ulp
from moe_patch.tools.adapter_files import WEIGHTS

_PREFIX = "base_model.model."


def exported(adapter: Adapter, base: Checkpoint, folder: str | Path) -> Iterator[Weight]:
    """Compare the delta of every weight and every expert with PEFT's.

    Args:
        adapter: the original adapter on the base's empty model.
        base: the base checkpoint, for its tensor names.
        folder: written by ``export``, in any layout.

    Raises:
        UnsupportedOptionError: the folder holds no adapter, or an incomplete one.
        UnsupportedModelError: the export lacks factors, or has factors of other weights.
    """
    folder = Path(folder)
    config = read_config(folder)
    if config.get("peft_version"):
        again = read_adapter(folder, adapter.plain)
        found = {name: _delta(again, name) for name in again.changes}
        for name in adapter.changes:
            yield from _weights(name, _delta(adapter, name), _taken(found, name, folder))
        return
    factors = _Factors(folder, config)
    units = units_of(adapter.plain, base.entries)
    for name in adapter.changes:
        delta, unit = _delta(adapter, name), units[name]
        if (stacked := factors.stacked(name, delta.shape[0])) is not None:
            yield from _weights(name, delta, stacked.mT if _transposed(adapter, name) else stacked)
        else:
            yield from _singles(unit, delta, factors, adapter)
    if left := factors.left():
        raise UnsupportedModelError(
            f"{folder / WEIGHTS}: {left[0]} is not of a weight that the adapter changes; "
            "accepted: an export of this adapter"
        )


def deltas(adapter: Adapter, base: Checkpoint, folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the delta of every parameter that the adapter changes, read from an export.

    The file is read as the engine reads it; the checkpoint's tensors are then converted to the
    model's parameters by transformers' own conversion.

    Args:
        adapter, base, folder: as in :func:`exported`.

    Yields:
        The parameter's name and its delta in fp32, with the parameter's shape.

    Raises:
        UnsupportedOptionError, UnsupportedModelError: as in :func:`exported`.
    """
    folder = Path(folder)
    config = read_config(folder)
    if config.get("peft_version"):
        again = read_adapter(folder, adapter.plain)
        yield from ((name, _delta(again, name)) for name in again.changes)
        return
    factors = _Factors(folder, config)
    units = units_of(adapter.plain, base.entries)
    for name, changes in adapter.changes.items():
        experts = max(one.experts for one in changes if isinstance(one, Added))
        if (found := factors.stacked(name, experts)) is not None:
            yield name, found.mT if _transposed(adapter, name) else found
            continue
        unit = units[name]
        parts = {key: factors.product(key.removesuffix(".weight")) for key in unit.sources}
        yield name, unit.forward(parts, adapter.plain)[name]


def _singles(unit: Unit, delta: Tensor, factors: _Factors, adapter: Adapter) -> Iterator[Weight]:
    parts = unit.backward({unit.target: delta}, adapter.plain)
    back = names_back(unit, parts, unit.target)
    for name, value in parts.items():
        yield _weight(back[name], value, factors.product(back[name].removesuffix(".weight")))


def _transposed(adapter: Adapter, name: str) -> bool:
    return any(isinstance(one, Added) and one.is_transposed for one in adapter.changes[name])


def _taken(found: dict[str, Tensor], name: str, folder: Path) -> Tensor:
    if name not in found:
        raise UnsupportedModelError(
            f"{folder / WEIGHTS} has no factors for {name}; accepted: an export of this adapter"
        )
    return found[name]


def _delta(adapter: Adapter, name: str) -> Tensor:
    """Return the delta of a parameter: its value after the changes if it was 0 before."""
    value = torch.zeros(adapter.plain.get_parameter(name).shape)
    for change in adapter.changes[name]:
        if not isinstance(change, Added):
            raise UnsupportedModelError(
                f"{name} is saved in full; accepted: adapters that hold only LoRA factors"
            )
        value = change.apply(value)
    return value


def _weights(name: str, expected: Tensor, found: Tensor) -> Iterator[Weight]:
    if expected.dim() == 2:
        yield _weight(name, expected, found)
        return
    for expert, (one, other) in enumerate(zip(expected, found, strict=True)):
        yield _weight(f"{name}[{expert}]", one, other)


def _weight(name: str, expected: Tensor, found: Tensor) -> Weight:
    size = float(expected.double().norm())
    share = float((found.double() * expected.double()).sum()) / size**2 if size else 1.0
    # Where terms cancel, the order of the sum decides, so use at least the ulp of a typical value.
    typical = expected.abs().clamp(min=size / expected.numel() ** 0.5 / 256)
    off = (found - expected).abs() / ulp(typical, torch.bfloat16)
    error = float((found - expected).double().norm()) / size if size else 0.0
    return Weight(name, PLAIN, float(off.max()), share, 1.0, 0.0, error)


class _Factors:
    """The pairs of an exported file; added pairs of zeros may stay unused."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        from safetensors.torch import load_file

        self.folder = folder
        self._tensors = load_file(folder / WEIGHTS)
        self._scale = config["lora_alpha"] / config["r"]
        self._used: set[str] = set()

    def pair(self, name: str) -> tuple[Tensor, Tensor]:
        """Return A and B of a module in fp32.

        Raises:
            UnsupportedModelError: the file has no pair for the module.
        """
        keys = [f"{_PREFIX}{name}.lora_{letter}.weight" for letter in "AB"]
        if missing := [key for key in keys if key not in self._tensors]:
            raise UnsupportedModelError(
                f"{self.folder / WEIGHTS} has no {missing[0]}; accepted: an export of this adapter"
            )
        self._used |= {*keys}
        a, b = (self._tensors[key].float() for key in keys)
        return a, b

    def product(self, name: str) -> Tensor:
        """Return the delta [out, in] of a module."""
        a, b = self.pair(name)
        return b @ a * self._scale

    def stacked(self, name: str, experts: int) -> Tensor | None:
        """Return the delta [E, out, in] of a stacked parameter; None if the file has no stacks."""
        module, _, leaf = name.rpartition(".")
        module = f"{module}.base_layer" if leaf == "gate_up_proj" else module
        if leaf not in ("gate_up_proj", "down_proj"):
            return None
        if f"{_PREFIX}{module}.lora_A.weight" not in self._tensors:
            return None
        a, b = self.pair(module)
        parts = zip(a.chunk(experts), b.view(len(b), -1, experts).unbind(-1), strict=True)
        return torch.stack([own_b @ own_a for own_a, own_b in parts]) * self._scale

    def left(self) -> list[str]:
        """Return keys of pairs that were not used and are not zero."""
        return [
            key
            for key, value in self._tensors.items()
            if key not in self._used and ".lora_B." in key and value.any()
        ]
