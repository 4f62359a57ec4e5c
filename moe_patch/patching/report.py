"""Report what runs where, and why: one row per MoE block, printable as a table."""

from __future__ import annotations

import html
from collections import Counter
from dataclasses import astuple, dataclass, fields

import torch
from torch import nn

from moe_patch.formats.tensor import QuantTensor
from moe_patch.ops.backend import BackendChoice, choose_backend
from moe_patch.ops.routing_fields import why_not_route
from moe_patch.patching.bindings import overridden, wrapped_by_parallelism
from moe_patch.patching.discover import WHOLE_MODEL, FoundBlock, discover, place_of
from moe_patch.patching.fp8_reason import decoded_reason
from moe_patch.runtime.adapters import paused, why_not_fused
from moe_patch.runtime.described import layout_of, read_glu
from moe_patch.runtime.experts import dtype_on, stored_weight
from moe_patch.runtime.module_patch import ModulePatch, patch_of
from moe_patch.runtime.peft_release import factor_proxies
from moe_patch.runtime.spec import Arg, FamilySpec
from moe_patch.types import Glu, RouteSpec


@dataclass(frozen=True)
class BlockReport:
    """One MoE block of a patched model.

    Attributes:
        path: module path of the block.
        model_type: transformers model type.
        tier: "full" (routing and experts are ours), "experts" (experts only) or "refused".
        router: the routing function that chooses the experts, or "transformers".
        router_backend, experts_backend: "torch" or "triton"; "transformers" if not ours.
        shared: the shared expert: "none", "added by the bound block" or "transformers".
        lora: adapters on the experts: "none", "fused (...)" or why PEFT's own path runs.
        self_check: "passed", "off" or "skipped: why", also with what FP8 products did.
        reason: why the block is refused, why only its experts are patched, or why its backend or
            kernels are not the usual ones.
    """

    path: str
    model_type: str
    tier: str
    router: str
    router_backend: str
    experts_backend: str
    shared: str
    lora: str
    self_check: str
    reason: str


class PatchReport(list[BlockReport]):
    """The rows of a report; prints as a table, also in a notebook."""

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        return [f.name for f in fields(BlockReport)], [
            [str(v) for v in astuple(row)] for row in self
        ]

    def __str__(self) -> str:
        if not self:
            return "moe_patch: no patched MoE blocks"
        head, rows = self._cells()
        widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            for line in [head, *rows]
        ]
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__

    @property
    def patched(self) -> list[BlockReport]:
        """Return the rows of blocks that run on this library."""
        return [row for row in self if row.tier != "refused"]

    def summary(self) -> str:
        """Summarise the patch in one log line: blocks, tiers, backends, adapters, refusals."""
        line = f"{len(self.patched)} of {len(self)} MoE blocks patched"
        if self.patched:
            tiers = Counter(row.tier for row in self.patched)
            line += f" ({', '.join(f'{count} {tier}' for tier, count in tiers.items())})"
            for name, column in (("experts on", "experts_backend"), ("LoRA", "lora")):
                values = dict.fromkeys(getattr(row, column) for row in self.patched)
                line += f", {name} {' and '.join(values)}"
        refused = [row for row in self if row.tier == "refused"]
        if refused:
            line += f"; {len(refused)} left to transformers, first {refused[0].path}: "
            line += refused[0].reason
        return line

    def _repr_html_(self) -> str:
        head, rows = self._cells()

        def line(cells: list[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def patch_report(model: nn.Module, device: torch.device | None = None) -> PatchReport:
    """Return the current state of every MoE block that a patch bound or refused.

    Args:
        model: a model, wrapped or not; an unpatched one gives an empty report.
        device: report the backends for this device, such as the future one of a model on the meta
            device; None takes the device of the weights.
    """
    rows = (_row(found, device) for found in discover(model))
    report = PatchReport(row for row in rows if row is not None)
    root = patch_of(model)
    if not report and root is not None and root.role == "refused":
        report.append(refusal_row(FoundBlock(WHOLE_MODEL, root.spec, block=model), root.reason))
    return report


def _row(found: FoundBlock, device: torch.device | None) -> BlockReport | None:
    patch = _main_patch(found)
    if patch is None:
        return None
    conflict = patch.reason if patch.role == "refused" else overridden(found)
    if conflict is not None:
        return refusal_row(found, conflict)
    weight = _a_weight(found)
    device = place_of(found, weight) if device is None else device
    choice = choose_backend(patch.config.backend, device, weight.dtype)
    tier, router, router_backend, why = _routing(found, choice.name)
    experts_backend, reason = _experts(found, choice, device, patch.config.compute)
    return BlockReport(
        path=found.path,
        model_type=found.model_type,
        tier=tier,
        router=router,
        router_backend=router_backend,
        experts_backend=experts_backend,
        shared=_shared(found.spec, found.block),
        lora=_lora(found, patch),
        self_check=patch.self_check,
        reason=_joined(reason, why, patch.config.chunks(experts_backend), patch.reason),
    )


def _joined(*reasons: str | None) -> str:
    return "; ".join(reason for reason in reasons if reason)


def _routing(found: FoundBlock, backend: str) -> tuple[str, str, str, str]:
    """Return tier, routing function and its backend, and why it differs from the experts'."""
    router_backend, why = "transformers", ""
    if routed := _is_routed(found):
        router_backend, why = _router_backend(found, backend)
    if any(wrapped_by_parallelism(m) for _, m in found.routers):
        why = "transformers' expert parallelism wraps the router, so transformers runs it"
    if not routed:
        return "experts", "transformers", router_backend, why
    decides = found.spec_of(found.routers[0][1]) if found.routers else found.spec
    return "full", decides.decided_by, router_backend, why


def _is_routed(found: FoundBlock) -> bool:
    """Return whether routing is ours: in the bound block, or in every router."""
    if found.spec.block_forward is not None or found.spec.chooses_in_block:
        return found.block is not None and patch_of(found.block) is not None
    return bool(found.routers) and all(patch_of(m) is not None for _, m in found.routers)


def _experts(
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
        reason = _joined(between, reason)
    elif choice.name == "triton" and on_gpu:
        reason = _unusual_kernels(found, glu, device)
    why = decoded_reason(found.experts[0][1], found.spec, glu, choice.name, device, compute)
    return choice.name, _joined(reason, why)


def _unusual_kernels(found: FoundBlock, glu: Glu, device: torch.device) -> str:
    from moe_patch.kernels.common.device import device_at
    from moe_patch.kernels.experts.portable import (
        decoding_reason,
        portable_reason,
        smaller_tiles_reason,
    )

    weight, layout = _a_weight(found), layout_of(found.experts[0][1], found.spec)
    capability, shared_memory, _ = device_at(device)
    rows, columns = whole_shape(weight)[1:]
    shape = (columns, rows) if layout.is_transposed else (rows, columns)
    dtype = dtype_on(device.type, weight, found.spec.experts_fp32)
    return _joined(
        portable_reason(capability, dtype, shape, glu, transposed=layout.is_transposed),
        decoding_reason(capability, weight.stored_in if isinstance(weight, QuantTensor) else ""),
        smaller_tiles_reason(dtype, capability, shared_memory),
    )


def _router_backend(found: FoundBlock, experts_backend: str) -> tuple[str, str]:
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
    E = whole_shape(_a_weight(found))[0]
    chosen = spec.route_spec(block, E, ties)  # type: ignore[arg-type]
    bias = spec.bias_of(block, ())  # type: ignore[arg-type]
    why_not = why_not_route(torch.empty(1, E, device="meta"), chosen, bias)  # type: ignore[arg-type]
    return ("triton", "") if why_not is None else ("torch", f"routing: {why_not}")


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Return a weight's full shape; ZeRO-3 leaves the weight empty between its module's calls."""
    return parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape


def _main_patch(found: FoundBlock) -> ModulePatch | None:
    """Return the record to report for a block: its experts' first, then the block's, a router's."""
    for module in [*(m for _, m in found.experts), found.block, *(m for _, m in found.routers)]:
        if module is not None and (patch := patch_of(module)) is not None:
            return patch
    return None


def _a_weight(found: FoundBlock) -> torch.Tensor:
    if found.experts:
        return stored_weight(found.experts[0][1], found.spec)
    assert found.block is not None
    return next(p for p in found.block.parameters() if p.is_floating_point())


def refusal_row(found: FoundBlock, reason: str) -> BlockReport:
    """Return the row of a block that is left to transformers."""
    hf = "transformers"
    return BlockReport(found.path, found.model_type, "refused", hf, hf, hf, hf, "none", "", reason)


def _shared(spec: FamilySpec, block: nn.Module | None) -> str:
    if spec.shared is None:
        return "transformers" if spec.shared_by_block else "none"
    if block is None or patch_of(block) is None:
        return "transformers"
    return f"{spec.shared} x sigmoid({spec.shared_gate})" if spec.shared_gate else spec.shared


def _lora(found: FoundBlock, patch: ModulePatch) -> str:
    if not found.wrappers:
        return "none"
    if patch.config.fuse_lora == "off":
        return "peft: fuse_lora is off"
    fused: list[str] = []
    left: list[str] = []
    for path, wrapper in found.wrappers:
        why_not = why_not_fused(wrapper) or paused(wrapper)
        if why_not is None and patch_of(wrapper) is None:
            why_not = "call patch_model again with the same options to fuse"
            if not factor_proxies():
                why_not = f"PEFT's merged weight is read; {why_not}"
        name = wrapper.parameter_name
        if name == "weight":  # ambiguous without the name of its module
            name = f"{path.rpartition('.')[2]}.{name}"
        (left if why_not else fused).append(f"{name}: {why_not}" if why_not else name)
    parts = [f"fused ({', '.join(sorted(fused))})"] if fused else []
    return "; ".join(parts + [f"peft ({entry})" for entry in left])
