"""Tiny models whose experts can be quantised, and helpers of their tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_patch import quantize_experts
from moe_patch.formats.tensor import QuantTensor, parameter
from moe_patch.quant import state
from moe_patch.quant.surgery import expert_projections
from tests.support import tiny_models
from tests.support.adapters import adapt, lora_config
from tests.support.quant_cases import packed_like

STORAGES = ("nf4", "fp8")
SIZES = {
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 64},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 64},
}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def build(model_type: str = "qwen3_moe", **overrides: Any) -> nn.Module:
    return tiny_models.build(model_type, **SIZES[model_type], **overrides)


def quantised(model: nn.Module) -> list[QuantTensor]:
    return [p for p in model.parameters() if isinstance(p, QuantTensor)]


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**tiny_models.inputs(model)).logits


def adapted(model: nn.Module) -> nn.Module:
    return adapt(model, lora_config(EXPERTS, []))


def store(model: nn.Module, storage: str) -> nn.Module:
    """Store a model's experts; "" leaves them plain, mxfp4 makes random ones, as none can pack."""
    if storage == "mxfp4":
        for one in expert_projections(model):
            packed = packed_like(one.stored, storage)
            setattr(one.module, one.name, parameter(QuantTensor(packed)))
            state.watch(one.module)
    elif storage:
        quantize_experts(model, storage)
    return model
