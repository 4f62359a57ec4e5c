"""``plan MODEL``: the memory of a training run, and a recipe that fits a card, from the config."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from typing import Any

import torch

from moe_patch.cli import models
from moe_patch.cli.output import add_json, bytes_text, print_json, print_table, progress
from moe_patch.cli.plan_fit import CHOICES, choices_of, fit
from moe_patch.cli.plan_recipe import said, text_of, training_node, write
from moe_patch.cli.plan_sizes import read_sizes
from moe_patch.config import COMPUTES, PatchConfig
from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.formats.packed import NAMES, READABLE
from moe_patch.quant.stored import stored
from moe_patch.runtime.fp8 import DECODED
from moe_patch.tools.plan_memory import CONTEXT
from moe_patch.tools.plan_total import Plan, make_plan, most_tokens
from moe_patch.tools.plan_types import OPTIMIZERS, Recipe, Sizes

UNITS = {"": 10**9, "gb": 10**9, "g": 10**9, "gib": 2**30, "mb": 10**6, "mib": 2**20}


def add(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "plan",
        help="estimate the memory of a training run and find a recipe that fits a card, from the "
        "config alone",
        description="Print the memory of a training run by part. With --memory, find the first "
        "recipe that fits and its largest number of tokens, and print a file for `moe-patch "
        "train`.",
    )
    models.add_model(parser)
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per forward (2048)")
    parser.add_argument("--rank", type=int, help="rank of the adapters; default: 16")
    parser.add_argument("--storage", choices=NAMES, help="storage of the experts")
    parser.add_argument("--linear", choices=("bf16", "nf4"), help="storage of frozen Linear layers")
    parser.add_argument("--embedding", choices=("bf16", "nf4"), help="storage of the embedding")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="default: adamw")
    parser.add_argument("--checkpointing", action=flag, help="gradient checkpointing; default: on")
    parser.add_argument("--recompute", action="store_true", help="keep only the experts' plan")
    parser.add_argument(
        "--compute", choices=COMPUTES, default="decoded", help="option of the same name"
    )
    parser.add_argument("--liger", action=flag, help="Liger's norms and loss; default: off")
    parser.add_argument("--full", action="store_true", help="train all weights, without adapters")
    parser.add_argument("--offload", action=flag, help="keep the experts in host memory")
    parser.add_argument("--ranks", type=int, default=1, help="processes, one per card (FSDP2)")
    parser.add_argument("--ddp", action="store_true", help="whole models on every card (DDP)")
    parser.add_argument("--accumulation", type=int, default=1, help="forwards per optimizer step")
    parser.add_argument("--adapters", choices=("fp32", "bf16"), help="adapter dtype; default: fp32")
    parser.add_argument(
        "--attention", metavar="NAME", help="attn_implementation; all but eager count as fused"
    )
    parser.add_argument("--memory", help="memory of the card, such as 24GB or 22.5GiB")
    parser.add_argument("--recipe", metavar="FILE", help="write the file for `moe-patch train`")
    add_json(parser)
    parser.set_defaults(command=command)


def command(args: argparse.Namespace) -> int:
    """Print the plan; return 0."""
    memory = None if args.memory is None else memory_bytes(args.memory)
    device = models.device_of(args)
    with progress(2, "reading the config") as steps:
        config = models.load_config(args.model)
        recipe, fixed = recipe_of(args, config, device)
        dtype = models.DTYPES[args.dtype] if args.dtype else models.dtype_of(config)
        steps.step("building the model on the meta device")
        model = models.build(config, dtype, "meta")
        targets = {} if args.full else _targets(model)
        sizes = read_sizes(model, targets, args.attention, device)
        storages = _storages(model, recipe)
    if memory is not None:
        choices = choices_of(fixed, storages, config.model_type, dtype)
        recipe = fit(args, sizes, recipe, choices, memory)
    plan = make_plan(sizes, recipe)
    node = training_node(args, recipe, targets, dtype) if memory or args.recipe else None
    most = None if memory is None else most_tokens(sizes, recipe, memory)
    text = None if node is None else text_of(node, recipe, args.model)
    if text is not None and args.recipe:
        write(args.recipe, text)
    result = _result(args, sizes, recipe, plan, memory, most, node)
    if args.json:
        print_json(result)
    else:
        _print(result, plan, recipe, text)
    return 0


def memory_bytes(text: str) -> int:
    """Parse "24GB" (10^9 bytes each), "22.5GiB" (2^30 each), or a bare number of GB.

    Raises:
        UnsupportedOptionError: it is none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in UNITS or not float(found[1]):
        raise UnsupportedOptionError(f"--memory {text}: accepted: a size such as 24GB or 22.5GiB")
    return int(float(found[1]) * UNITS[found[2]])


def recipe_of(
    args: argparse.Namespace, config: Any, device: torch.device
) -> tuple[Recipe, dict[str, Any]]:
    """Return the recipe of the options and the values that the user or the checkpoint fixed.

    Raises:
        UnsupportedOptionError: numbers below one, or options that exclude each other.
        UnsupportedModelError: the checkpoint's experts are packed in a format that is not read.
    """
    for name in ("tokens", "rank", "ranks", "accumulation"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UnsupportedOptionError(f"--{name} {value}: accepted: 1 or more")
    fixed = {name: getattr(args, name) for name in CHOICES if getattr(args, name) is not None}
    fixed |= _linear(args, config, fixed)
    if args.full:
        stored_in = {fixed.get("storage"), fixed.get("linear"), args.embedding}
        if not stored_in <= {"bf16", None}:
            raise UnsupportedOptionError(
                "--full trains every weight, but packed weights are frozen; accepted: --storage "
                "bf16 with --linear bf16 and --embedding bf16, or adapters without --full"
            )
        fixed |= {"storage": "bf16", "linear": "bf16", "embedding": "bf16", "adapters": "fp32"}
        if args.offload:
            raise UnsupportedOptionError(
                "--full trains every weight, but offloaded experts are frozen; accepted: --offload "
                "with adapters, or --full alone"
            )
    PatchConfig(offload_experts=bool(args.offload), compute=args.compute)  # refuses both together
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    recipe = Recipe(
        tokens=args.tokens, recompute=args.recompute, full=args.full, offload=bool(args.offload),
        ranks=args.ranks, ddp=args.ddp, accumulation=args.accumulation, hopper=hopper,
        compute=args.compute, **fixed,
    )  # fmt: skip
    if recipe.offload and recipe.shards > 1:
        raise UnsupportedOptionError(
            f"--offload with --ranks {args.ranks}: FSDP2 would shard experts that are in host "
            "memory; accepted: --ddp, or --ranks 1"
        )
    return recipe, fixed


def _linear(args: argparse.Namespace, config: Any, fixed: dict[str, Any]) -> dict[str, str]:
    """Return what a packed checkpoint fixes: the storage of Linear modules, or of the experts."""
    quantised = stored(config)
    if quantised is None:
        return {}
    if not quantised.is_read:
        raise UnsupportedModelError(f"MODEL {args.model!r}: {quantised.said}")
    if quantised.method == "bitsandbytes":
        return {"linear": args.linear or "nf4"}
    if fixed.get("storage", quantised.method) != quantised.method:
        raise UnsupportedOptionError(
            f"--storage {fixed['storage']}: the checkpoint has its experts in "
            f"{quantised.method}; accepted: {quantised.method}"
        )
    return {"storage": quantised.method}


def _targets(model: Any) -> dict[str, list[str]]:
    from moe_patch.patching.discover import discover
    from moe_patch.patching.lora_targets import lora_targets

    return lora_targets(model) if discover(model) else {}


def _storages(model: Any, recipe: Recipe) -> tuple[str, ...]:
    """Return the storages that the experts can have, in the order of NAMES.

    Raises:
        UnsupportedOptionError: the recipe's is none of them; says which expert, and why.
    """
    from moe_patch.quant.memory import experts_memory

    if recipe.full:
        return ("bf16",)
    try:
        _, found, refused = experts_memory(model)
    except UnsupportedModelError as error:
        found, refused = {}, dict.fromkeys(READABLE, str(error))
    if recipe.storage != "bf16" and recipe.storage not in found:
        why = refused.get(recipe.storage, "only for checkpoints that store their experts in it")
        raise UnsupportedOptionError(f"--storage {recipe.storage}: {why}")
    return ("bf16", *(name for name in READABLE if name in found))


def _result(
    args: argparse.Namespace,
    sizes: Sizes,
    recipe: Recipe,
    plan: Plan,
    memory: int | None,
    most: int | None,
    node: dict[str, Any] | None,
) -> dict[str, Any]:
    return {
        "model": args.model,
        "options": asdict(recipe),
        "weights": plan.weights,
        "parts": plan.parts,
        "moments": plan.moments,
        "allocated_bytes": plan.allocated,
        "reserved_bytes": plan.reserved,
        "needed_bytes": plan.needed,
        "memory_bytes": memory,
        "most_tokens": most,
        "notes": _notes(sizes, recipe),
        "recipe": node,
    }


def _notes(sizes: Sizes, recipe: Recipe) -> list[str]:
    """Return sentences on what the plan cannot see, and on options without effect."""
    found: list[str] = []
    if recipe.compute != DECODED and recipe.storage == "fp8":
        layers = {one.decoded: one.layer for one in reversed(sizes.weights) if one.decoded}
        found = [
            f"compute: {recipe.compute} has no effect (as in layer {layer}): {why}"
            for why, layer in layers.items()
        ]
    if not any(layer.eager for layer in sizes.layers):
        return found
    return [
        *found,
        "transformers has no fused attention for this model: each layer keeps T x T "
        "probabilities per head, and the plan counts them; --attention flex_attention keeps none, "
        "where the model has it",
    ]


def _print(result: dict[str, Any], plan: Plan, recipe: Recipe, text: str | None) -> None:
    print(f"{result['model']}: {recipe.tokens:,} tokens, {said(recipe)}\n")
    rows = [(f"weights: {kind}", bytes_text(n)) for kind, n in plan.weights.items() if n]
    rows += [(name.replace("_", " "), bytes_text(n)) for name, n in plan.parts.items() if n]
    print_table(("part", "bytes"), rows)
    print()
    print_table(
        ("moment of a step", "allocated"), [(k, bytes_text(n)) for k, n in plan.moments.items()]
    )
    print(
        f"\npeak {bytes_text(plan.allocated)}; each card needs {bytes_text(plan.needed)}: "
        f"{bytes_text(plan.reserved)} for torch's allocator and {bytes_text(CONTEXT)} for CUDA's "
        "context"
    )
    if result["memory_bytes"] is not None:
        print(f"fits {bytes_text(result['memory_bytes'])}; most tokens: {result['most_tokens']:,}")
    for note in result["notes"]:
        print(f"note: {note}")
    if text is not None:
        print(f"\n{text}", end="")
