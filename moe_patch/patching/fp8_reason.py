"""Reasons, for the report, why experts are decoded although FP8 products were requested."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moe_patch.formats.shard import QuantShard
from moe_patch.formats.tensor import QuantTensor
from moe_patch.runtime.described import layout_of
from moe_patch.runtime.experts import dtype_on, stored_weight
from moe_patch.runtime.fp8 import DECODED, FP8_COPY
from moe_patch.runtime.modules import is_sharded
from moe_patch.runtime.spec import FamilySpec
from moe_patch.types import Glu


def decoded_reason(
    experts: nn.Module,
    spec: FamilySpec,
    glu: Glu | None,
    backend: str,
    device: torch.device,
    compute: str,
) -> str:
    """Return why an experts module decodes its weights, or "" if it does not or need not.

    Args:
        experts, spec: the module and its family entry.
        glu: its activation; None if its own code runs between grouped products.
        backend, device: where its products run.
        compute: option of :class:`moe_patch.PatchConfig`.
    """
    if compute == DECODED:
        return ""
    layout = layout_of(experts, spec)
    weight = stored_weight(experts, spec, layout)
    what = f"compute={compute!r} has no effect: "
    if _storage(weight) != "fp8":
        return what + "the experts are not stored in FP8 (quantize_experts(model, 'fp8'))"
    if backend != "triton" or device.type != "cuda":
        return what + f"experts on the {backend} backend and {device.type} are decoded"
    if glu is None:
        return what + "the experts' own activation runs between grouped products"
    from moe_patch.kernels.common.device import device_at
    from moe_patch.kernels.experts.fp8 import why_not_fp8

    _, rows, columns = weight.shape
    why = why_not_fp8(
        device_at(device).capability,
        dtype_on(device.type, weight, spec.experts_fp32),
        (columns, rows) if layout.is_transposed else (rows, columns),
        glu,
        biased=layout.has_bias,
        transposed=layout.is_transposed,
    )
    if not why and is_sharded(weight) and compute == FP8_COPY:
        return "backward is decoded: FSDP2 gathers experts for one call, and no copy is kept"
    return what + why if why else ""


def _storage(weight: torch.Tensor) -> str:
    """Return the storage of packed weights, whole or one rank's part; "" for plain ones."""
    local: Any = weight
    if is_sharded(weight):
        local = local.to_local()
    if isinstance(local, QuantShard):
        return local.held_weight.storage
    return local.stored_in if isinstance(local, QuantTensor) else ""
