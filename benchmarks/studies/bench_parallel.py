"""Measure tokens per second of one MoE model on several cards, with transformers' parallelism.

    python benchmarks/studies/bench_parallel.py --world 1 2 4
    python benchmarks/studies/bench_parallel.py --world 1 2 --tiny --out rows.jsonl    on a CPU

Rows are appended to benchmarks/results/parallel.jsonl.

A training step is forward and backward in bf16, without an optimizer. The model has a few layers of
Qwen3-30B-A3B's sizes with random weights. ``tp`` and ``ep`` share one batch; ``fsdp`` has one batch
per rank. transformers' own experts run from the same weights in the same processes. ``host_ms`` is
the time until Python has issued a step: if it is near ``median_ms``, the cards waited for the host.
"""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Prefer the checkout to an installed moe_patch.
sys.path[1:1] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from bench_lib.parallel_models import CARD, TINY, random_model  # noqa: E402
from bench_lib.ranks import Rank, Rows, add_arguments, rows_of, start, step_ms  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

from moe_patch import patch_model, patch_report, unpatch_model  # noqa: E402


def layouts(world: int) -> dict[str, dict[str, Any]]:
    """Return the options of transformers' config for each way to use ``world`` ranks."""
    if world == 1:
        return {"one": {}}
    expert_parallel: dict[str, Any] = {"tp_size": world, "enable_expert_parallel": True}
    if "ep_size" in {field.name for field in fields(DistributedConfig)}:
        expert_parallel = {"tp_size": world, "ep_size": world}
    return {"ep": expert_parallel, "tp": {"tp_size": world}, "fsdp": {"fsdp_size": world}}


def measure(rank: Rank, options: argparse.Namespace, rows: Rows) -> None:
    """Measure every layout of one world, with and without the patch; rank 0 writes the rows."""
    for layout, distributed in layouts(rank.world).items():
        sizes = TINY if options.tiny else CARD
        model = random_model(sizes, options.layers, distributed, rank.device)
        # FSDP ranks have batches of their own; in other layouts all ranks share one.
        batches = rank.world if layout == "fsdp" else 1
        generator = torch.Generator().manual_seed(rank.number if batches > 1 else 0)
        shape = (options.sequences, options.length)
        ids = torch.randint(model.config.vocab_size, shape, generator=generator).to(rank.device)

        def step(model: Any = model, ids: torch.Tensor = ids) -> None:
            model.zero_grad(set_to_none=True)
            model(input_ids=ids, labels=ids).loss.backward()

        for impl in ("moe_patch", "hf_grouped_mm"):
            if impl == "moe_patch":
                patch_model(model)
                tiers = sorted({row.tier for row in patch_report(model)})
            else:
                unpatch_model(model)
            median, host = step_ms(rank, step, options.steps)
            if rank.number == 0:
                rows.write({
                    "layout": layout, "world": rank.world, "impl": impl,
                    "median_ms": round(median, 3), "host_ms": round(host, 3),
                    "tokens_per_s": round(batches * ids.numel() / median * 1e3),
                    "tier": tiers[0] if impl == "moe_patch" else None,
                })  # fmt: skip
        del model, step
        gc.collect()  # A patched model has cycles, and would stay beside the next.


def main() -> int:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description="Tokens per second on several cards.")
    parser.add_argument("--world", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=4, help="in one batch")
    parser.add_argument("--length", type=int, default=8192, help="tokens of one sequence")
    add_arguments(parser, steps=6)
    options = parser.parse_args()
    if options.tiny:
        options.layers, options.length = min(options.layers, 2), min(options.length, 32)
    tokens = options.sequences * options.length
    size = "tiny" if options.tiny else "card"
    rows = rows_of(options, ("layers", "sequences", "steps"), size=size, tokens=tokens)
    start(options.world, measure, (options, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
