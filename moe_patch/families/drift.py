"""Detect changes in transformers' classes since entries were checked, by hashes of their source.

hashes.json holds, per model folder and class, the hashes of the sources that entries were checked
with and the transformers release of each. Hashes cover the classes of a modeling file that entries
name, and everything in it that the source of a router or experts class mentions.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moe_patch.families.installed import modeling_file, moe_model_types
from moe_patch.runtime.spec import FamilySpec

STORE = Path(__file__).with_name("hashes.json")
Hashes = dict[str, dict[str, str]]


class Difference(NamedTuple):
    """One difference to look at: ``kind`` is "new", "changed" or "gone"."""

    kind: str
    family: str
    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.family}: {self.what} ({self.file})"


def current(specs: tuple[FamilySpec, ...]) -> Hashes:
    """Map folder and class to the hash of its source, for entries that the release has."""
    found: Hashes = {}
    for spec in specs:
        path = modeling_file(spec.module) if spec.module is not None else None
        if path is not None and spec.module is not None:
            sources = _sources(path)
            names = _with_parts(spec, sources)
            hashes = {name: source_hash(sources[name]) for name in names if name in sources}
            found.setdefault(spec.module, {}).update(hashes)
    return found


def stored() -> dict[str, dict[str, dict[str, str]]]:
    """Map folder, class and hash to the transformers release first checked with it."""
    return json.loads(STORE.read_text(encoding="utf-8"))


def accept(specs: tuple[FamilySpec, ...], release: str) -> None:
    """Add the installed sources to hashes.json as checked."""
    store = stored() if STORE.exists() else {}
    for folder, hashes in current(specs).items():
        for name, value in hashes.items():
            store.setdefault(folder, {}).setdefault(name, {}).setdefault(value, release)
    lines = [f"{json.dumps(k)}: {json.dumps(store[k], sort_keys=True)}" for k in sorted(store)]
    STORE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def differences(
    specs: tuple[FamilySpec, ...], later: tuple[FamilySpec, ...] = ()
) -> list[Difference]:
    """Return what changed since the entries were checked, and families without an entry.

    Args:
        specs: the registered entries.
        later: entries for a later release; their families are not new.
    """
    now = current(specs)
    gone = [difference for spec in specs for difference in _gone(spec, now)]
    named = {name for spec in (*specs, *later) for name in spec.model_types}
    return [*gone, *_changed(now), *_new(named)]


def _gone(spec: FamilySpec, now: Hashes) -> Iterator[Difference]:
    path = modeling_file(spec.module) if spec.module is not None else None
    if path is None or spec.module is None:
        return
    for role in ("router", "block", "experts"):
        name = getattr(spec, role)
        if name is not None and name not in now[spec.module]:
            what = f"{role} class {name} is missing"
            yield Difference("gone", spec.model_types[0], str(path), what)


def _changed(now: Hashes) -> Iterator[Difference]:
    known = stored()
    for folder, hashes in now.items():
        for name, value in hashes.items():
            if value not in known.get(folder, {}).get(name, {}):
                what = f"source of {name} is not one that the entry was checked with"
                yield Difference("changed", folder, str(modeling_file(folder)), what)


def _new(named: set[str]) -> Iterator[Difference]:
    for model_type in moe_model_types().values():
        if model_type.own and model_type.name not in named:
            file = str(modeling_file(model_type.folder) or model_type.folder)
            yield Difference("new", model_type.name, file, "has experts and no entry")


@functools.cache
def _sources(path: Path) -> dict[str, str]:
    """Return the source text of every class and function of a file, by name."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    return {
        node.name: "\n".join(lines[_first_line(node) - 1 : node.end_lineno])
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }


def _first_line(node: ast.ClassDef | ast.FunctionDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _with_parts(spec: FamilySpec, sources: dict[str, str]) -> list[str]:
    """Return an entry's classes, and names in that file that its router or experts mention."""
    names = [name for name in (spec.router, spec.experts, spec.block) if name is not None]
    queue = [name for name in (spec.router, spec.experts) if name is not None]
    while queue:
        body = sources.get(queue.pop(), "")
        parts = sorted(set(re.findall(r"\b\w+\b", body)) & set(sources) - set(names))
        names += parts
        queue += parts
    return names


def source_hash(source: str) -> str:
    """Hash the source, ignoring comments and blank lines."""
    lines = [line.rstrip() for line in source.splitlines()]
    kept = [line for line in lines if line and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]
