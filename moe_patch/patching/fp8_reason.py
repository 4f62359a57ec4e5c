"""Reasons, for the report and for plans, why experts are decoded although FP8 was requested."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moe_patch.formats.fp8_scope import HOPPER, why_not_in_scope
from moe_patch.formats.shard import QuantShard
from moe_patch.formats.tensor import QuantTensor
from moe_patch.ops.backend import choose_backend
from moe_patch.runtime.described import layout_of, read_glu
from moe_patch.runtime.experts import dtype_on, stored_weight
from moe_patch.runtime.fp8 import DECODED, FP8_COPY
from moe_patch.runtime.modules import is_sharded
from moe_patch.runtime.spec import FamilySpec
from moe_patch.types import Glu

_OWN_ACTIVATION = "the experts' own activation runs between grouped products"


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
    weight = stored_weight(experts, spec)
    what = f"compute={compute!r} has no effect: "
    if _storage(weight) != "fp8":
        return what + "the experts are not stored in FP8 (quantize_experts(model, 'fp8'))"
    why = _why_not(experts, spec, glu, backend, device)
    if not why and is_sharded(weight) and compute == FP8_COPY:
        return "backward is decoded: FSDP2 gathers experts for one call, and no copy is kept"
    return what + why if why else ""


def planned_reason(experts: nn.Module, spec: FamilySpec, device: torch.device) -> str:
    """Return why a card would decode experts in FP8, or "" if it would multiply them in FP8.

    Args:
        experts, spec: the module, in any storage, and its family entry.
        device: the card; a CPU stands for a Hopper card elsewhere.
    """
    glu = read_glu(experts, spec)
    if device.type == "cuda":
        dtype = stored_weight(experts, spec).dtype
        return _why_not(experts, spec, glu, choose_backend("auto", device, dtype).name, device)
    return _out_of_scope(experts, spec, glu, HOPPER)


def _why_not(
    experts: nn.Module, spec: FamilySpec, glu: Glu | None, backend: str, device: torch.device
) -> str:
    """Return why experts that are stored in FP8 are decoded, or ""."""
    if backend != "triton" or device.type != "cuda":
        return f"experts on the {backend} backend and {device.type} are decoded"
    from moe_patch.kernels.common.device import device_at
    from moe_patch.kernels.common.versions import why_no_fp8

    return _out_of_scope(experts, spec, glu, device_at(device).capability) or why_no_fp8()


def _out_of_scope(
    experts: nn.Module, spec: FamilySpec, glu: Glu | None, capability: tuple[int, int]
) -> str:
    """Return why experts that are stored in FP8 are decoded on every Triton, or ""."""
    if glu is None:
        return _OWN_ACTIVATION
    layout, weight = layout_of(experts, spec), stored_weight(experts, spec)
    _, rows, columns = weight.shape
    return why_not_in_scope(
        capability,
        dtype_on("cuda", weight, spec.experts_fp32),
        (columns, rows) if layout.is_transposed else (rows, columns),
        glu,
        biased=layout.has_bias,
        transposed=layout.is_transposed,
    )


def _storage(weight: torch.Tensor) -> str:
    """Return the storage of packed weights, whole or one rank's part; "" for plain ones."""
    local: Any = weight
    if is_sharded(weight):
        local = local.to_local()
    if isinstance(local, QuantShard):
        return local.held_weight.storage
    return local.stored_in if isinstance(local, QuantTensor) else ""
