"""Shared parts of the tests of special families: a patched model beside an untouched copy."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from moe_patch import patch_model
from tests.support import tiny_models
from tests.support.parity import Run, run_model

LIMIT = 2e-5


def pair(name: str, **over: Any) -> tuple[nn.Module, nn.Module]:
    """A patched model and the same model untouched."""
    reference = tiny_models.build(name, **over)
    return patch_model(copy.deepcopy(reference)), reference


def seeded(model: nn.Module, seq: int = 7) -> Run:
    """Seed the generator and run one training step; its final state is part of the run."""
    run = run_model(model, tiny_models.inputs(model, 2, seq))
    return run | {"rng": torch.get_rng_state().double()}


def only(model: nn.Module, name: str) -> nn.Module:
    """Return the first module of a class."""
    return next(m for m in model.modules() if type(m).__name__ == name)
