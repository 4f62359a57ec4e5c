"""Models, traces and steps for the tests of record_routing and replay_routing."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from moe_patch import patch_model, record_routing, replay_routing
from moe_patch.signals.trace import RoutingTrace
from tests.support import tiny_models
from tests.support.numerics import assert_bits


def patched(model_type: str = "qwen3_moe", **options: Any) -> Any:
    return patch_model(tiny_models.build(model_type, **options), self_check=False)


def traced(model: Any, batch: dict[str, Tensor], weights: bool = False) -> RoutingTrace:
    with record_routing(model) as capture, torch.no_grad():
        model(**batch)
    return capture.trace(weights)


def step(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss = tiny_models.loss(model(**batch))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def check_own_routing(model: Any, batch: dict[str, Tensor]) -> None:
    """Replay the model's own routing; check that loss and gradients keep their bits."""
    expected = step(model, batch)
    for weights in (False, True):
        trace = traced(model, batch, weights)
        with replay_routing(model, trace):
            found = step(model, batch)
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert_bits(mine, theirs)


def other_experts(trace: RoutingTrace, by: int = 1) -> RoutingTrace:
    """Increment every id, to prescribe experts that the routers did not choose."""
    return dataclasses.replace(trace, ids_TLK=(trace.ids_TLK + by) % trace.experts)
