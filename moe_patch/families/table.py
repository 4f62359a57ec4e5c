"""Write the table of docs/families.md from the registry and the installed transformers."""

from __future__ import annotations

import ast
from pathlib import Path

from moe_patch.families.installed import DECORATOR, modeling_file, moe_model_types
from moe_patch.runtime.spec import Arg, Const, FamilySpec, Layout

START, END = "<!-- families:start -->", "<!-- families:end -->"
HEAD = ("model type", "router", "bias", "groups", "shared expert", "experts' layout", "tier")


def table(specs: tuple[FamilySpec, ...], release: str) -> str:
    """Return Markdown: a line of counts, then one row per entry, ordered by model types."""
    wrappers = _wrappers()
    rows = [_row(spec, wrappers) for spec in sorted(specs, key=lambda s: s.model_types)]
    rows = list(dict.fromkeys(rows))
    tiers = [row[-1] for row in rows]
    counts = ", ".join(f"{tiers.count(t)} {t}" for t in ("full", "experts", "refused"))
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEAD, ["---"] * len(HEAD), *rows)]
    return "\n".join([f"{len(rows)} entries ({counts}), as of transformers {release}.", "", *lines])


def insert(text: str, content: str) -> str:
    """Return a document with the text between its markers replaced."""
    before, rest = text.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n{content}\n{END}{after}"


def _row(spec: FamilySpec, wrappers: dict[str, list[str]]) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`" for name in spec.model_types)
    inside = sorted(
        {w for name in spec.model_types for w in wrappers.get(name, [])} - {*spec.model_types}
    )
    if inside:
        names += " (in " + ", ".join(f"`{name}`" for name in inside) + ")"
    if spec.tier == "refused":
        return (names, "transformers", "", "", "", "", "refused")
    return (
        names,
        _router(spec),
        _bias(spec),
        _groups(spec),
        _shared(spec),
        _layout(spec),
        spec.tier,
    )


def _wrappers() -> dict[str, list[str]]:
    """Map each tower's model type to the model types that hold it."""
    found: dict[str, list[str]] = {}
    for model_type in moe_model_types().values():
        for tower in model_type.towers:
            found.setdefault(tower, []).append(model_type.name)
    return found


def _router(spec: FamilySpec) -> str:
    name = spec.decided_by
    return name if name == "transformers" else f"`{name}`"


def _bias(spec: FamilySpec) -> str:
    if spec.bias is None:
        return ""
    where = "block" if isinstance(spec.bias, Arg) else "router"
    return f"{where}, on logits" if _constant(spec, "bias_on") == "logits" else where


def _groups(spec: FamilySpec) -> str:
    if "groups" not in spec.params:
        return ""
    best = (
        "maximum" if _constant(spec, "group_score") is None and spec.bias is None else "top-2 sum"
    )
    return f"{best}, others 0" if _constant(spec, "group_fill") == 0.0 else best


def _shared(spec: FamilySpec) -> str:
    if spec.shared_gate:
        return f"`{spec.shared}` × gate"
    return f"`{spec.shared or spec.shared_by_block}`" if spec.shared or spec.shared_by_block else ""


def _constant(spec: FamilySpec, name: str) -> object:
    source = spec.params.get(name)
    return source.value if isinstance(source, Const) else None


def _layout(spec: FamilySpec) -> str:
    layout = spec.layout or _decorated_layout(spec)
    if layout is None:
        return "in the block"
    words = ["gate and up" if layout.has_gate else "up only"]
    words += ["interleaved"] if not layout.is_concatenated else []
    words += ["transposed"] if layout.is_transposed else []
    words += ["biases"] if layout.has_bias else []
    words += ["norm after"] if layout.has_post_expert_norm else []
    return ", ".join(words)


def _decorated_layout(spec: FamilySpec) -> Layout | None:
    """Return the layout that transformers' decorator declares on the entry's experts class."""
    path = modeling_file(spec.module) if spec.module is not None else None
    if path is None or spec.experts is None:
        return None
    return _layout_in(path, spec.experts)


def _layout_in(path: Path, experts: str) -> Layout | None:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == experts:
            for decorator in node.decorator_list:
                if DECORATOR in ast.unparse(decorator):
                    keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
                    return Layout(**{k.arg: ast.literal_eval(k.value) for k in keywords if k.arg})
    return None
