"""Measure QLoRA on several cards: tokens per second and peak memory under DDP and FSDP2.

    python benchmarks/studies/bench_qlora_ranks.py --world 2
    python benchmarks/studies/bench_qlora_ranks.py --tiny --out rows.jsonl    on a CPU

Rows are appended to benchmarks/results/parallel.jsonl. A step is forward, backward and AdamW on one
sequence a rank, with gradient checkpointing, over layers of Qwen3-30B-A3B's sizes. Experts are
random packed bytes (:mod:`qlora_30b`); under FSDP2 they are sharded and gathered as bytes.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Prefer the checkout to an installed moe_patch.
sys.path[1:1] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "studies")]

import qlora_30b  # noqa: E402
import torch  # noqa: E402
from bench_lib.parallel_models import data_parallel, shard  # noqa: E402
from bench_lib.ranks import Rank, Rows, add_arguments, rows_of, start, step_ms  # noqa: E402

from moe_patch.quant.surgery import ignore_in_ddp  # noqa: E402


def parallel(model: Any, layout: str, device: torch.device) -> Any:
    """Wrap the adapted model for one layout."""
    if layout == "one":
        return model
    if layout == "ddp":
        ignore_in_ddp(model)
        return data_parallel(model, device)
    return shard(model)


def measure(rank: Rank, options: argparse.Namespace, rows: Rows) -> None:
    """Measure the layouts of one world; rank 0 writes the rows."""
    sizes = qlora_30b.TINY if options.tiny else qlora_30b.QWEN3_30B
    for layout in options.layouts if rank.world > 1 else ["one"]:
        if rank.number == 0:
            rows.log(f"qlora {layout} on {rank.world} begins")
        measure_layout(rank, layout, sizes, options, rows)
        gc.collect()  # A patched model has cycles, and would count in the next row.


def measure_layout(
    rank: Rank, layout: str, sizes: dict[str, Any], options: argparse.Namespace, rows: Rows
) -> None:
    """Measure steps of forward, backward and AdamW in one layout."""
    cuda = rank.device.type == "cuda"
    torch.manual_seed(0)
    model = qlora_30b.build(sizes, options.layers, options.storage, rank.device)
    model = parallel(qlora_30b.adapt(model, options.rank, True), layout, rank.device)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if cuda else 0
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=cuda)
    generator = torch.Generator().manual_seed(rank.number)
    ids = torch.randint(sizes["vocab_size"], (1, options.length), generator=generator)
    ids = ids.to(rank.device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    median, host = step_ms(rank, step, options.steps)
    peaks = rank.peaks()
    if rank.number == 0:
        rows.write({
            "layout": f"qlora {layout}", "world": rank.world, "impl": "moe_patch",
            "median_ms": round(median, 3), "host_ms": round(host, 3),
            "tokens_per_s": round(rank.world * options.length / median * 1e3),
            "held_gib": round(held / 2**30, 3),
            "peak_gib": round(peaks[0] / 2**30, 3) if peaks[0] is not None else None,
            "peaks": peaks,
        })  # fmt: skip


def main() -> int:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, nargs="+", default=[2])
    parser.add_argument("--layouts", nargs="+", choices=("ddp", "fsdp2"), default=["ddp", "fsdp2"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a rank's sequence")
    parser.add_argument("--storage", choices=("nf4", "fp8"), default="nf4")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    add_arguments(parser, steps=6)
    options = parser.parse_args()
    if options.tiny:
        options.layers, options.length = min(options.layers, 2), min(options.length, 64)
    rows = rows_of(
        options, ("storage", "layers", "steps", "rank"), sequences=1, tokens=options.length,
        size="tiny" if options.tiny else "qwen3-30b",
    )  # fmt: skip
    start(options.world, measure, (options, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
