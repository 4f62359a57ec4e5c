"""Models, batches and steps for the tests of reference(), shadow_check and debug_nan."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_patch.runtime.module_patch import patch_of
from tests.support import tiny_models
from tests.support.adapters import EXPERTS, adapt, lora_config
from tests.support.numerics import assert_bits

# The common case, a shared expert, expert biases, and blocks and experts with own forwards.
FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "llama4", "longcat_flash", "doge", "dbrx")


def build(model_type: str, lora: bool = False) -> Any:
    model = tiny_models.build(model_type)
    return adapt(model, lora_config(EXPERTS)) if lora else model


def batch_of(model: Any, seed: int = 0) -> dict[str, Tensor]:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return tiny_models.inputs(inner, seed=seed)


def step(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """Run a step and return loss and every gradient."""
    model.zero_grad(set_to_none=True)
    loss = tiny_models.loss(model(**batch))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_same_bits(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        assert_bits(mine, theirs)


def probed(model: Any) -> list[Any]:
    records = [patch_of(m) for m in model.modules()]
    return [r for r in records if r is not None and r.probe is not None]
