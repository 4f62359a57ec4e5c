"""``verify MODEL``: patched against unpatched on this machine, number by number."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import torch

from moe_patch.cli import models
from moe_patch.cli.compare import compare
from moe_patch.cli.output import add_json, print_json, print_table, progress
from moe_patch.cli.status import CHECK_FAILED
from moe_patch.errors import UnsupportedOptionError


def add(subparsers: Any) -> None:
    """Add the parser."""
    parser = subparsers.add_parser(
        "verify",
        help="compare a patched model with the unpatched one on this machine",
        description="Logits, loss, router logits and every gradient of a patched model against "
        "transformers' eager experts, on random token ids. A folder without weights gets random "
        "ones. Where both ways must meet the same experts, the unpatched model's choice is "
        "replayed. Status 1 if a number is above its limit.",
    )
    models.add_model(parser)
    parser.add_argument("--random", action="store_true", help="random weights, load none")
    parser.add_argument("--layers", type=int, metavar="N", help="only the first N layers")
    parser.add_argument("--backend", choices=("auto", "torch", "triton"), default="auto")
    parser.add_argument("--batch", type=int, default=2, metavar="B", help="sequences (default 2)")
    parser.add_argument("--length", type=int, default=32, metavar="L", help="tokens each (32)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, help="one limit in place of all")
    add_json(parser)
    parser.set_defaults(command=command)


def command(args: argparse.Namespace) -> int:
    """Compare and print; status 1 when a check fails."""
    from moe_patch.patch import patch_model, unpatch_model

    if args.batch < 1 or args.length < 2:
        raise UnsupportedOptionError("--batch and --length: at least 1 sequence of 2 tokens")
    device, name = models.device_of(args), args.dtype or "float32"
    with progress(4, "reading the config") as steps:
        config = models.load_config(args.model)
        if args.layers is not None:
            models.shorten(config, args.layers)
        steps.step("making the model")
        random = args.random or not models.has_weights(args.model)
        model = _make(args, config, models.DTYPES[name], device, random)
        with models.explained(f"MODEL: {type(model).__name__} does not run on hidden states"):
            # A refusal comes before any run of the whole model.
            unpatch_model(patch_model(model, backend=args.backend))
        batch = _inputs(model, args)
        steps.step("unpatched, then patched")
        checks, rows = compare(model, batch, name, args.backend, args.limit)
        steps.step("done")
    weights = "random" if random else "loaded"
    result = {
        "model": args.model,
        "model_type": config.model_type,
        "weights": weights,
        "dtype": name,
        "device": str(device),
        "passed": all(check.passed for check in checks),
        "checks": [{**asdict(check), "passed": check.passed} for check in checks],
        "blocks": [asdict(row) for row in rows],
    }
    if args.json:
        print_json(result)
    else:
        _print(result)
    return 0 if result["passed"] else CHECK_FAILED


def _make(
    args: argparse.Namespace, config: Any, dtype: torch.dtype, device: torch.device, random: bool
) -> Any:
    """The unpatched model on transformers' eager paths, weights loaded or random."""
    options = {"attn_implementation": "eager"}
    if not random:
        model = models.load(args.model, config, dtype, device, **options)
    else:
        torch.manual_seed(args.seed)
        model = models.build(config, dtype, "cpu", **options)
        models.stir(model, args.seed)
        model = model.to(device)
    model.set_experts_implementation("eager")
    return model


def _inputs(model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Random token ids, with labels and router logits where the model takes them."""
    from inspect import signature

    generator = torch.Generator().manual_seed(args.seed)
    name, size = type(model).__name__, (args.batch, args.length)
    with models.explained(f"MODEL: {name} takes no token ids"):
        vocabulary = model.get_input_embeddings().weight.shape[0]
    with models.explained(f"--batch {args.batch} --length {args.length}"):
        ids = torch.randint(vocabulary, size, generator=generator).to(model.device)
    batch: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    takes = signature(model.forward).parameters
    if routers := "output_router_logits" in takes:
        batch["output_router_logits"] = False
    with models.explained(f"MODEL: {name} does not run on token ids alone"), torch.no_grad():
        out = model(**batch)
    if routers:
        batch["output_router_logits"] = _has_router_logits(model, batch)
    if "labels" in takes:  # some heads have fewer rows than the embedding
        batch["labels"] = batch["input_ids"] % out.logits.shape[-1]
    return batch


def _has_router_logits(model: Any, batch: dict[str, Any]) -> bool:
    """False where its auxiliary loss fails for want of a layer that has any (hash routing)."""
    try:
        with torch.no_grad():
            model(**{**batch, "output_router_logits": True})
    except IndexError:
        return False
    return True


def _print(result: dict[str, Any]) -> None:
    blocks = result["blocks"]
    backends = sorted({row["experts_backend"] for row in blocks})
    print(
        f"{result['model']}: {result['model_type']}, {result['weights']} weights, "
        f"{result['dtype']} on {result['device']}, {len(blocks)} MoE blocks on "
        + ", ".join(backends)
    )
    print_table(
        ("compared", "relative error", "limit", "", "worst"),
        [
            (c["name"], f"{c['error']:.1e}", f"{c['limit']:.0e}", _word(c), c["where"])
            for c in result["checks"]
        ],
    )
    print("patched and unpatched agree" if result["passed"] else "patched and unpatched DIFFER")


def _word(check: dict[str, Any]) -> str:
    return "ok" if check["passed"] else "FAILED"
