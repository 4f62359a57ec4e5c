"""List the MoE model types of the installed transformers by reading its source text.

Only transformers' own table of model types is imported, so releases newer than this library work
too. A model type counts as MoE if its config class declares a field about experts, or holds a
sub-config that does.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
from dataclasses import dataclass, field
from pathlib import Path

DECORATOR = "use_experts_implementation"


@dataclass
class ModelType:
    """One MoE model type.

    Attributes:
        name: transformers' model_type.
        folder: the model folder whose configuration file defines it.
        own: whether the config itself describes experts.
        towers: model types of the sub-configs that are MoE.
    """

    name: str
    folder: str
    own: bool
    towers: list[str] = field(default_factory=list)


@dataclass
class _Config:
    folder: str
    model_type: str | None
    own: bool
    bases: list[str]
    subs: list[str]


@functools.cache
def installed_release(package: str) -> str:
    """Return the installed release of a package, read from its metadata once per process."""
    return importlib.metadata.version(package)


def models_folder() -> Path:
    """Return transformers' folder of models."""
    import transformers

    return Path(transformers.__file__).parent / "models"


def modeling_file(folder: str) -> Path | None:
    """Return the modeling file of a model folder, or None if it has none."""
    path = models_folder() / folder / f"modeling_{folder}.py"
    return path if path.exists() else None


def is_decorated(folder: str) -> bool:
    """Return whether transformers' registry of implementations covers a folder's experts."""
    path = modeling_file(folder)
    return path is not None and f"@{DECORATOR}" in _text(path)


@functools.cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def moe_model_types() -> dict[str, ModelType]:
    """Return every MoE model type of the installed transformers by name."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    configs = _configs()
    by_type = {c.model_type: c for c in configs.values() if c.model_type is not None}

    def towers(config: _Config, seen: frozenset[str]) -> list[str]:
        found = []
        for sub in config.subs:
            tower = configs.get(sub) or by_type.get(sub)
            if tower is None or sub in seen:
                continue
            if tower.own and tower.model_type is not None:
                found.append(tower.model_type)
            else:
                found += towers(tower, seen | {sub})
        return found

    types = {}
    for name in CONFIG_MAPPING_NAMES:
        config = by_type.get(name)
        if config is None:
            continue
        inside = [] if config.own else towers(config, frozenset({name}))
        if config.own or inside:
            types[name] = ModelType(name, config.folder, config.own, sorted(set(inside)))
    return types


def _configs() -> dict[str, _Config]:
    """Return config classes by name, from all configuration files that may describe experts."""
    configs: dict[str, _Config] = {}
    for path in sorted(models_folder().glob("*/configuration_*.py")):
        text = path.read_text(encoding="utf-8")
        if "expert" not in text and "sub_configs" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                configs[node.name] = _config(node, path.parent.name)
    for config in configs.values():
        _inherit(config, configs)
    for config in configs.values():
        parts = [configs[sub] for sub in config.subs if sub in configs]
        # A part without a model type of its own (DBRX's ffn_config) describes its holder.
        config.own = config.own or any(part.own and part.model_type is None for part in parts)
    return configs


def _config(node: ast.ClassDef, folder: str) -> _Config:
    config = _Config(folder, None, False, [ast.unparse(base) for base in node.bases], [])
    for statement in node.body:
        for name, value in _assigned(statement):
            if "expert" in name:
                config.own = True
            elif name == "model_type" and isinstance(value, ast.Constant):
                config.model_type = str(value.value)
            elif name in ("sub_configs", "sub_configs_defaults") and value is not None:
                config.subs += _named(value)
    return config


def _assigned(statement: ast.stmt) -> list[tuple[str, ast.expr | None]]:
    """Return a config's fields: class attributes, and parameters of an old-style __init__."""
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [(statement.target.id, statement.value)]
    if isinstance(statement, ast.Assign):
        return [(t.id, statement.value) for t in statement.targets if isinstance(t, ast.Name)]
    if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
        return [(argument.arg, None) for argument in statement.args.args]
    return []


def _named(value: ast.expr) -> list[str]:
    """Return the classes and model types named by the values of a dictionary of sub-configs."""
    values = value.values if isinstance(value, ast.Dict) else [value]
    found = []
    for entry in values:
        for node in ast.walk(entry):
            if isinstance(node, ast.Name):
                found.append(node.id)
            elif isinstance(node, ast.keyword) and node.arg == "model_type":
                found.append(re.sub(r"['\"]", "", ast.unparse(node.value)))
    return found


def _inherit(config: _Config, configs: dict[str, _Config]) -> None:
    """Copy what a config class inherits from a base class in another config file."""
    for base in config.bases:
        parent = configs.get(base)
        if parent is not None:
            config.own = config.own or parent.own
            config.subs = config.subs or parent.subs
