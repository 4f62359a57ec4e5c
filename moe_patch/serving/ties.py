"""Resolve changes of tied parameters, such as the input and the output embeddings.

PEFT's merge adds deltas to the shared values, so both parameters change. A replaced value
(``modules_to_save``) belongs to one parameter only, and PEFT unties it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch

from moe_patch.serving.adapter import Adapter
from moe_patch.serving.changes import Change, Replaced

Changes = dict[str, list[Change]]


def untied(
    adapter: Adapter, held: Container[str]
) -> tuple[Changes, dict[str, tuple[str, list[Change]]], list[str]]:
    """Assign an adapter's changes to the parameters that a checkpoint holds.

    Args:
        adapter: an adapter, for its changes and its model's ties.
        held: names of the parameters that have tensors in the checkpoint.

    Returns:
        Three values. First, the changes of each parameter that the checkpoint holds. Second, the
        changes of each parameter that now needs its own tensor, with the name of the parameter to
        which it was tied. Third, notes for the user.
    """
    changes: Changes = {}
    apart: dict[str, tuple[str, list[Change]]] = {}
    notes = []
    for group in _groups(adapter, held):
        added, values = _values(adapter, group)
        main, *others = group
        changes.update({one: value for one, value in values.items() if one in held and value})
        if main not in held:
            changes[main] = values[main]
        if any(not _alike(values[main], values[one]) for one in others):
            apart.update({one: (main, values[one]) for one in others if one not in held})
            notes.append(
                f"{' and '.join(group)} no longer share their values, because the adapter holds "
                "one of them in full; tie_word_embeddings is false in the new config"
            )
        elif others and added:
            notes.append(
                f"{' and '.join(group)} share their values, so the merge changes both, as PEFT's "
                "merge does; an adapter trained without ensure_weight_tying changed only one of "
                "them in training"
            )
    return changes, apart, notes


def _values(adapter: Adapter, group: list[str]) -> tuple[list[Change], dict[str, list[Change]]]:
    """Return the changes that a group shares, and all changes of each of its parameters."""
    added = [one for name in group for one in _added(adapter, name)]
    added.sort(key=lambda one: not isinstance(one, Replaced))
    if len(group) > 1 and any(_replaced(adapter, name) for name in group):
        return added, {name: _replaced(adapter, name) or added for name in group}
    return added, {name: [*_replaced(adapter, name), *added] for name in group}


def _groups(adapter: Adapter, held: Container[str]) -> Iterable[list[str]]:
    """Yield each changed parameter with its ties; the one in the checkpoint comes first."""
    seen: set[str] = set()
    for name in adapter.changes:
        first = adapter.aliases.get(name, name)
        if first in seen:
            continue
        seen.add(first)
        group = [first, *(one for one, other in adapter.aliases.items() if other == first)]
        yield sorted(group, key=lambda one: one not in held)


def _added(adapter: Adapter, name: str) -> list[Change]:
    """Return the changes that are written into the shared values of a group."""
    return [one for one in adapter.changes.get(name, []) if not _is_own(one)]


def _replaced(adapter: Adapter, name: str) -> list[Change]:
    return [one for one in adapter.changes.get(name, []) if _is_own(one)]


def _is_own(change: Change) -> bool:
    return isinstance(change, Replaced) and not change.in_place


def _alike(first: list[Change], second: list[Change]) -> bool:
    """Return whether both give the same value: same changes, or equal values in the file."""
    return len(first) == len(second) and all(
        one is two
        or (
            isinstance(one, Replaced)
            and isinstance(two, Replaced)
            and torch.equal(one.value, two.value)
        )
        for one, two in zip(first, second, strict=True)
    )
