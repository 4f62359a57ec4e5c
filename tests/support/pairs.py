"""A patched tiny model beside the same model untouched, and their first blocks."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from moe_patch import patch_model
from tests.support import tiny_models

WITH_AUX_LOSS = ("qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "minimax_m2", "gpt_oss")
EIGHT = (*WITH_AUX_LOSS, "deepseek_v3", "glm4_moe")


def pair(name: str, **over: Any) -> tuple[nn.Module, nn.Module]:
    """A patched model and the same model untouched, on transformers' eager experts."""
    reference = tiny_models.build(name, **over)
    return patch_model(copy.deepcopy(reference)), reference


def blocks(name: str, **over: Any) -> tuple[nn.Module, nn.Module]:
    """The first MoE block of each model of such a pair."""
    return tuple(tiny_models.blocks(model)[0][1] for model in pair(name, **over))


def gate_of(block: nn.Module) -> nn.Module:
    return block.router if "router" in block._modules else block.gate
