"""Report what runs where, and why: one row per MoE block, printable as a table."""

from __future__ import annotations

import html
from collections import Counter
from dataclasses import astuple, dataclass, fields

import torch
from torch import nn

from moe_patch.ops.backend import choose_backend
from moe_patch.patching.backends import (
    a_weight,
    experts_backend_of,
    joined,
    router_backend_of,
)
from moe_patch.patching.bindings import overridden, wrapped_by_parallelism
from moe_patch.patching.discover import WHOLE_MODEL, FoundBlock, discover, place_of
from moe_patch.runtime.adapters import paused, why_not_fused
from moe_patch.runtime.module_patch import ModulePatch, patch_of
from moe_patch.runtime.peft_release import factor_proxies
from moe_patch.runtime.spec import FamilySpec


@dataclass(frozen=True)
class BlockReport:
    """One MoE block of a patched model.

    Attributes:
        path: module path of the block.
        model_type: transformers model type.
        tier: "full" (routing and experts are ours), "experts" (experts only) or "refused".
        router: the routing function that chooses the experts, or "transformers".
        router_backend, experts_backend: "torch" or "triton"; "transformers" if not ours.
        shared: name of the shared expert that the bound block adds, with its gate if it has one;
            "transformers" if transformers' own code adds it; or "none".
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
    weight = a_weight(found)
    device = place_of(found, weight) if device is None else device
    choice = choose_backend(patch.config.backend, device, weight.dtype)
    tier, router, router_backend, why = _routing(found, choice.name)
    experts_backend, reason = experts_backend_of(found, choice, device, patch.config.compute)
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
        reason=joined(reason, why, patch.config.chunks(experts_backend), patch.reason),
    )


def _routing(found: FoundBlock, backend: str) -> tuple[str, str, str, str]:
    """Return tier, routing function and its backend, and why it differs from the experts'."""
    router_backend, why = "transformers", ""
    if routed := _is_routed(found):
        router_backend, why = router_backend_of(found, backend)
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


def _main_patch(found: FoundBlock) -> ModulePatch | None:
    """Return the record to report for a block: its experts' first, then the block's, a router's."""
    for module in [*(m for _, m in found.experts), found.block, *(m for _, m in found.routers)]:
        if module is not None and (patch := patch_of(module)) is not None:
            return patch
    return None


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
