"""``inspect MODEL``: show what a patch would do for a model, from its config alone."""

from __future__ import annotations

import argparse
import warnings
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from moe_patch.cli import models
from moe_patch.cli.output import add_json, bytes_text, print_json, print_table, progress
from moe_patch.cli.status import CHECK_FAILED
from moe_patch.config import PatchConfig
from moe_patch.errors import UnsupportedModelError
from moe_patch.patching.discover import FoundBlock, discover
from moe_patch.patching.report import BlockReport
from moe_patch.runtime.described import layout_of, read_glu
from moe_patch.runtime.experts import stored_weight
from moe_patch.runtime.spec import read

HF = "transformers"
# Bytes kept per row beside h: the plan's row_of_N and slot_of_TK, int32 each.
PLAN_BYTES = 8


def add(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "inspect",
        help="what a patch would do for a model, without loading its weights",
        description="Tier, router, backends and memory of each MoE block, from the config alone. "
        "Status 1 if a block is refused.",
    )
    models.add_model(parser)
    parser.add_argument("--backend", choices=("auto", "torch", "triton"), default="auto")
    add_json(parser)
    parser.set_defaults(command=command)


def command(args: argparse.Namespace) -> int:
    """Print the blocks; return status 1 if one is refused."""
    from moe_patch.quant.stored import stored

    device = models.device_of(args)
    with progress(2, "reading the config") as steps:
        config = models.load_config(args.model)
        dtype = models.DTYPES[args.dtype] if args.dtype else models.dtype_of(config)
        steps.step("building on the meta device")
        found = examine(models.build(config, dtype, "meta"), device, args.backend)
    quantised = stored(config)
    result = {
        "model": args.model,
        "model_type": config.model_type,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "quantised_with": None if quantised is None else quantised.method,
        "quantisation": None if quantised is None else quantised.said,
        **found,
    }
    if quantised is not None:
        result["weight_bytes"] = None  # not every config says which weights a method packs
        if not quantised.is_read:
            result.update(_unreadable(found, quantised.method))
    if args.json:
        print_json(result)
    else:
        _print(result)
    refused = any(block["tier"] == "refused" for block in result["blocks"])
    return CHECK_FAILED if refused else 0


def examine(model: nn.Module, device: torch.device, backend: str = "auto") -> dict[str, Any]:
    """Patch a model on the meta device and describe the result.

    Args:
        model: patched by this call.
        device: where the weights will be.
        backend: as in :class:`moe_patch.PatchConfig`.

    Returns:
        Numbers of parameters and bytes, and one entry per MoE block. For the experts also the bytes
        by storage after quantize_experts, or why it would refuse. ``fp8_copy_bytes`` are those of
        transposed copies, and ``fp8_decoded`` is the first module without. A block's entry has the
        report's row, its sizes, and the bytes that its experts keep per token from forward to
        backward. The latter are absent if the experts do not run on the operator.
    """
    from moe_patch.formats.packed import STORAGES
    from moe_patch.patching.patch import patch_model
    from moe_patch.patching.report import patch_report
    from moe_patch.quant.memory import copied_bytes, experts_memory

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the rows say why blocks are refused
        patch_model(model, PatchConfig(strict=False, backend=backend))
    blocks = {found.path: found for found in discover(model)}
    rows = [_row(row, blocks.get(row.path)) for row in patch_report(model, device)]
    parameters = dict(model.named_parameters())
    experts = [p for found in discover(model) for _, m in found.experts for p in m.parameters()]
    try:
        _, quantised, unquantised = experts_memory(model)
        copies, decoded = copied_bytes(model, device)
    except UnsupportedModelError as error:
        quantised, unquantised = {}, dict.fromkeys(STORAGES, str(error))
        copies, decoded = 0, ""
    return {
        "parameters": sum(p.numel() for p in parameters.values()),
        "expert_parameters": sum(p.numel() for p in experts),
        "weight_bytes": sum(p.nbytes for p in parameters.values()),
        "expert_bytes": sum(p.nbytes for p in experts),
        "expert_bytes_quantised": quantised,
        "not_quantised": unquantised,
        "fp8_copy_bytes": copies,
        "fp8_decoded": decoded,
        "saved_bytes_per_token": _total(rows, "saved_bytes_per_token"),
        "saved_with_recompute": _total(rows, "saved_with_recompute"),
        "blocks": rows,
    }


def _total(rows: list[dict[str, Any]], key: str) -> int:
    """Return the sum over the rows that have a value."""
    return sum(row.get(key) or 0 for row in rows)


def block_sizes(found: FoundBlock) -> dict[str, Any]:
    """Return E, K, D, F of a block, and the bytes that its experts keep per token."""
    if found.refused or not found.experts:
        return {}
    experts, spec = found.experts[0][1], found.spec
    layout, weight = layout_of(experts, spec), stored_weight(experts, spec)
    if weight.dim() != 3:
        return {}  # DBRX stacks the experts along the rows of 2-D weights
    E, H, D = weight.shape
    if layout.is_transposed:
        H, D = D, H
    sizes = {"experts": E, "hidden": D, "width": H // 2 if layout.has_gate else H}
    top_k = _param(found, "top_k")
    if top_k is None or spec.experts_forward is not None or read_glu(experts, spec) is None:
        return sizes  # other code than the operator decides what it saves
    plan = top_k * PLAN_BYTES + top_k * weight.itemsize  # includes the routing weights
    return {
        **sizes,
        "top_k": top_k,
        "saved_bytes_per_token": top_k * H * weight.itemsize + plan,
        "saved_with_recompute": plan,
    }


def _param(found: FoundBlock, name: str) -> int | None:
    """Return a number from the config that a router or the block itself routes by, or None."""
    for chooser, spec in found.choosers:
        source = spec.params.get(name)
        if source is not None and read(chooser, source) is not None:
            return int(read(chooser, source))
    return None


def _row(row: BlockReport, found: FoundBlock | None) -> dict[str, Any]:
    """Return the report's row with the block's sizes, refused if the config cannot be routed.

    patch_model skips the self-check on the meta device, so it would not find such a config.
    """
    sizes = {} if found is None else block_sizes(found)
    whole = {**asdict(row), **sizes}
    if found is None or row.tier == "refused" or "experts" not in sizes:
        return whole
    reason = _unroutable(found, sizes["experts"])
    return whole if reason is None else _refused(whole, f"in config.json {reason}")


def _unroutable(found: FoundBlock, experts: int) -> str | None:
    """Say why no router of transformers works with the config's numbers, or return None."""
    top_k, groups, best = (_param(found, name) for name in ("top_k", "groups", "top_groups"))
    if top_k is not None and not 0 < top_k <= experts:
        return f"a token goes to {top_k} of {experts} experts; accepted: 1 to {experts}"
    if groups is not None and (groups < 1 or experts % groups):
        return f"{experts} experts are in {groups} groups; accepted: a divisor of {experts}"
    if groups is not None and best is not None and not 0 < best <= groups:
        return f"a token goes to {best} of {groups} groups; accepted: 1 to {groups}"
    return None


def _refused(row: dict[str, Any], reason: str) -> dict[str, Any]:
    """Return the row of a block left to transformers: sizes stay, bytes are unknown."""
    theirs = dict.fromkeys(("router", "router_backend", "experts_backend", "shared"), HF)
    kept = {key: value for key, value in row.items() if not key.startswith("saved_")}
    return {**kept, **theirs, "tier": "refused", "self_check": "", "reason": reason}


def _unreadable(found: dict[str, Any], method: str) -> dict[str, Any]:
    """Return the entries that change if the experts are packed in an unsupported format."""
    reason = f"quantised with {method}, which moe_patch does not read"
    return {
        "expert_bytes": None,
        "expert_bytes_quantised": {},
        "not_quantised": {},
        "fp8_copy_bytes": 0,
        "fp8_decoded": "",
        "saved_bytes_per_token": 0,
        "saved_with_recompute": 0,
        "blocks": [
            row if row["tier"] == "refused" else _refused(row, reason) for row in found["blocks"]
        ],
    }


def _print(result: dict[str, Any]) -> None:
    share = result["expert_parameters"] / max(result["parameters"], 1)
    size = "stored size unknown"
    if result["weight_bytes"] is not None:
        size = f"{bytes_text(result['weight_bytes'])} in {result['dtype']}"
    print(
        f"{result['model']}: {result['model_type']}, {result['parameters']:,} parameters "
        f"({share:.0%} in experts), {size}"
    )
    if result["quantisation"] is not None:
        print(f"quantised with {result['quantised_with']}: {result['quantisation']}")
    for storage, count in result["expert_bytes_quantised"].items():
        stored = storage == result["quantised_with"]
        how = "as stored, load_quantized" if stored else "quantize_experts"
        print(
            f"experts in {storage} ({how}): {bytes_text(count)} in place of "
            f"{bytes_text(result['expert_bytes'])}"
        )
        if storage == "fp8":
            _print_copies(result, count)
    if result["expert_parameters"]:
        for reason in dict.fromkeys(result["not_quantised"].values()):
            storages = [name for name, why in result["not_quantised"].items() if why == reason]
            print(f"experts not in {', '.join(storages)}: {reason}")
    print(f"on {result['device']}, kept from forward to backward by all experts, per token:")
    print(
        f"  {bytes_text(result['saved_bytes_per_token'])}, "
        f"with recompute: true {bytes_text(result['saved_with_recompute'])}\n"
    )
    names = ("tier", "router", "router_backend", "experts_backend", "experts", "top_k", "shared")
    kinds: dict[tuple, list[str]] = {}
    for row in result["blocks"]:
        cells = (*(row.get(name) for name in names), row.get("saved_bytes_per_token"))
        kinds.setdefault((*cells, row["reason"]), []).append(row["path"])
    print_table(
        ("blocks", *(name.replace("_", " ") for name in names), "B/token", "reason"),
        [(_paths(paths), *cells) for cells, paths in kinds.items()],
    )


def _print_copies(result: dict[str, Any], count: int) -> None:
    """Print what experts of ``count`` bytes in FP8 take with copies, or why there are none."""
    if copies := result["fp8_copy_bytes"]:
        whole = bytes_text(count + copies)
        print(f"  with transposed copies (compute: fp8_copy): {whole}")
    if result["fp8_decoded"]:
        print(f"  compute: fp8 decodes {result['fp8_decoded']}")


def _paths(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{len(paths)} x, {paths[0]} ... {paths[-1]}"
