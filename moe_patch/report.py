"""What runs where, and why: one row per MoE block, printable as a table."""

from __future__ import annotations

import html
from dataclasses import astuple, dataclass, fields

import torch
from torch import nn

from moe_patch.backend import choose_backend
from moe_patch.discover import FoundBlock, discover
from moe_patch.experts_module import up_name
from moe_patch.families.spec import FamilySpec
from moe_patch.lora import fusion_obstacle, live_factors
from moe_patch.record import RECORD, ModulePatch, record_of


@dataclass(frozen=True)
class BlockReport:
    """One MoE block of a patched model.

    Attributes:
        path: module path of the block.
        model_type: transformers model type.
        tier: "full" (routing and experts are ours), "experts" (experts only) or "refused".
        router: the routing function that decides, or "transformers".
        router_backend, experts_backend: "torch" or "triton"; "transformers" where not ours.
        shared: the shared expert: "none", "added by the bound block" or "transformers".
        lora: adapters on the experts: "none", "fused (...)" or why PEFT's own path runs.
        self_check: "passed", "off" or "skipped: why".
        reason: why a block is refused, or why its backend is not the usual one.
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
        return [f.name for f in fields(BlockReport)], [[str(v) for v in astuple(row)] for row in self]

    def __str__(self) -> str:
        if not self:
            return "moe_patch: no patched MoE blocks"
        head, rows = self._cells()
        widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [head, *rows]]
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, rows = self._cells()

        def line(cells: list[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def patch_report(model: nn.Module) -> PatchReport:
    """The state of every MoE block that a patch touched or refused, as it is now.

    Args:
        model: a model, wrapped or not; an unpatched one gives an empty report.
    """
    return PatchReport(row for found in discover(model) if (row := _row(found)) is not None)


def _row(found: FoundBlock) -> BlockReport | None:
    records = [record_of(m) for _, m in [*found.routers, *found.experts]]
    blocked = None if found.block is None else found.block.__dict__.get(RECORD)
    if all(record is None for record in records):
        if blocked is not None and blocked.role == "refused":
            return refusal_row(found, blocked.reason)
        return None
    routed = bool(found.routers) and all(record_of(m) is not None for _, m in found.routers)
    expert_path, experts = found.experts[0]
    record = record_of(experts)
    if record is None:
        return refusal_row(found, f"{expert_path} lost its patch")
    weight = _any_weight(experts)
    choice = choose_backend(record.config.backend, weight.device, weight.dtype)
    return BlockReport(
        path=found.path,
        model_type=found.model_type,
        tier="full" if routed else "experts",
        router=found.spec.routing.__name__ if routed and found.spec.routing else "transformers",
        router_backend="torch" if routed else "transformers",
        experts_backend=choice.name,
        shared=_shared(found.spec, found.block),
        lora=_lora(found, record),
        self_check=record.self_check,
        reason=record.reason or (choice.reason if choice.name == "torch" and weight.is_cuda else ""),
    )


def refusal_row(found: FoundBlock, reason: str) -> BlockReport:
    """The row of a block that is left to transformers."""
    hf = "transformers"
    return BlockReport(found.path, found.model_type, "refused", hf, hf, hf, hf, "none", "", reason)


def _any_weight(experts: nn.Module) -> torch.Tensor:
    live = live_factors(experts, up_name(experts))
    return getattr(experts, up_name(experts)) if live is None else live[0]


def _shared(spec: FamilySpec, block: nn.Module | None) -> str:
    if spec.shared is None:
        return "none"
    if block is None or record_of(block) is None:
        return "transformers"
    return f"{spec.shared} x sigmoid({spec.shared_gate})" if spec.shared_gate else spec.shared


def _lora(found: FoundBlock, record: ModulePatch) -> str:
    if not found.wrappers:
        return "none"
    if record.config.fuse_lora == "off":
        return "peft: fuse_lora is off"
    fused, left = [], []
    for _, wrapper in found.wrappers:
        obstacle = fusion_obstacle(wrapper)
        if obstacle is None and record_of(wrapper) is None:
            obstacle = "call patch_model again to fuse"
        (left if obstacle else fused).append(f"{wrapper.parameter_name}: {obstacle}" if obstacle else wrapper.parameter_name)
    parts = [f"fused ({', '.join(sorted(fused))})"] if fused else []
    return "; ".join(parts + [f"peft ({entry})" for entry in left])
