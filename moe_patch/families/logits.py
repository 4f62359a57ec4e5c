"""How transformers' routers compute their logits: each expression as the model file has it.

Parameters are read at call time and as attributes, so that adapters and parametrizations act.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


def linear(router: nn.Module, hidden: Tensor) -> Tensor:
    """W x in the dtype of the hidden states. Source: Qwen2/3-MoE, OLMoE, Mixtral."""
    return F.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)


def linear_bias(router: nn.Module, hidden: Tensor) -> Tensor:
    """W x + b in the dtype of the hidden states. Source: gpt_oss."""
    return F.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight, router.bias)


def linear_fp32(router: nn.Module, hidden: Tensor) -> Tensor:
    """W x with both upcast to fp32. Source: DeepSeek-V2/V3, GLM-4.5."""
    return F.linear(hidden.reshape(-1, hidden.shape[-1]).float(), router.weight.float())


def linear_weight_dtype(router: nn.Module, hidden: Tensor) -> Tensor:
    """W x in the dtype of W. Source: MiniMax-M2."""
    return F.linear(hidden.reshape(-1, hidden.shape[-1]).to(router.weight.dtype), router.weight)
