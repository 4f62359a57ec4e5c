"""Observe the calls of patched modules for ``shadow_check`` and ``debug_nan``.

A probed module has a :class:`Probe` in its patch (``ModulePatch.probe``). In all other
modules it is None, and checking for that is the only cost of a forward. The experts module is
probed, or the whole block if its family calls experts otherwise than transformers; ``shadow_check``
also probes the router.

The step number alone decides which block is compared in which step. No state is therefore shared
between modules, copies of a model work, and data-parallel ranks compare the same block.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.config import PatchConfig
from moe_patch.debug import nan_file, shadow
from moe_patch.errors import MoePatchError
from moe_patch.runtime.module_patch import patch_of
from moe_patch.runtime.taps import eagerly, inside_backward

logger = logging.getLogger("moe_patch")


@dataclass
class FirstNan:
    """Shared by the probes of one model: the file of the first non-finite block, once written."""

    file: Path | None = None


@dataclass
class Probe:
    """Observes every call of one module.

    Attributes:
        path: the block's path.
        role: "experts", "block" or "router".
        model_config: the model's config, for modules that keep none.
        index, blocks: position of this block, and the number of blocks.
        every: ``shadow_check``; 0 compares nothing.
        nan: state that ``debug_nan`` shares between modules, or None.
        folder: folder of the debug_nan file.
        calls: training forwards so far, without recomputes.
        results: the comparisons made.
    """

    path: str
    role: str
    model_config: Any
    index: int
    blocks: int
    every: int = 0
    nan: FirstNan | None = None
    folder: str = "."
    calls: int = 0
    results: list[shadow.Comparison] = field(default_factory=list)
    eagerly: Callable[..., Any] = field(default_factory=eagerly, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the compiler's wrapper, which cannot be pickled."""
        return {key: value for key, value in self.__dict__.items() if key != "eagerly"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, eagerly=eagerly())

    def run(self, call: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Run ``call(*args, **kwargs)`` and observe it, outside compiled code (one graph break)."""
        return self.eagerly(self._run, call, module, args, kwargs)

    def _run(self, call: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        # Copy before the call, because some routers write to their input.
        due = self._due(module)
        before = _copies(args) if due else args
        out = call(*args, **kwargs)
        if self.nan is not None and self.nan.file is None:
            self._look_for_nan(module, args, out)
        if due:
            result = shadow.compare(self.path, self.role, self.calls, module, before, kwargs)
            self.results.append(result)
            logger.log(logging.INFO if result.within else logging.WARNING, "%s", result)
        return out

    def _due(self, module: nn.Module) -> bool:
        """Return whether this call is the one that its window of steps compares."""
        # Skip recomputes, which are no new steps, and inference mode, where autograd fails.
        if inside_backward() or torch.is_inference_mode_enabled():
            return False
        if not (self.every and module.training):
            return False
        window, step = divmod(self.calls, self.every)
        self.calls += 1
        drawn = random.Random(window)
        return (step, self.index) == (drawn.randrange(self.every), drawn.randrange(self.blocks))

    def _look_for_nan(self, module: nn.Module, args: tuple, out: Any) -> None:
        first = out[0] if isinstance(out, tuple) else out
        if bool(torch.isfinite(first).all()):
            return
        assert self.nan is not None
        self.nan.file = file = nan_file.file_of(self)
        found = f"{self.path} ({type(module).__name__}): the first block whose output is not finite"
        try:
            nan_file.write(self, module, args, file)
        except (OSError, MoePatchError) as error:
            # A full disk must not end the user's training step.
            logger.error("moe_patch: %s; its call cannot be saved: %s", found, error)
            return
        logger.error(
            "moe_patch: %s; its input, ids and weights are in %s: run `python -m moe_patch replay "
            "%s`",
            found,
            file,
            file,
        )


def _copies(args: tuple) -> tuple:
    return tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args)


def attach(
    model: nn.Module, watched: Mapping[str, Sequence[tuple[str, nn.Module]]], config: PatchConfig
) -> None:
    """Attach probes to modules; log once which blocks cannot be probed.

    Args:
        model: the patched model.
        watched: roles and modules to probe, by the block's path; empty if a block cannot be probed.
        config: has ``shadow_check`` or ``debug_nan``.
    """
    nan = FirstNan() if config.debug_nan else None
    kept = [path for path, modules in watched.items() if modules]
    homeless: list[str] = []
    for index, path in enumerate(kept):
        make = functools.partial(
            Probe,
            path,
            model_config=_config_above(model, path),
            index=index,
            blocks=len(kept),
            every=config.shadow_check,
            folder=config.debug_dir,
        )
        for role, module in watched[path]:
            patch = patch_of(module)
            if patch is None or patch.probe is not None:
                continue
            patch.probe = make(role)
            if role == "router" or nan is None:
                continue
            if "config" in patch.saved or patch.probe.model_config is not None:
                patch.probe.nan = nan
            else:
                homeless.append(path)
    _name(
        "shadow_check and debug_nan", [path for path in watched if path not in kept],
        "the family calls its experts in its own way",
    )  # fmt: skip
    _name("debug_nan", homeless, "no transformers model around them has the config for its file")


def _name(options: str, paths: list[str], why: str) -> None:
    if paths:
        logger.warning("moe_patch: %s leave out %s: %s", options, ", ".join(paths), why)


def _config_above(model: nn.Module, path: str) -> Any:
    """Return the config of the innermost transformers model around a block, or None."""
    from transformers import PreTrainedModel

    while path:
        path = path.rpartition(".")[0]
        around = model.get_submodule(path)
        if isinstance(around, PreTrainedModel):
            return around.config
    return None
