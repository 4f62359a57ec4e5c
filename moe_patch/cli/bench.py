"""``bench``: time one MoE block of a model, patched and unpatched; or run scripts/bench.py."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import moe_patch
from moe_patch.cli import bench_report, models
from moe_patch.cli.limits import check_fits
from moe_patch.cli.output import add_json, bytes_text, print_json, print_table, progress
from moe_patch.cli.status import CHECK_FAILED
from moe_patch.config import PatchConfig
from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.patching.discover import FoundBlock, discover

SCRIPT = Path("scripts") / "bench.py"
# First arguments of scripts/bench.py; give a folder of such a name as ./experts.
GRID = (
    "routing", "product_key", "plan", "experts", "lora", "block", "decode", "model", "quantised",
    "signals", "fp8", "all", "table", "chart", "docs",
)  # fmt: skip
MIN_SECONDS = 1.0


def add(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "bench",
        help="time one MoE block of a model on this machine, patched and unpatched",
        description="Time one MoE block of MODEL with random weights at the model's own sizes, "
        "unpatched (transformers' default) and patched: forward, and forward with backward.",
        epilog=f"In a checkout, `bench OP ...` runs {SCRIPT} OP ... with its peers (liger, "
        f"scattermoe, ...) and rows; OP: {', '.join(GRID)}.",
    )
    models.add_model(parser, optional=True)
    parser.add_argument("--tokens", type=int, metavar="T", help="default 4096, on a CPU 512")
    parser.add_argument(
        "--report",
        action="store_true",
        help="print one block of text to paste into an issue: card, versions, kernels, times at "
        "several token counts and the self-test; without MODEL a block of Qwen3-30B-A3B's size",
    )
    parser.add_argument("--backend", choices=("auto", "torch", "triton"), default="auto")
    parser.add_argument("--recompute", action="store_true", help="patch with recompute: true")
    add_json(parser)
    parser.set_defaults(command=command)


def forward_to_script(argv: Sequence[str]) -> int | None:
    """Run scripts/bench.py if the arguments are meant for it; return its exit status, else None.

    Raises:
        UnsupportedOptionError: they are, but this installation is not a checkout.
    """
    if len(argv) < 2 or argv[0] != "bench" or argv[1] not in GRID:
        return None
    for root in (Path.cwd(), Path(moe_patch.__file__).parents[1]):
        if (root / SCRIPT).is_file():
            return subprocess.call([sys.executable, str(root / SCRIPT), *argv[1:]])
    raise UnsupportedOptionError(
        f"bench {argv[1]}: {SCRIPT} is part of a source checkout, not of the wheel; run it there, "
        "or time one block of a model here: moe-patch bench MODEL"
    )


def command(args: argparse.Namespace) -> int:
    """Time the block and print the rows."""
    device = models.device_of(args)
    if args.tokens is not None and args.tokens < 1:
        raise UnsupportedOptionError(f"--tokens {args.tokens}: at least 1")
    if args.report:
        return _report(args, device)
    if args.model is None:
        raise UnsupportedOptionError(
            "bench: MODEL is missing; accepted: a hub id or a folder, or --report without one"
        )
    tokens = (512 if device.type == "cpu" else 4096) if args.tokens is None else args.tokens
    result = _timed(args, models.load_config(args.model), device, tokens)
    if args.json:
        print_json(result)
    else:
        _print(result)
    return 0


def _report(args: argparse.Namespace, device: torch.device) -> int:
    """Time several token counts and print all that an issue needs; status 1 as the self-test."""
    counts = bench_report.TOKENS_ON_CPU if device.type == "cpu" else bench_report.TOKENS
    counts = counts if args.tokens is None else (args.tokens,)
    if args.model is None:
        config, args.model = bench_report.default_config(), "Qwen3-30B-A3B's size"
    else:
        config = models.load_config(args.model)
    points = []
    for tokens in counts:
        try:
            points.append(_timed(args, config, device, tokens))
        except torch.OutOfMemoryError:
            points.append(_head(args, config, device, tokens) | {"failed": "out of memory"})
    found = bench_report.about(device)
    if args.json:
        print_json(found | {"points": points})
    else:
        print(bench_report.text_of(found, points))
    return CHECK_FAILED if found["selftest"]["failed"] else 0


def _head(
    args: argparse.Namespace, config: Any, device: torch.device, tokens: int
) -> dict[str, Any]:
    """Return the model, block, device, dtype and size that are timed."""
    return {
        "model": args.model,
        "block": type(config).__name__.removesuffix("Config"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "dtype": args.dtype or ("float32" if device.type == "cpu" else "bfloat16"),
        "tokens": tokens,
        "threads": torch.get_num_threads(),
    }


def _timed(
    args: argparse.Namespace, config: Any, device: torch.device, tokens: int
) -> dict[str, Any]:
    """Return the times of one block at one token count."""
    head = _head(args, config, device, tokens)
    dtype = models.DTYPES[head["dtype"]]
    options = PatchConfig(backend=args.backend, recompute=args.recompute)
    with progress(5, "building the block") as steps:
        model = models.build(config, dtype, "meta")
        found = _one_block(model)
        shape = tokens, _hidden(found, model)
        bytes_of_x = math.prod(shape) * dtype.itemsize
        held = "the block's input, its gradient and the output"
        check_fits(f"--tokens {tokens}", 3 * bytes_of_x, held, device)
        block = _fill(found, device)
        rows = _measure(found, shape, options, steps.step)
    return head | {"block": f"{type(block).__module__}.{type(block).__name__}", "rows": rows}


def _one_block(model: nn.Module) -> FoundBlock:
    """Return the last MoE block, because the first may be of a special kind."""
    blocks = [b for b in discover(model) if b.block is not None and not b.refused]
    if not blocks:
        raise UnsupportedModelError(
            f"{type(model).__name__}: no MoE block with a class of its own to time; `moe-patch "
            "families` lists the model types that have one"
        )
    return blocks[-1]


def _fill(found: FoundBlock, device: torch.device) -> nn.Module:
    """Return the block with random weights on the device."""
    block = found.block
    assert block is not None
    block.to_empty(device=device)
    with torch.no_grad():
        for tensor in [*block.parameters(), *block.buffers()]:
            tensor.zero_()
            if tensor.is_floating_point() and tensor.dim() > 1:
                tensor.normal_(std=tensor.shape[-1] ** -0.5)
    models.perturb(block, seed=0)
    return block.train()


def _hidden(found: FoundBlock, model: Any) -> int:
    """Return the width of the block's input, from its router or else from the embedding."""
    for _, router in found.routers:
        if isinstance(weight := getattr(router, "weight", None), Tensor):
            return weight.shape[-1]
    size: int = model.get_input_embeddings().weight.shape[-1]
    return size


def _measure(
    found: FoundBlock,
    shape: tuple[int, int],
    options: PatchConfig,
    step: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Return times of both passes, unpatched and patched, for an input of (tokens, columns)."""
    from moe_patch.patching.patch import patch_model
    from moe_patch.patching.report import patch_report

    block: Any = found.block
    weight = next(p for p in block.parameters() if p.dim() > 1)
    x = torch.randn(1, *shape, device=weight.device, dtype=weight.dtype, requires_grad=True)
    call = found.spec.check_call or (lambda module, states: module(states))

    def forward() -> Tensor:
        out = call(block, x)
        return out[0] if isinstance(out, tuple) else out

    inputs = [x, *(p for p in block.parameters() if p.requires_grad)]  # a bias may be frozen
    rows = []
    for name in ("unpatched", "patched"):
        backend = "transformers"
        if name == "patched":
            patch_model(block, options)
            backend = patch_report(block)[0].experts_backend
        alone = f"{type(block).__name__} does not run on hidden states alone"
        with models.explained(alone, UnsupportedModelError):
            kept = _saved_bytes(forward, inputs)
        for which, function in (("fwd", forward), ("fwd+bwd", lambda: _both(forward, inputs))):
            step(f"{name}, {which}")
            ms = _median_ms(function)
            rows.append(
                {"what": name, "backend": backend, "pass": which, "ms": ms, "saved_bytes": kept}
            )
    return rows


def _both(forward: Callable[[], Tensor], inputs: list[Tensor]) -> None:
    out = forward()
    torch.autograd.grad(out, inputs, torch.ones_like(out), allow_unused=True)


def _saved_bytes(forward: Callable[[], Tensor], inputs: list[Tensor]) -> int:
    """Return the bytes of distinct storages that autograd keeps beyond inputs and weights."""
    known = {t.untyped_storage().data_ptr() for t in inputs}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    del out
    return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in known)


def _median_ms(function: Callable[[], Any]) -> float:
    from torch.utils.benchmark import Timer

    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    timer.timeit(3)  # warm up: the first calls compile kernels
    return timer.blocked_autorange(min_run_time=MIN_SECONDS).median * 1e3


def _print(result: dict[str, Any]) -> None:
    print(
        f"{result['block'].rpartition('.')[2]} of {result['model']}: {result['tokens']} tokens, "
        f"{result['dtype']}, {result['device']}"
    )
    times = {(row["what"], row["pass"]): row["ms"] for row in result["rows"]}
    print_table(
        ("block", "experts", "pass", "median ms", "faster", "kept for backward"),
        [
            (
                row["what"],
                row["backend"],
                row["pass"],
                f"{row['ms']:.3f}",
                f"{times['unpatched', row['pass']] / row['ms']:.2f}x",
                bytes_text(row["saved_bytes"]),
            )
            for row in result["rows"]
        ],
    )
