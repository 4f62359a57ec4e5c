"""Generate parts of the pages in docs/: options from PatchConfig, targets from lora_targets.

    python scripts/docs.py            print the names of outdated pages; status 1 if there are any
    python scripts/docs.py --write    write them

scripts/families.py --table writes docs/families.md; scripts/compat/compat.py --table writes
docs/compatibility.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import transformers

from moe_patch import PatchConfig, UnsupportedModelError, lora_targets
from moe_patch.train import config as train_config
from tests.support import tiny_models

DOCS = Path(__file__).parents[1] / "docs"
START, END = "<!-- generated: scripts/docs.py -->", "<!-- end of generated -->"


def described(cls: type) -> dict[str, str]:
    """Map each field to its text in the class's "Attributes:" section, as a line of Markdown."""
    text = inspect.getdoc(cls) or ""
    section = text.split("Attributes:\n", 1)[1]
    entries = re.findall(
        r"^    (\w[\w, ]*): (.*?)(?=^    \w|\Z)", section, re.MULTILINE | re.DOTALL
    )
    found = {}
    for names, words in entries:
        line = re.sub(r"\s+", " ", words).strip().replace("``", "`")
        line = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", line)
        line = re.sub(r'"(\w+)"', r"`\1`", line)
        found |= {name.strip(): line for name in names.split(",")}
    return found


def yaml_value(value: object) -> str:
    """Return a default as it is written in a YAML file."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value)}`" if isinstance(value, tuple) else f"`{value}`"


def options() -> str:
    """Return every option of PatchConfig: name, default, meaning."""
    words = described(PatchConfig)
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(PatchConfig):
        rows.append(f"| `{field.name}` | {yaml_value(field.default)} | {words[field.name]} |")
    return "\n".join(rows)


def training_file() -> str:
    """Return a training file's keys, as its module lists them, and the keys of its mappings."""
    head = inspect.getdoc(train_config) or ""
    keys = "\n".join(line[4:] for line in head.splitlines() if line.startswith("    "))
    parts = ["```text", keys, "```"]
    for cls, name in ((train_config.ModelConfig, "model"), (train_config.DataConfig, "data")):
        words = described(cls)
        parts += ["", f"| `{name}:` | default | meaning |", "|---|---|---|"]
        for field in dataclasses.fields(cls):
            required = (
                field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            )
            default = "required" if required else yaml_value(field.default)
            if field.default is None or field.default_factory is not dataclasses.MISSING:
                default = ""
            key = "anything else" if field.name == "overrides" else f"`{field.name}`"
            parts.append(f"| {key} | {default} | {words[field.name]} |")
    return "\n".join(parts)


def targets() -> str:
    """Return the targets of lora_targets by family and part; equal families share a row."""
    kinds: dict[tuple[str, ...], set[str]] = {}
    for name in tiny_models.patchable():
        model = tiny_models.build(name)
        cells = tuple(_part(model, part) for part in ("experts", "router", "shared"))
        kinds.setdefault(cells, set()).add(tiny_models.config(name).model_type)
    rows = ["| families | experts | router | shared expert |", "|---|---|---|---|"]
    for cells, names in sorted(kinds.items(), key=lambda kind: sorted(kind[1])):
        rows.append(f"| {', '.join(f'`{n}`' for n in sorted(names))} | {' | '.join(cells)} |")
    return "\n".join([f"As of transformers {transformers.__version__}.", "", *rows])


def _part(model: object, part: str) -> str:
    chosen = {each: each == part for each in ("experts", "router", "shared", "attention")}
    try:
        found = lora_targets(model, **chosen)
    except UnsupportedModelError:
        return ""
    modules = [f"`{name}` (module)" for name in found["target_modules"]]
    return ", ".join([*(f"`{name}`" for name in found["target_parameters"]), *modules])


# Page -> functions that make its generated parts, in their order on the page.
PARTS: dict[str, tuple[Callable[[], str], ...]] = {
    "yaml.md": (options, training_file),
    "lora.md": (targets,),
}


def generated(text: str, parts: tuple[Callable[[], str], ...]) -> str:
    """Return a page's text with its generated parts replaced."""
    before, *pieces = text.split(START)
    if len(pieces) != len(parts):
        raise SystemExit(f"{len(pieces)} generated parts on a page, expected {len(parts)}")
    for make, piece in zip(parts, pieces, strict=True):
        before += f"{START}\n\n{make()}\n\n{END}{piece.split(END, 1)[1]}"
    return before


def main() -> int:
    """Compare or write the pages."""
    parser = argparse.ArgumentParser(description="The generated parts of docs/.")
    parser.add_argument("--write", action="store_true", help="write what is not current")
    args = parser.parse_args()
    stale = []
    for name, parts in PARTS.items():
        page = DOCS / name
        old = page.read_text(encoding="utf-8")
        new = generated(old, parts)
        if new != old:
            stale.append(name)
            if args.write:
                page.write_text(new, encoding="utf-8")
    for name in stale:
        print(f"docs/{name}: {'written' if args.write else 'not current; --write'}")
    return 1 if stale and not args.write else 0


if __name__ == "__main__":
    sys.exit(main())
