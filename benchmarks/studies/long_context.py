"""Time and peak memory of one block's experts on long contexts, in chunks of tokens and at once.

    python benchmarks/studies/long_context.py --out rows.jsonl --commit SHA
    python benchmarks/studies/long_context.py --tokens 65536 --chunk 21845,auto

The experts alone have Qwen3-30B-A3B's sizes and random routing. Modes: "kept" trains and keeps h;
"recompute" trains and keeps the plan; "no_grad" runs forward, and "first_forward" the forward of a
checkpoint that is not reentrant. A row's ``over_gib`` is torch.cuda.max_memory_allocated less what
a call has to hold: inputs, outputs, their gradients, h in mode "kept", and ``sums_gib``. That is
what chunks need for gradients of trained weights, w a of all rows or fp32 sums. ``times`` compares
with the call that keeps h, all tokens at once; ``times_same`` with the same mode. Calls run in
turn, in a random order; times are medians.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_patch.formats.packed import pack
from moe_patch.ops.experts.op import experts_mlp
from moe_patch.types import ExpertWeights, Glu, Lora

D, F, E, K, R = 2048, 768, 128, 8, 16
GIB = 1 << 30
MODES = ("no_grad", "first_forward", "kept", "recompute")
FORWARD = MODES[:2]


class Block(NamedTuple):
    """Operands of a call; ``trained`` are the weights or factors that take gradients."""

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    w: ExpertWeights
    lora13: Lora | None
    lora2: Lora | None
    trained: tuple[Tensor, ...]
    dout_TD: Tensor


def build(tokens: int, train: str) -> Block:
    """Make random operands; ``train`` is "lora", "full" or "qlora" (NF4 weights and LoRA)."""
    torch.manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale

    ids_TK = torch.cat(
        [torch.rand(4096, E, device="cuda").topk(K, dim=1).indices for _ in range(tokens // 4096)]
    )
    w: Any = ExpertWeights(random(E, 2 * F, D, scale=D**-0.5), random(E, D, F, scale=F**-0.5))
    if train == "full":
        lora13 = lora2 = None
        trained = tuple(t.requires_grad_() for t in w[:2])
    else:
        factors = [
            torch.randn(shape, device="cuda").mul_(shape[2] ** -0.5).requires_grad_()
            for shape in ((E, R, D), (E, 2 * F, R), (E, R, F), (E, D, R))
        ]
        lora13, lora2, trained = Lora(*factors[:2], 1.0), Lora(*factors[2:], 1.0), tuple(factors)
    if train == "qlora":
        w = ExpertWeights(*(pack(t, "nf4", t.device, "w") for t in w[:2]))
    return Block(
        random(tokens, D).requires_grad_(), ids_TK,
        (torch.rand(tokens, K, device="cuda") / K).requires_grad_(),
        w, lora13, lora2, trained, random(tokens, D),
    )  # fmt: skip


def call(block: Block, mode: str, chunk: int | str) -> list[Tensor]:
    """Run forward, and backward in training; return output and gradients."""

    def forward(x_TD: Tensor) -> Tensor:
        return experts_mlp(
            x_TD, block.ids_TK, block.weights_TK, block.w, Glu("silu"),
            lora13=block.lora13, lora2=block.lora2, backend="triton",
            recompute=mode == "recompute", chunk_tokens=chunk,
        )  # fmt: skip

    with torch.set_grad_enabled(mode != "no_grad"):
        if mode == "first_forward":
            out_TD = checkpoint(forward, block.x_TD, use_reentrant=False)
        else:
            out_TD = forward(block.x_TD)
    if mode in FORWARD:
        return [out_TD.detach()]
    leaves = (block.x_TD, block.weights_TK, *block.trained)
    return [out_TD.detach(), *torch.autograd.grad(out_TD, leaves, block.dout_TD)]


def sums_bytes(block: Block, mode: str, chunk: str) -> int:
    """Return what chunks need for the gradients of trained weights (kernels/experts/chunked.py)."""
    if chunk == "0" or block.lora13 is not None or mode in FORWARD:
        return 0
    return (
        block.ids_TK.numel() * F * 2 if mode == "kept" else sum(4 * t.numel() for t in block.w[:2])
    )


def measure(
    block: Block, mode: str, run: Callable[[], list[Tensor]], sums: int
) -> dict[str, float]:
    """Return the bytes of one call's peak, by what they are for, in GiB."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    by_token = sum(t.nbytes for t in found[:3])
    h = block.x_TD.shape[0] * K * 2 * F * 2 if mode == "kept" else 0
    gradients = sum(t.nbytes for t in found[3:])
    return {
        "peak_gib": peak / GIB,
        "outputs_gib": by_token / GIB,
        "h_gib": h / GIB,
        "gradients_gib": gradients / GIB,
        "sums_gib": sums / GIB,
        "over_gib": (peak - by_token - h - gradients - sums) / GIB,
    }


def milliseconds(runs: dict[str, Callable[[], list[Tensor]]], repeats: int) -> dict[str, float]:
    """Return medians of calls in turn, in another order each time.

    The card limits its power, so a call's time depends on what ran before it.
    """
    found: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats):
        for name, run in random.Random(repeat).sample(list(runs.items()), len(runs)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            found[name].append(start.elapsed_time(end))
    return {name: statistics.median(times) for name, times in found.items()}


def distances(found: list[Tensor], whole: list[Tensor]) -> tuple[int, float]:
    """Return how many results by token differ in a bit, and the others' largest distance."""
    differ = sum(not torch.equal(a, b) for a, b in zip(found[:3], whole[:3], strict=True))
    others = [
        float((a - b).float().norm() / b.float().norm())
        for a, b in zip(found[3:], whole[3:], strict=True)
    ]
    return differ, max(others, default=0.0)


def study(tokens: int, train: str, mode: str, chunks: list[str], args: Any) -> list[dict[str, Any]]:
    """Measure one combination; the first entry of ``chunks`` is "0", all tokens at once."""
    block = build(tokens, train)
    runs = {
        name: (lambda c=name: call(block, mode, c if c == "auto" else int(c))) for name in chunks
    }
    whole, rows = runs["0"](), []
    for name, run in runs.items():
        found = run()
        differ, distance = distances(found, whole)
        again = run()
        repeats = all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        del found, again
        rows.append({"chunk": name, "differ": differ, "distance": distance, "repeats": repeats})
    del whole
    for row, run in zip(rows, runs.values(), strict=True):
        row.update(measure(block, mode, run, sums_bytes(block, mode, row["chunk"])))
    # Recomputing is compared with keeping h as well.
    base = (lambda: call(block, "kept", 0)) if mode == "recompute" else runs["0"]
    times = milliseconds({"base": base, **runs}, args.repeats)
    for row in rows:
        row["ms"] = times[row["chunk"]]
        row["times"] = row["ms"] / times["base" if mode == "recompute" else "0"]
        row["times_same"] = row["ms"] / times["0"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536, 262144])
    parser.add_argument("--train", nargs="+", default=["lora", "full"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--chunk", default="auto", help="values of chunk_tokens, by commas")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after these")
    parser.add_argument("--commit", default="", help="the commit that runs, for the rows")
    parser.add_argument("--out", type=Path, help="append rows to this file")
    args = parser.parse_args()
    begun = time.time()
    common = {
        "shape": "qwen3_30b", "card": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "commit": args.commit,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }  # fmt: skip
    for tokens in args.tokens:
        for train in args.train:
            for mode in args.modes:
                if time.time() - begun > args.seconds:
                    print(f"left out: {tokens} {train} {mode}", flush=True)
                    continue
                if mode in FORWARD and train == "full":
                    continue
                chunks = ["0", *args.chunk.split(",")]
                for row in study(tokens, train, mode, chunks, args):
                    row = {"T": tokens, "train": train, "mode": mode, **row, **common}
                    short = {k: v for k, v in row.items() if k not in common}
                    print(f"{time.time() - begun:6.1f}", json.dumps(short), flush=True)
                    if args.out:
                        with args.out.open("a") as file:
                            file.write(json.dumps(row) + "\n")
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
