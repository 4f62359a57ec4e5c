"""Router logits of transformers' families, each computed as in its model file.

Parameters are read as attributes at call time, so that adapters and parametrizations take effect.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_patch.runtime.modules import parameter_of


def _weight(router: nn.Module) -> Tensor:
    return parameter_of(router, "weight")


def linear(router: nn.Module, hidden: Tensor) -> Tensor:
    """Return W x in the dtype of the hidden states. Source: Qwen2/3-MoE, OLMoE, Mixtral."""
    return nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), _weight(router))


def linear_bias(router: nn.Module, hidden: Tensor) -> Tensor:
    """Return W x + b in the dtype of the hidden states. Source: gpt_oss."""
    x_TD, bias = hidden.reshape(-1, hidden.shape[-1]), parameter_of(router, "bias")
    return nn.functional.linear(x_TD, _weight(router), bias)


def linear_then_fp32(router: nn.Module, hidden: Tensor) -> Tensor:
    """Return W x in the dtype of the hidden states, then upcast to fp32. Source: Granite-MoE."""
    return linear(router, hidden).float()


def linear_fp32(router: nn.Module, hidden: Tensor) -> Tensor:
    """Return W x with both upcast to fp32. Source: DeepSeek-V2/V3, GLM-4.5."""
    return nn.functional.linear(
        hidden.reshape(-1, hidden.shape[-1]).float(), _weight(router).float()
    )


def linear_fp32_no_autocast(router: nn.Module, hidden: Tensor) -> Tensor:
    """Return W x in fp32, regardless of autocast. Source: ERNIE-4.5, Flint."""
    with torch.autocast(hidden.device.type, enabled=False):
        return linear_fp32(router, hidden)


def linear_weight_dtype(router: nn.Module, hidden: Tensor) -> Tensor:
    """Return W x in the dtype of W. Source: MiniMax-M2, MiniMax-M3."""
    weight = _weight(router)
    return nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]).to(weight.dtype), weight)
