"""Measure tokens per second of LoRA on experts on several cards, in each layout.

    python benchmarks/studies/bench_parallel_lora.py --world 2
    python benchmarks/studies/bench_parallel_lora.py --world 2 --layers 48 --checkpointing
    python benchmarks/studies/bench_parallel_lora.py --world 1 2 4 8 --step-tokens 65536
    python benchmarks/studies/bench_parallel_lora.py --world 1 2 --tiny --out rows.jsonl    on a CPU

Rows are appended to benchmarks/results/parallel.jsonl, with the adapters' rank as ``lora``.

A step is forward and backward in bf16 with fp32 adapters on both projections of all experts,
without an optimizer. The model has layers of Qwen3-30B-A3B's sizes with random weights. Every rank
has its own batch, except where tensor parallelism makes them share one. ``peft`` is PEFT on
transformers' own experts; it cannot run on divided experts.

With ``--step-tokens`` all ranks together have so many tokens in a step, whatever their number:
each accumulates gradients over several batches. Such rows have ``step_tokens`` and, on cards, the
split of a profiled step's time on each rank (bench_lib/kernel_split.py).
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Prefer the checkout to an installed moe_patch.
sys.path[1:1] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from bench_lib import parallel_models as models  # noqa: E402
from bench_lib.kernel_split import profiled  # noqa: E402
from bench_lib.ranks import Rank, Rows, add_arguments, rows_of, start, step_ms  # noqa: E402

from moe_patch import unpatch_model  # noqa: E402

THREADS = 8  # PEFT draws factors of divided experts on the CPU.
PEFT_RUNS = ("one", "ddp", "fsdp2")


def measure(rank: Rank, options: argparse.Namespace, rows: Rows) -> None:
    """Measure the layouts of one world; rank 0 writes the rows."""
    for layout in options.layouts if rank.world > 1 else ["one"]:
        if rank.number == 0:
            rows.log(f"{layout} on {rank.world} begins")
        measure_layout(rank, layout, options, rows)
        gc.collect()  # A patched model has cycles, and would stay beside the next.
        if rank.device.type == "cuda":
            torch.cuda.empty_cache()


def measure_layout(rank: Rank, layout: str, options: argparse.Namespace, rows: Rows) -> None:
    """Measure one layout with each implementation that runs there."""
    model, wrapped, batches = models.adapted(
        models.TINY if options.tiny else models.CARD, options.layers, layout, rank.world,
        options.lora, rank.device, options.checkpointing,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(rank.number if batches > 1 else 0)
    tokens = options.sequences * options.length
    passes = (options.step_tokens or tokens * batches) // (tokens * batches)
    shape = (passes, options.sequences, options.length)
    ids = torch.randint(model.config.vocab_size, shape, generator=generator).to(rank.device)
    step = step_of(wrapped, ids)
    for impl in ("moe_patch", "peft"):
        if impl not in options.impls or (impl == "peft" and layout not in PEFT_RUNS):
            continue
        if impl == "peft":
            unpatch_model(model)
        if rank.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        median, host = step_ms(rank, step, options.steps)
        peaks = rank.peaks()
        measured = {
            "layout": layout, "world": rank.world, "impl": impl, "median_ms": round(median, 3),
            "host_ms": round(host, 3),
            "tokens_per_s": round(batches * ids.numel() / median * 1e3),
            "peak_bytes": peaks[0], "peaks": peaks,
        }  # fmt: skip
        if options.step_tokens:
            measured |= {"step_tokens": passes * tokens * batches, "passes": passes}
            if rank.device.type == "cuda":
                measured["split"] = rank.gather(profiled(step))
        if rank.number == 0:
            rows.write(measured)


def step_of(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    """Return a step over all batches of a rank; gradients are reduced in the last backward."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        for number, batch in enumerate(ids):
            if len(ids) > 1:
                models.reduces(model, number == len(ids) - 1)
            model(input_ids=batch, labels=batch).loss.backward()

    return step


def main() -> int:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description="Tokens per second of LoRA on several cards.")
    parser.add_argument("--world", type=int, nargs="+", default=[2])
    parser.add_argument("--layouts", nargs="+", choices=models.LORA_LAYOUTS[1:],
                        default=["ddp", "fsdp2", "ep"])  # fmt: skip
    parser.add_argument("--impls", nargs="+", choices=("moe_patch", "peft"),
                        default=["moe_patch", "peft"])  # fmt: skip
    parser.add_argument("--lora", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sequences", type=int, default=2, help="in one batch")
    parser.add_argument("--length", type=int, default=4096, help="tokens of one sequence")
    parser.add_argument("--checkpointing", action="store_true", help="of each layer")
    parser.add_argument("--step-tokens", type=int, help="tokens of a step on all ranks together")
    add_arguments(parser, steps=5)
    options = parser.parse_args()
    if options.tiny:
        options.layers, options.length = min(options.layers, 2), min(options.length, 32)
        options.step_tokens = options.step_tokens and 512
    names = ("layers", "sequences", "steps", "lora", "checkpointing")
    tokens = options.sequences * options.length
    rows = rows_of(options, names, size="tiny" if options.tiny else "card", tokens=tokens)
    start(options.world, measure, (options, rows), THREADS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
