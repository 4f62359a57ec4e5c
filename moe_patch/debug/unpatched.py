"""Run patched modules on transformers' own forward for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from moe_patch.errors import PatchStateError
from moe_patch.runtime.module_patch import PATCH_KEY, ModulePatch, patch_of

Model = TypeVar("Model", bound=nn.Module)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def reference(model: Model) -> Iterator[Model]:
    """Run transformers' own forward of every patched block inside a ``with`` block.

    Routers, experts and PEFT's wrappers behave as if the model had never been patched; nothing is
    unbound. Experts use the implementation that the model was configured for. Under checkpointing,
    call backward inside as well, since it runs the forward again. Recorders and replays have no
    effect inside.

    Args:
        model: a patched model, bare or wrapped.

    Yields:
        The same model.

    Raises:
        PatchStateError: the model is not patched, or is already inside such a ``with``.
    """
    touched = [m for m in model.modules() if patch_of(m) is not None]
    if not touched:
        raise PatchStateError(
            f"reference: {type(model).__name__} has no patched MoE block; accepted: a patched "
            "model, outside another `with reference(model)`"
        )
    with paused(touched):
        yield model


@contextmanager
def paused(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Switch off the patches of some modules and restore their experts' configs; then undo that."""
    touched: list[tuple[Any, ModulePatch, Any]] = []
    try:
        for module in modules:
            patch = patch_of(module)
            if patch is None:
                continue
            ours = module.__dict__.get("config")
            touched.append((module, patch, ours))
            patch.active = False
            if "config" in patch.saved:
                module.config = patch.saved["config"]
        yield
    finally:
        for module, patch, ours in touched:
            # unpatch_model may have been called inside.
            if module.__dict__.get(PATCH_KEY) is not patch:
                continue
            patch.active = True
            if "config" in patch.saved:
                module.config = ours


@contextmanager
def unobserved(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Detach hooks, recorders and probes from some modules, so that calls leave no trace."""
    undo: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in modules:
            for name in HOOKS:
                undo.append((module.__dict__, name, module.__dict__[name]))
                module.__dict__[name] = OrderedDict()
            if (patch := patch_of(module)) is not None:
                for name in ("taps", "probe"):
                    undo.append((patch.__dict__, name, patch.__dict__[name]))
                    patch.__dict__[name] = None
        yield
    finally:
        for owner, name, value in undo:
            owner[name] = value
