"""Compare base plus adapter with a merged checkpoint: each weight's delta, expert by expert.

transformers converts both checkpoints to the model's parameters; a merge writes in the opposite
direction. PEFT computes the sums over whole parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_patch.errors import UnsupportedModelError
from moe_patch.serving.adapter import Adapter
from moe_patch.serving.changes import Added, Change
from moe_patch.serving.checkpoint import FP8, MXFP4, PLAIN, Checkpoint, encode
from moe_patch.serving.names import Unit, names_back, units_of
from moe_patch.serving.ties import untied

# Largest relative error of one expert from encoding alone, with a margin.
LIMITS = {FP8: 0.05, MXFP4: 0.2}


@dataclass(frozen=True)
class Weight:
    """Comparison of one weight, or of one expert in a stacked weight.

    Attributes:
        name: the parameter's name, with the expert's number in brackets.
        storage: storage of the result.
        ulps: the largest distance from W + delta, in units in the last place of the result.
        share: fraction of the delta in the result: 1 if complete, 0 for an unrelated delta.
        kept: fraction of the delta that encoding W + delta keeps: 1 for a plain storage. A packed
            format loses deltas below half a step.
        tolerance: largest deviation of ``share`` from ``kept`` that rounding alone can cause.
        error: relative error of the result.
    """

    name: str
    storage: str
    ulps: float
    share: float
    kept: float
    tolerance: float
    error: float

    @property
    def passed(self) -> bool:
        """Return whether the weight equals base plus delta, up to one rounding."""
        if self.storage == PLAIN:
            return self.ulps <= 1
        return self.error <= LIMITS[self.storage] and abs(self.share - self.kept) <= self.tolerance


def weights(adapter: Adapter, base: Checkpoint, merged: Checkpoint) -> Iterator[Weight]:
    """Compare every parameter that the adapter changes.

    Args:
        adapter: the adapter on the base's empty model.
        base, merged: the two checkpoints.

    Raises:
        UnsupportedModelError: a checkpoint lacks a weight of the model.
    """
    readers = [Reader(one, adapter.plain) for one in (base, merged)]
    changes, apart, _ = untied(adapter, readers[0].units)
    wanted = [(name, name, own) for name, own in changes.items()]
    wanted += [(name, main, own) for name, (main, own) in apart.items()]
    for name, main, own in wanted:
        before = readers[0].read(main)
        storage, dtype = readers[1].storage(name)
        found = readers[1].read(name)
        expected = before.clone()
        for change in own:
            expected = change.apply(expected)
        kept = expected if storage == PLAIN else readers[1].encoded(name, expected)
        for expert in _experts(own):
            label = name if expert is None else f"{name}[{expert}]"
            all_ = (before, expected, kept, found)
            parts = [one if expert is None else one[expert] for one in all_]
            yield _compared(label, storage, dtype, *parts)


def _experts(changes: list[Change]) -> Iterator[int | None]:
    most = max((one.experts for one in changes if isinstance(one, Added)), default=1)
    yield from range(most) if most > 1 else (None,)


def _compared(
    name: str,
    storage: str,
    dtype: torch.dtype,
    before: Tensor,
    expected: Tensor,
    encoded: Tensor,
    found: Tensor,
) -> Weight:
    delta, off = expected - before, found - expected
    size, norm = _norm(delta), _norm(expected)
    share, kept = (_share(one - before, delta) for one in (found, encoded))
    noise = LIMITS.get(storage, 0.0) * norm / (size * math.sqrt(delta.numel())) if size else 0.0
    ulps = 0.0
    if storage == PLAIN:
        ulps = float((off.abs() / ulp(expected, dtype)).max())
    error = _norm(off) / norm if norm else 0.0
    return Weight(name, storage, ulps, share, kept, 0.02 + 6 * noise, error)


def _share(moved: Tensor, delta: Tensor) -> float:
    size = _norm(delta)
    return float((moved.double() * delta.double()).sum()) / size**2 if size else 1.0


def _norm(value: Tensor) -> float:
    return float(value.double().norm())


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the spacing of ``dtype`` at each value, in fp32, at least its spacing at ``tiny``."""
    about = torch.finfo(dtype)
    _, exponent = torch.frexp(value.abs().clamp(min=about.tiny))
    return torch.ldexp(torch.full_like(value, about.eps), exponent - 1)


class Reader:
    """Reader of the model's parameters from a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, plain: nn.Module) -> None:
        self.checkpoint, self.plain = checkpoint, plain
        self.units = units_of(plain, checkpoint.entries)

    def read(self, name: str) -> Tensor:
        """Return a parameter in fp32.

        Raises:
            UnsupportedModelError: the checkpoint does not hold it.
        """
        unit = self._unit(name)
        read = {key: self.checkpoint.read(self.checkpoint.entries[key]) for key in unit.sources}
        return unit.forward(read, self.plain)[name]

    def encoded(self, name: str, value: Tensor) -> Tensor:
        """Return a parameter's values after encoding them as the checkpoint stores them."""
        unit = self._unit(name)
        values = unit.backward({name: value}, self.plain)
        back = names_back(unit, values, name)
        read = {}
        for key, one in values.items():
            storage = self.checkpoint.entries[back[key]].storage
            read[back[key]] = one if storage == PLAIN else encode(storage, one.contiguous())[2]
        return unit.forward(read, self.plain)[name]

    def storage(self, name: str) -> tuple[str, torch.dtype]:
        """Return storage and dtype of a parameter in the checkpoint."""
        entry = self.checkpoint.entries[self._unit(name).sources[0]]
        return entry.storage, entry.parts[0].dtype

    def _unit(self, name: str) -> Unit:
        if name not in self.units:
            raise UnsupportedModelError(
                f"{self.checkpoint.folder} has no tensor for {name}; accepted: a complete "
                "checkpoint of the adapter's base model"
            )
        return self.units[name]
