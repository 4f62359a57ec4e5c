"""Backends of a patched block's router and experts, and why they are not the usual ones."""

from __future__ import annotations

import torch

from moe_patch.formats.tensor import QuantTensor
from moe_patch.ops.backend import BackendChoice
from moe_patch.ops.routing_fields import why_not_route
from moe_patch.patching.discover import FoundBlock
from moe_patch.patching.fp8_reason import decoded_reason
from moe_patch.runtime.described import layout_of, read_glu
from moe_patch.runtime.experts import dtype_on, stored_weight
from moe_patch.runtime.module_patch import patch_of
from moe_patch.runtime.spec import Arg
from moe_patch.types import Glu, RouteSpec


def joined(*reasons: str | None) -> str:
    """Join the reasons that are given."""
    return "; ".join(reason for reason in reasons if reason)


def experts_backend_of(
    found: FoundBlock, choice: BackendChoice, device: torch.device, compute: str
) -> tuple[str, str]:
    """Return the experts' backend, and why it or its kernels are not the usual ones."""
    on_gpu = device.type == "cuda"
    reason = choice.reason if choice.name == "torch" and on_gpu else ""
    if not found.experts:
        return "torch", reason
    glu = read_glu(found.experts[0][1], found.spec)
    if glu is None:
        between = "the experts' own activation, norm or layout runs between grouped products"
        reason = joined(between, reason)
    elif choice.name == "triton" and on_gpu:
        reason = _unusual_kernels(found, glu, device)
    why = decoded_reason(found.experts[0][1], found.spec, glu, choice.name, device, compute)
    return choice.name, joined(reason, why)


def _unusual_kernels(found: FoundBlock, glu: Glu, device: torch.device) -> str:
    from moe_patch.kernels.common.device import device_at
    from moe_patch.kernels.experts.reasons import (
        decoding_reason,
        portable_reason,
        smaller_tiles_reason,
    )

    weight, layout = a_weight(found), layout_of(found.experts[0][1], found.spec)
    capability, shared_memory, _ = device_at(device)
    rows, columns = whole_shape(weight)[1:]
    shape = (columns, rows) if layout.is_transposed else (rows, columns)
    dtype = dtype_on(device.type, weight, found.spec.experts_fp32)
    return joined(
        portable_reason(capability, dtype, shape, glu, transposed=layout.is_transposed),
        decoding_reason(capability, weight.stored_in if isinstance(weight, QuantTensor) else ""),
        smaller_tiles_reason(dtype, capability, shared_memory),
    )


def router_backend_of(found: FoundBlock, experts_backend: str) -> tuple[str, str]:
    """Return the router's backend and, if it is not that of the experts, why."""
    if experts_backend == "torch":
        return "torch", ""
    if found.spec.chooses_in_block:
        return _block_backend(found)
    if not found.routers:  # Doge: the block itself selects by product keys
        ties = patch_of(found.block).config.ties  # type: ignore[arg-type, union-attr]
        why = "routing: ties='torch' chooses among all pairs of keys, as torch.topk does"
        return ("triton", "") if ties == "lower" else ("torch", why)
    router = found.routers[0][1]
    spec, by_block = found.spec_of(router), found.spec.block_choice
    if spec.routing is None and by_block is None:
        return "torch", "the family routes in a forward of its own"
    rows, dtype = next(
        (shape[0], p.dtype) for p in router.parameters() if len(shape := whole_shape(p)) == 2
    )
    ties, bias = patch_of(router).config.ties, None  # type: ignore[union-attr]
    if by_block is not None:
        chosen: RouteSpec | None = by_block(found.block, ties)
    else:
        chosen = spec.route_spec(router, rows, ties)
        bias = None if isinstance(spec.bias, Arg) else spec.bias_of(router, ())
    why = ""
    if chosen is None:
        why = f"routing: {spec.decided_by} decides per call which part runs on the kernels"
        chosen = RouteSpec(1, ties=ties)
    why_not = why_not_route(torch.empty(1, rows, dtype=dtype, device="meta"), chosen, bias)
    return ("triton", why) if why_not is None else ("torch", f"routing: {why_not}")


def _block_backend(found: FoundBlock) -> tuple[str, str]:
    """Return the backend for a block that chooses experts from its router's plain logits."""
    spec, block, ties = found.spec, found.block, patch_of(found.block).config.ties  # type: ignore[arg-type, union-attr]
    E = whole_shape(a_weight(found))[0]
    chosen = spec.route_spec(block, E, ties)  # type: ignore[arg-type]
    bias = spec.bias_of(block, ())  # type: ignore[arg-type]
    why_not = why_not_route(torch.empty(1, E, device="meta"), chosen, bias)  # type: ignore[arg-type]
    return ("triton", "") if why_not is None else ("torch", f"routing: {why_not}")


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Return a weight's full shape; ZeRO-3 leaves the weight empty between its module's calls."""
    return parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape


def a_weight(found: FoundBlock) -> torch.Tensor:
    """Return a floating-point weight of the block, of its experts if it has any, as stored."""
    if found.experts:
        return stored_weight(found.experts[0][1], found.spec)
    assert found.block is not None
    return next(p for p in found.block.parameters() if p.is_floating_point())
