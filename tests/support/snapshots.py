"""Snapshot of a model, entry by entry, to prove that an operation left it unchanged.

    before = snapshot(model)
    ...
    assert_unchanged(before, snapshot(model))

Entries of every module's ``__dict__`` are held by reference and compared with ``is``, one level
into dictionaries (parameters, buffers, children, hooks), order included. Configs are compared by
content as well, classes by the identity of their attributes.
"""

from __future__ import annotations

import copy
import sys
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_patch import patch_model, patch_report, unpatch_model
from tests.support.numerics import assert_close
from tests.support.tiny_models import hidden_output


class ModuleState(NamedTuple):
    """One module: itself, its class, its ``__dict__`` and the content of its config."""

    module: nn.Module
    cls: type
    entries: dict[str, Any]
    config: dict[str, Any] | None


def snapshot(model: nn.Module) -> dict[str, ModuleState]:
    """Every module of a model by path."""
    return {path: _state(module) for path, module in model.named_modules()}


def _state(module: nn.Module) -> ModuleState:
    entries = {k: dict(v) if isinstance(v, dict) else v for k, v in module.__dict__.items()}
    config = module.__dict__.get("config")
    content = None if config is None else copy.deepcopy(vars(config))
    return ModuleState(module, type(module), entries, content)


def assert_unchanged(before: dict[str, ModuleState], after: dict[str, ModuleState]) -> None:
    """Fail on the first module, entry or config value that differs."""
    assert list(before) == list(after), "module paths changed"
    for path, old in before.items():
        new = after[path]
        assert old.module is new.module, f"{path}: another module"
        assert old.cls is new.cls, f"{path}: class {new.cls.__name__}, was {old.cls.__name__}"
        assert list(old.entries) == list(new.entries), (
            f"{path}: entries {set(old.entries) ^ set(new.entries)}"
        )
        for key, value in old.entries.items():
            assert _same(value, new.entries[key]), (
                f"{path}.{key}: {new.entries[key]!r}, was {value!r}"
            )
        assert old.config == new.config, f"{path}.config changed"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(a[k] is b[k] for k in a)
    if isinstance(
        a, MethodType
    ):  # accelerate keeps bound methods; a new one with equal parts counts as equal
        return isinstance(b, MethodType) and a.__func__ is b.__func__ and a.__self__ is b.__self__
    return a is b


def tensors(model: nn.Module) -> list[tuple[str, tuple[int, ...], torch.dtype, int, int]]:
    """Return state_dict as (key, shape, dtype, address, version), equal if not moved or written."""
    return [
        (k, tuple(t.shape), t.dtype, t.data_ptr(), t._version)
        for k, t in model.state_dict().items()
    ]


def class_attributes(model: nn.Module) -> dict[type, dict[str, Any]]:
    """Return the attributes of every class of a model's modules, base classes included."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    return {cls: dict(vars(cls)) for cls in classes if cls is not object}


def module_globals(*names: str) -> dict[str, dict[str, Any]]:
    """The top-level names of imported Python modules."""
    return {name: dict(vars(sys.modules[name])) for name in names}


def assert_same_attributes(
    before: dict[Any, dict[str, Any]], after: dict[Any, dict[str, Any]]
) -> None:
    """Fail on the first class or Python module whose attributes are other objects than before."""
    for owner, old in before.items():
        assert old.keys() == after[owner].keys(), f"{owner}: {old.keys() ^ after[owner].keys()}"
        for key, value in old.items():
            assert after[owner][key] is value, f"{owner}.{key} was replaced"


def experts_setting(model: Any) -> list[str | None]:
    """The experts implementation of a model's config, and of each config inside it.

    transformers has a method for it from 5.16 on.
    """
    inner = [getattr(model.config, name, None) for name in model.config.sub_configs]
    return [c._experts_implementation for c in (model.config, *inner) if c is not None]


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a model's logits (hidden states without a head) in eval mode; keep training flags.

    The first forward of a transformers model installs permanent hooks that cannot be pickled, so
    snapshots are taken after it and pickles before it.
    """
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            out = model(**batch)
            return (out.logits if "logits" in out else hidden_output(out)).clone()
    finally:
        for module, training in flags.items():
            module.training = training


def assert_patched_stretch_unseen(model, batch) -> None:
    """Expect equal losses of a training with and without a patched stretch."""
    twin, curves = copy.deepcopy(model), []
    for each, patched_steps in ((model, range(3, 6)), (twin, ())):
        ema = torch.optim.swa_utils.AveragedModel(each)
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-3)
        curve = []
        for step in range(9):
            if step in patched_steps and not patch_report(each):
                patch_model(each)
            elif step not in patched_steps and patch_report(each):
                unpatch_model(each)
            optimizer.zero_grad()
            loss = each(**batch).loss
            loss.backward()
            optimizer.step()
            ema.update_parameters(each)
            curve.append(loss.detach())
        curves.append([torch.stack(curve), logits(ema.module, batch)])
    for found, wanted in zip(*curves, strict=True):
        assert_close(found, wanted, 1e-4)
