"""``verify MODEL``: compare a patched with an unpatched model, number by number."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import torch

from moe_patch.cli import models, verify_adapter
from moe_patch.cli.compare import Run, compare, run
from moe_patch.cli.limits import check_fits, check_seed
from moe_patch.cli.output import add_json, print_json, print_table, progress
from moe_patch.cli.status import CHECK_FAILED
from moe_patch.config import COMPUTES
from moe_patch.errors import UnsupportedOptionError
from moe_patch.runtime.fp8 import DECODED

Made = TypeVar("Made")


def add(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "verify",
        help="compare a patched model with the unpatched one on this machine",
        description="Logits, loss, router logits and every gradient of a patched model against "
        "transformers' eager experts, on random token ids. A folder without weights gets random "
        "ones. If the two choose different experts, the unpatched model's choice is replayed. "
        "Attention is the model's own, or eager if that does not run here, which the output "
        "says. Status 1 if a number is above its limit.",
    )
    models.add_model(parser, optional=True)
    parser.add_argument("--random", action="store_true", help="random weights, load none")
    parser.add_argument("--layers", type=int, metavar="N", help="only the first N layers")
    parser.add_argument("--backend", choices=("auto", "torch", "triton"), default="auto")
    parser.add_argument(
        "--compute", choices=COMPUTES, default="decoded",
        help="option of the same name; for FP8 the experts of both models are quantised first",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, default=2, metavar="B", help="sequences (default 2)")
    parser.add_argument("--length", type=int, default=32, metavar="L", help="tokens each (32)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, help="one limit for all numbers")
    verify_adapter.add_options(parser)
    add_json(parser)
    parser.set_defaults(command=command)


def command(args: argparse.Namespace) -> int:
    """Compare and print; return status 1 if a check fails."""
    from moe_patch.patching.patch import patch_model, unpatch_model
    from moe_patch.quant.surgery import quantize_experts

    _check_numbers(args)
    if args.adapter is not None:
        return verify_adapter.command(args)
    if args.model is None:
        raise UnsupportedOptionError("verify: name MODEL, or --adapter DIR; see verify --help")
    device, name = models.device_of(args), args.dtype or "float32"
    with progress(4, "reading the config") as steps:
        config = models.load_config(args.model)
        if args.layers is not None:
            models.shorten(config, args.layers)
        steps.step("making the model")
        random = args.random or not models.has_weights(args.model)
        model, unbuilt = _make(args, config, models.DTYPES[name], device, random)
        with models.explained(f"MODEL: {type(model).__name__} does not run on hidden states"):
            # Refuse the model before the whole of it runs.
            unpatch_model(patch_model(model, backend=args.backend))
        if args.compute != DECODED:
            quantize_experts(model, "fp8")
        steps.step("unpatched, then patched")
        batch, reference, failed = _unpatched(model, args)
        checks, rows = compare(
            model, batch, reference, name, args.backend, args.limit, compute=args.compute
        )
        steps.step("done")
    weights = "random" if random else "loaded"
    result = {
        "model": args.model,
        "model_type": config.model_type,
        "weights": weights,
        "dtype": name,
        "compute": args.compute,
        "device": str(device),
        "attention": model.config._attn_implementation,
        "attention_reason": unbuilt or failed,
        "passed": all(check.passed for check in checks),
        "checks": [{**asdict(check), "passed": check.passed} for check in checks],
        "blocks": [asdict(row) for row in rows],
    }
    if args.json:
        print_json(result)
    else:
        _print(result)
    return 0 if result["passed"] else CHECK_FAILED


def _check_numbers(args: argparse.Namespace) -> None:
    if args.batch < 1 or args.length < 2:
        raise UnsupportedOptionError("--batch and --length: at least 1 sequence of 2 tokens")
    if args.limit is not None and not args.limit >= 0:
        raise UnsupportedOptionError(f"--limit {args.limit}: accepted: a number of at least 0")
    check_seed(args.seed)


def _make(
    args: argparse.Namespace, config: Any, dtype: torch.dtype, device: torch.device, random: bool
) -> tuple[Any, str]:
    """Return the unpatched model on eager experts, and why attention is not its own, if so."""

    def make(**options: str) -> Any:
        if not random:
            return models.load(args.model, config, dtype, device, **options)
        torch.manual_seed(args.seed)
        model = models.build(config, dtype, "cpu", **options)
        models.perturb(model, args.seed)
        return model.to(device)

    own = config._attn_implementation  # None lets transformers choose one that works here.
    model, reason = _or_eager(own, make, lambda: make(attn_implementation="eager"))
    model.set_experts_implementation("eager")
    return model, reason


def _or_eager(
    own: str | None, make: Callable[[], Made], make_eager: Callable[[], Made]
) -> tuple[Made, str]:
    """Run with the model's attention, or else with eager; return the result and the reason.

    Raises:
        UnsupportedOptionError: of the first run, if neither works or the model's own is eager.
    """
    try:
        return make(), ""
    except UnsupportedOptionError as error:
        if own in (None, "eager"):
            raise
        try:
            return make_eager(), f"the model's own, {own}, fails here: {error}"
        except UnsupportedOptionError:
            raise error from None


def _unpatched(model: Any, args: argparse.Namespace) -> tuple[dict[str, Any], Run, str]:
    """Return inputs, the results of the unpatched model, and why attention is eager, if so."""

    def once() -> tuple[dict[str, Any], Run]:
        batch = _inputs(model, args)
        with models.explained(f"MODEL: {type(model).__name__} does not run forward and backward"):
            return batch, run(model, batch)

    def once_on_eager() -> tuple[dict[str, Any], Run]:
        model.set_attn_implementation("eager")
        return once()

    (batch, reference), reason = _or_eager(model.config._attn_implementation, once, once_on_eager)
    return batch, reference, reason


def _inputs(model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Return random token ids, with labels and router logits if the model accepts them."""
    from inspect import signature

    generator = torch.Generator().manual_seed(args.seed)
    name, size = type(model).__name__, (args.batch, args.length)
    with models.explained(f"MODEL: {name} takes no token ids"):
        weight = model.get_input_embeddings().weight
        vocabulary, D = weight.shape
    needed = args.batch * args.length * (8 + D * weight.element_size())
    held = "the token ids and their embeddings"
    check_fits(f"--batch {args.batch} --length {args.length}", needed, held, model.device)
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
    if "labels" in takes:  # some heads have fewer classes than the embedding has rows
        batch["labels"] = batch["input_ids"] % out.logits.shape[-1]
    return batch


def _has_router_logits(model: Any, batch: dict[str, Any]) -> bool:
    """Return False if the auxiliary loss fails for lack of router logits (hash routing)."""
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
    if result["attention_reason"]:
        print(f"attention: {result['attention']}; {result['attention_reason']}")
    if result["compute"] != DECODED:
        for reason in dict.fromkeys(row["reason"] for row in blocks if row["reason"]):
            print(reason)
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
