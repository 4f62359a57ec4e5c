"""Base and adapter against a merged checkpoint: every weight's delta, expert by expert.

Both checkpoints are read by transformers' conversion towards the model, the other way than a merge
writes, and the sums are PEFT's own over whole parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_patch.after.adapter import Adapter
from moe_patch.after.changes import Added, Change
from moe_patch.after.checkpoint import FP8, MXFP4, PLAIN, Checkpoint
from moe_patch.after.names import Unit, units_of
from moe_patch.after.ties import untied
from moe_patch.errors import UnsupportedModelError

# Largest relative error of one expert that encoding alone makes, with a margin.
LIMITS = {FP8: 0.05, MXFP4: 0.2}


@dataclass(frozen=True)
class Weight:
    """One weight, or one expert of a stacked one.

    Attributes:
        name: the parameter's, with the expert's number in brackets.
        storage: of the result.
        ulps: the largest distance from W + delta, in units in the last place of the result.
        share: of the delta that is there: 1 where it is whole, 0 for another delta.
        tolerance: how far from 1 rounding alone can bring ``share``.
        error: relative, of the result.
    """

    name: str
    storage: str
    ulps: float
    share: float
    tolerance: float
    error: float

    @property
    def passed(self) -> bool:
        """Whether the weight is base plus delta, but for one rounding."""
        if self.storage == PLAIN:
            return self.ulps <= 1
        return self.error <= LIMITS[self.storage] and abs(self.share - 1) <= self.tolerance


def weights(adapter: Adapter, base: Checkpoint, merged: Checkpoint) -> Iterator[Weight]:
    """Compare every parameter that the adapter changes.

    Args:
        adapter: on the base's empty model.
        base, merged: the two checkpoints.

    Raises:
        UnsupportedModelError: a checkpoint lacks a weight of the model.
    """
    readers = [_Reader(one, adapter.plain) for one in (base, merged)]
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
        for expert in _experts(own):
            label = name if expert is None else f"{name}[{expert}]"
            parts = [one if expert is None else one[expert] for one in (before, expected, found)]
            yield _compared(label, storage, dtype, *parts)


def _experts(changes: list[Change]) -> Iterator[int | None]:
    most = max((one.experts for one in changes if isinstance(one, Added)), default=1)
    yield from range(most) if most > 1 else (None,)


def _compared(
    name: str, storage: str, dtype: torch.dtype, before: Tensor, expected: Tensor, found: Tensor
) -> Weight:
    delta, moved, off = expected - before, found - before, found - expected
    size, norm = _norm(delta), _norm(expected)
    share = float((moved.double() * delta.double()).sum()) / size**2 if size else 1.0
    noise = LIMITS.get(storage, 0.0) * norm / (size * math.sqrt(delta.numel())) if size else 0.0
    ulps = 0.0
    if storage == PLAIN:
        ulps = float((off.abs() / ulp(expected, dtype)).max())
    return Weight(name, storage, ulps, share, 0.02 + 6 * noise, _norm(off) / norm if norm else 0.0)


def _norm(value: Tensor) -> float:
    return float(value.double().norm())


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance to the next number of ``dtype``, fp32, at least that of its smallest normal."""
    about = torch.finfo(dtype)
    _, exponent = torch.frexp(value.abs().clamp(min=about.tiny))
    return torch.ldexp(torch.full_like(value, about.eps), exponent - 1)


class _Reader:
    """Parameters of the model, read from a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, plain: nn.Module) -> None:
        self.checkpoint, self.plain = checkpoint, plain
        self.units = units_of(plain, checkpoint.entries)

    def read(self, name: str) -> Tensor:
        """A parameter in fp32.

        Raises:
            UnsupportedModelError: the checkpoint does not hold it.
        """
        unit = self._unit(name)
        read = {key: self.checkpoint.read(self.checkpoint.entries[key]) for key in unit.sources}
        return unit.forward(read, self.plain)[name]

    def storage(self, name: str) -> tuple[str, torch.dtype]:
        """How the checkpoint stores a parameter."""
        entry = self.checkpoint.entries[self._unit(name).sources[0]]
        return entry.storage, entry.parts[0].dtype

    def _unit(self, name: str) -> Unit:
        if name not in self.units:
            raise UnsupportedModelError(
                f"{self.checkpoint.folder} has no tensor for {name}; accepted: a whole checkpoint "
                "of the adapter's base model"
            )
        return self.units[name]
