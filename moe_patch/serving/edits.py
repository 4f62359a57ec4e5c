"""Apply an adapter to a checkpoint: compute each changed tensor, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from moe_patch.errors import UnsupportedModelError
from moe_patch.serving.adapter import Adapter
from moe_patch.serving.changes import Added, Change
from moe_patch.serving.checkpoint import Checkpoint, Entry
from moe_patch.serving.names import Unit, by_expert, names_back, units_of
from moe_patch.serving.ties import untied

# Bytes of fp32 in one step over a stacked parameter; small, so that the allocator reuses them.
_STEP = 1 << 24
# Number of parameters whose deltas are cached, because an expert's projections alternate.
_KEPT = 4


class Edits:
    """The changed tensors of a checkpoint.

    Attributes:
        extra: tensors that are tied in the base and untied in the result.
        notes: sentences for the user.
    """

    def __init__(self, checkpoint: Checkpoint, adapter: Adapter, device: torch.device) -> None:
        """Find the tensors of every change, and try each conversion on the meta device.

        Raises:
            UnsupportedModelError: the checkpoint has no tensor for a change.
        """
        self.checkpoint, self.device = checkpoint, device
        self.plain = adapter.plain
        self.units = units_of(self.plain, checkpoint.entries)
        self._changes, self._extra_from, self.notes = untied(adapter, self.units)
        self.extra = {name: self._new(name, main) for name, (main, _) in self._extra_from.items()}
        self._made: dict[str, tuple[int, dict[str, Tensor]]] = {}
        self._of_entry: dict[str, Unit] = {}
        for name in self._changes:
            self._rehearse(name)

    @property
    def changed(self) -> list[str]:
        """Names of the checkpoint tensors that change."""
        return list(self._of_entry)

    def values(self, entry: Entry) -> Iterator[tuple[int, Tensor]]:
        """Yield the new value of a tensor in fp32, whole or in steps along its first axis.

        Yields:
            The first row of the step, and its values.
        """
        if entry.name in self._extra_from:
            name, changes = self._extra_from[entry.name]
            value = self._read(self.checkpoint.entries[self.units[name].sources[0]])
            yield 0, _applied(value, changes)
            return
        unit = self._of_entry[entry.name]
        stacked = self._stacked(unit)
        if stacked is None:
            yield 0, self._whole(unit)[entry.name]
        elif unit.converter is None:
            for first in range(0, stacked.experts, _step(stacked, entry.shape)):
                rows = _rows(stacked, entry.shape, first)
                delta = stacked.delta(rows, self.device)
                yield rows.start, self._read(entry, rows).add_(delta)
        else:
            delta = self._of_expert(unit, stacked, entry.name)
            yield 0, self._read(entry).add_(delta)

    def _new(self, name: str, main: str) -> Entry:
        """Return the entry of a tensor that was tied to another one."""
        base = self.checkpoint.entries[self.units[main].sources[0]]
        return replace(base, name=name, parts=(replace(base.parts[0], name=name),))

    def _read(self, entry: Entry, rows: slice | None = None) -> Tensor:
        """Return a copy of a weight, or of rows of it, in fp32 on the device."""
        value = self.checkpoint.read(entry, rows).to(self.device)
        # Without a conversion the value is the file's mapped memory, which must not be written.
        return value.clone() if value.dtype == entry.parts[0].dtype else value

    def _stacked(self, unit: Unit) -> Added | None:
        """Return the change of a unit that can be applied expert by expert, or None."""
        changes = self._changes.get(unit.target, [])
        if len(unit.targets) > 1 or len(changes) != 1 or not isinstance(changes[0], Added):
            return None
        added = changes[0]
        if added.experts == 1 or not (unit.converter is None or by_expert(unit, added.experts)):
            return None
        return added

    def _of_expert(self, unit: Unit, added: Added, key: str) -> Tensor:
        """Return one expert's delta for one tensor; compute and cache all experts of its step."""
        expert = next(keys.index(key) for keys in unit.keys.values() if key in keys)
        shape = self.plain.get_parameter(unit.target).shape
        rows = _rows(added, shape, expert)
        made = self._made.get(unit.target)
        if made is None or made[0] != rows.start:
            self._forget(unit.target)
            delta = added.delta(rows, self.device)
            made = rows.start, self._split(unit, delta, rows)
            self._made[unit.target] = made
        return made[1][key]

    def _forget(self, target: str) -> None:
        """Drop the cached values of a parameter, and of the oldest one if the cache is full."""
        self._made.pop(target, None)
        if len(self._made) >= _KEPT:
            del self._made[next(iter(self._made))]

    def _split(self, unit: Unit, delta: Tensor, rows: slice) -> dict[str, Tensor]:
        """Return some experts' delta by tensor name; the reverse conversion numbers them from 0."""
        found = unit.backward({unit.target: delta}, self.plain)
        back = names_back(unit, found, unit.target)
        first = {back[name]: value for name, value in found.items()}
        own = range(rows.stop - rows.start)
        return {keys[rows.start + i]: first[keys[i]] for keys in unit.keys.values() for i in own}

    def _whole(self, unit: Unit) -> dict[str, Tensor]:
        if unit.target not in self._made:
            self._forget(unit.target)
            read = {key: self._read(self.checkpoint.entries[key]) for key in unit.sources}
            values = unit.forward(read, self.plain)
            del read
            for name in unit.targets:
                values[name] = _applied(values[name], self._changes.get(name, []))
            found = unit.backward(values, self.plain)
            back = names_back(unit, found, unit.target)
            self._made[unit.target] = 0, {back[name]: value for name, value in found.items()}
        made = self._made[unit.target][1]
        if len(unit.sources) == 1:
            self._forget(unit.target)
        return made

    def _rehearse(self, name: str) -> None:
        if name not in self.units:
            raise UnsupportedModelError(
                f"{self.checkpoint.folder} has no tensor for {name}, which the adapter changes; "
                "accepted: the base that the adapter was trained on"
            )
        unit = self.units[name]
        entries = {key: self.checkpoint.entries[key] for key in unit.sources}
        for entry in entries.values():
            if not entry.is_number:
                self.checkpoint.read(entry)
        empty = {key: torch.empty(one.shape, device="meta") for key, one in entries.items()}
        values = unit.forward(empty, self.plain)
        there = self.plain.state_dict()
        for target in unit.targets:
            wanted = there[target].shape
            if values[target].shape != wanted:
                raise UnsupportedModelError(
                    f"{self.checkpoint.folder}: the tensors of {target} give shape "
                    f"{tuple(values[target].shape)}, but config.json gives {tuple(wanted)}; "
                    "accepted: a complete checkpoint that matches its config.json"
                )
        names_back(unit, unit.backward(values, self.plain), name)
        self._of_entry.update(dict.fromkeys(unit.sources, unit))


def _step(added: Added, shape: tuple[int, ...]) -> int:
    """Return the experts of one step: at least 2, as PEFT treats 1 as a layer without experts."""
    one = 4 * torch.Size(shape).numel() // added.experts
    return max(2, _STEP // max(one, 1))


def _rows(added: Added, shape: tuple[int, ...], expert: int) -> slice:
    """Return the slice of experts in the step that holds this expert."""
    n = _step(added, shape)
    first = expert // n * n
    return slice(min(first, added.experts - 2), min(first + n, added.experts))


def _applied(value: Tensor, changes: list[Change]) -> Tensor:
    for change in changes:
        value = change.apply(value)
    return value
