"""What the experts operators return where there is no data: shapes, dtypes and layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_patch.formats.operands import packed_weights
from moe_patch.ops.experts.options import read_options, with_scales
from moe_patch.types import ExpertWeights


def experts_fake(x: Any, ids: Any, weights: Any, *args: Any) -> Any:
    """``experts``, both overloads."""
    w13, w2, _, _, a13, _, a2, *_, options, keep, _, scales = with_scales(args)
    save_h, save_u13, save_u2, norms = keep
    storage = read_options(options).storage
    w13 = packed_weights(ExpertWeights(w13, w2), scales, storage, x.dtype).w13_EHD
    T, K = ids.shape
    return (
        x.new_empty(x.shape),
        ids.new_empty(T * K, dtype=torch.int32),
        ids.new_empty(T, K, dtype=torch.int32),
        ids.new_empty(w13.shape[0] + 1, dtype=torch.int32),
        x.new_empty(T * K, w13.shape[1]) if save_h else x.new_empty(0),
        x.new_empty(T * K, a13.shape[1]) if save_u13 else x.new_empty(0),
        x.new_empty(T * K, a2.shape[1]) if save_u2 else x.new_empty(0),
        x.new_empty(T, K, dtype=torch.promote_types(x.dtype, torch.float32))
        if norms
        else x.new_empty(0),
    )


def experts_bwd_fake(dout: Any, *args: Any) -> Any:
    """``experts_bwd``."""
    inputs, slot_of_TK, needs = args[:10], args[-7], args[-2]
    x, a13, a2 = args[0], args[6], args[8]
    grads = [
        _gradient_of(t) if need and t is not None else x.new_empty(0)
        for t, need in zip(inputs, needs[:10], strict=True)
    ]
    wide = torch.promote_types(x.dtype, torch.float32)
    has_lora = a13 is not None or a2 is not None
    norms = [
        x.new_empty(slot_of_TK.shape, dtype=wide) if needs[10] and present else x.new_empty(0)
        for present in (True, True, has_lora)
    ]
    return grads + norms


def _gradient_of(t: Tensor) -> Tensor:
    """Gradients of weights and factors lie as those do, all others are contiguous."""
    return torch.empty_like(t) if t.dim() == 3 else t.new_empty(t.shape)
