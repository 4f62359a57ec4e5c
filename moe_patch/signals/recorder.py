"""Record the router's decisions and per-token, per-expert norms of every MoE layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.errors import PatchStateError, UnsupportedModelError
from moe_patch.patching.discover import FoundBlock, discover
from moe_patch.runtime.module_patch import ModulePatch, patch_of
from moe_patch.runtime.modules import is_sharded
from moe_patch.runtime.spec import read
from moe_patch.runtime.taps import SIGNALS, LayerSignals, Taps, fused
from moe_patch.schema import check_choice

KEEP = ("load", "all")


@dataclass
class StepSignals:
    """One closed step.

    Attributes:
        load: path -> [E] int64, rows per expert over every forward of the step.
        layers: path -> a snapshot of the step's newest forward; empty with ``keep="load"``.
    """

    load: dict[str, Tensor]
    layers: dict[str, LayerSignals] = field(default_factory=dict)


@dataclass
class Recorder:
    """The recorder that :func:`record` yields; readable after the ``with``.

    Attributes:
        layers: block path -> :class:`LayerSignals`, the newest forward of each layer.
        history: one entry per :meth:`step`.
        keep: "load" keeps the counts of each step, "all" every recorded tensor.
    """

    layers: dict[str, LayerSignals]
    keep: str = "load"
    history: list[StepSignals] = field(default_factory=list)

    def step(self, group: Any = None) -> StepSignals:
        """Close a step: append it to ``history`` and reset the counts.

        Args:
            group: a torch.distributed process group over which the counts are summed, since
                data-parallel ranks have different tokens; None counts only this process.
        """
        load = {p: layer.load for p, layer in self.layers.items() if layer.load is not None}
        if group is not None:
            load = sum_over_group(load, list(self.layers), group)
        layers = {}
        if self.keep == "all":
            layers = {path: layer.snapshot() for path, layer in self.layers.items()}
        closed = StepSignals(load, layers)
        self.history.append(closed)
        self.drop()
        return closed

    def drop(self) -> None:
        """Reset the counts without closing a step, for forwards that are not training."""
        for layer in self.layers.values():
            layer.load = None


def sum_over_group(load: dict[str, Tensor], paths: list[str], group: Any) -> dict[str, Tensor]:
    """Sum counts over a process group, in two collective calls that are equal on all ranks.

    Args:
        load: this process's counts. A layer that did not run here is absent: an image tower in a
            batch of text, or layer drop. It is in the result if it ran on another rank.
        paths: every recorded layer, in the same order on all ranks.
        group: the process group.
    """
    device = next((counts.device for counts in load.values()), None)
    if device is None:
        on_cards = "nccl" in torch.distributed.get_backend(group)
        device = torch.device("cuda" if on_cards else "cpu")
    sizes = torch.tensor([len(load[p]) if p in load else 0 for p in paths], device=device)
    torch.distributed.all_reduce(sizes, torch.distributed.ReduceOp.MAX, group)
    lengths = dict(zip(paths, sizes.tolist(), strict=True))
    none = torch.zeros(0, dtype=torch.int64, device=device)
    counts = {p: load.get(p, none.new_zeros(E)).to(device) for p, E in lengths.items()}
    total = torch.cat([none, *counts.values()])
    torch.distributed.all_reduce(total, group=group)
    summed = dict(zip(paths, total.split(list(lengths.values())), strict=True))
    ran = [path for path in paths if lengths[path]]
    return {p: summed[p].to(load[p].device if p in load else device) for p in ran}


@contextmanager
def record(model: nn.Module, router_input: bool = False, keep: str = "load") -> Iterator[Recorder]:
    """Record every patched MoE layer of a model inside a ``with`` block.

    Args:
        model: a patched model, bare or wrapped.
        router_input: keep the hidden states that enter each router, [T, D], for ``smk_loss``.
        keep: what ``Recorder.step`` puts into the history, "load" or "all".

    Yields:
        A :class:`Recorder`. Norms are fp32 (fp64 in fp64 models) and belong to the loss as it was
        backpropagated, scaling and accumulation included. Gradient fields are None before backward.
        Values that a family does not have are None; ``missing`` of the layer says why.

    Raises:
        PatchStateError: there is no patched MoE block, or the model is already being recorded.
        UnsupportedOptionError: ``keep`` is another word.
    """
    check_choice("record: keep", keep, KEEP)
    blocks = patched_blocks(model, "record")
    recorder = Recorder({block.path: _layer_of(block, router_input) for block in blocks}, keep)
    tapped: list[ModulePatch] = []
    try:
        for block in blocks:
            for path, module in [*block.routers, *block.experts]:
                if (patch := patch_of(module)) is None:
                    continue
                patch.taps = patch.taps or Taps(path)
                if patch.taps.layer is not None:
                    raise PatchStateError(
                        f"{path} is already being recorded; leave that `with` first"
                    )
                patch.taps.layer = recorder.layers[block.path]
                tapped.append(patch)
        yield recorder
    finally:
        for patch in tapped:
            patch.taps.layer = None
            drop_idle(patch)


def drop_idle(patch: ModulePatch) -> None:
    """Remove a module's taps if neither a recorder nor a replay uses them."""
    if patch.taps.layer is None and patch.taps.replay is None:
        patch.taps = None


def patched_blocks(model: nn.Module, caller: str) -> list[FoundBlock]:
    """Return the blocks of a model whose experts or block run on this library.

    Raises:
        PatchStateError: there is none.
    """
    blocks = []
    for block in discover(model):
        modules = [m for _, m in block.experts] or [block.block]
        records = [patch_of(m) for m in modules if m is not None]
        if any(r is not None and r.role != "refused" for r in records):
            blocks.append(block)
    if not blocks:
        raise PatchStateError(
            f"{caller}: {type(model).__name__} has no patched MoE block; call patch_model first"
        )
    return blocks


def require_whole(module: nn.Module, where: str) -> None:
    """Refuse sharded parameters where they are read or written outside the module's own forward.

    Raises:
        UnsupportedModelError: a parameter is a DTensor (FSDP2, tensor parallelism).
    """
    for name, parameter in module.named_parameters():
        if is_sharded(parameter):
            raise UnsupportedModelError(
                f"{where}: {name} is sharded (DTensor); accepted: whole parameters, as on one "
                "device or under DDP; recording itself works on sharded models"
            )


def why_no_logits(block: FoundBlock) -> str | None:
    """Say why a block's router does not run the common router forward, or return None."""
    if block.spec.chooses_in_block:
        return "the block chooses experts from its router's logits, which are not recorded"
    if not block.routers and block.spec.tier == "experts":
        return "transformers routes this block"
    if not block.routers:
        return "the block routes without a known router module"
    for _, router in block.routers:
        spec = block.spec_of(router)
        if patch_of(router) is None or spec.tier == "experts":
            return "transformers routes this block"
        if spec.routing is None or spec.router_forward is not None:
            return f"the routers of {block.model_type} run a forward of their own"
    return None


def _layer_of(block: FoundBlock, router_input: bool) -> LayerSignals:
    """Return an empty layer that lists what this block cannot record."""
    layer = LayerSignals(block.path, keeps_input=router_input)
    if block.spec.chooses_in_block:  # it reads the correction bias
        layer.router_path = block.path
    layer.no_logits = why_no_logits(block)
    own = [block.spec_of(router).router_forward is not None for _, router in block.routers]
    if layer.no_logits and not (own and all(own) and fused(block.spec)):
        seen = ("logits", "router_weights", "router_input")
        layer.missing |= dict.fromkeys(seen, layer.no_logits)
    if not block.experts or not fused(block.spec):
        why = f"the experts of {block.model_type} are stored in a layout of their own"
        names = ("ids", "weights", "tokens_per_expert", "load", *SIGNALS)
        layer.missing |= dict.fromkeys(names, why)
    elif "llama4_text" in block.spec.model_types:
        # Routing weights scale the experts' input here: rows arrive one by one, already weighted.
        router = block.routers[0][1]
        layer.rows_per_token = read(router, block.spec.params["top_k"])
        why = "routing weights multiply the experts' input in this family"
        layer.missing |= dict.fromkeys(("weights", "router_weights"), why)
    elif block.spec.experts_forward is not None:
        why = f"{block.model_type} adds identity experts outside the experts operator"
        layer.missing |= dict.fromkeys(("act_norm", "grad_norm_output"), why)
    return layer
