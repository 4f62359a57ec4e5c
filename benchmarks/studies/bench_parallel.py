"""Measure tokens per second of one MoE model on several cards, with transformers' parallelism.

    python benchmarks/studies/bench_parallel.py --world 1 2 4

Rows are appended to benchmarks/results/parallel.jsonl.

A training step is forward and backward in bf16, without an optimizer. The model has a few layers of
Qwen3-30B-A3B's sizes with random weights. ``tp`` and ``ep`` share one batch; ``fsdp`` has one batch
per rank. transformers' own experts run from the same weights in the same processes. ``host_ms`` is
the time until Python has issued a step: if it is near ``median_ms``, the cards waited for the host.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Prefer the checkout to an installed moe_patch.
sys.path[1:1] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from bench_lib.rows import commit_of, machine, new_run  # noqa: E402
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

from moe_patch import patch_model, patch_report, unpatch_model  # noqa: E402

OUT = ROOT / "benchmarks" / "results" / "parallel.jsonl"
SIZES = {
    "card": {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "vocab_size": 16384,
    },
    # For a trial of this script on a CPU; the numbers mean nothing.
    "tiny": {
        "hidden_size": 32, "moe_intermediate_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": 96,
    },
}  # fmt: skip
PORT = 29611


def layouts(world: int) -> dict[str, dict[str, Any]]:
    """Return the options of transformers' config for each way to use ``world`` ranks."""
    if world == 1:
        return {"one": {}}
    expert_parallel: dict[str, Any] = {"tp_size": world, "enable_expert_parallel": True}
    if "ep_size" in {field.name for field in fields(DistributedConfig)}:
        expert_parallel = {"tp_size": world, "ep_size": world}
    return {"ep": expert_parallel, "tp": {"tp_size": world}, "fsdp": {"fsdp_size": world}}


def random_model(size: str, layers: int, options: dict[str, Any], device: torch.device) -> Any:
    """Make a model with equal weights on every rank, placed by ``options``; use no files."""
    config = Qwen3MoeConfig(**SIZES[size], num_hidden_layers=layers, output_router_logits=False)
    with torch.device("meta"):
        shapes = Qwen3MoeForCausalLM(config).state_dict()
    generator = torch.Generator(device).manual_seed(0)
    weights = {
        name: torch.empty(t.shape, device=device, dtype=torch.bfloat16).normal_(
            mean=float(t.dim() == 1), std=0.02, generator=generator
        )
        for name, t in shapes.items()
    }
    distributed = {"distributed_config": DistributedConfig(**options)} if options else {}
    model = Qwen3MoeForCausalLM.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=torch.bfloat16,
        experts_implementation="grouped_mm",
        **distributed,
    )
    return model.train() if options else model.to(device).train()


def step_ms(model: Any, ids: torch.Tensor, steps: int) -> tuple[float, float]:
    """Return the median wall time of forward and backward on all ranks, and of its Python part."""
    times, host = [], []
    for _ in range(steps + 2):
        model.zero_grad(set_to_none=True)
        wait(ids.device)
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        host.append((time.perf_counter() - start) * 1e3)
        wait(ids.device)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:]), statistics.median(host[2:])


def wait(device: torch.device) -> None:
    """Wait until every rank has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def work(rank: int, options: argparse.Namespace, turn: Any, rows: Path) -> None:
    """Run one rank in every world that it belongs to, while ranks outside that world wait."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(device)
    for world in options.world:
        if rank < world:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
            names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT + world}
            os.environ.update({name: str(value) for name, value in names.items()})
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
            measure(rank, world, options, device, rows)
            dist.destroy_process_group()
        turn.wait()


def measure(
    rank: int, world: int, options: argparse.Namespace, device: torch.device, rows: Path
) -> None:
    """Measure every layout of one world, with and without the patch; rank 0 writes the rows."""
    for layout, distributed in layouts(world).items():
        model = random_model(options.size, options.layers, distributed, device)
        # FSDP ranks have batches of their own; in other layouts all ranks share one.
        batches = world if layout == "fsdp" else 1
        generator = torch.Generator().manual_seed(rank if batches > 1 else 0)
        shape = (options.sequences, options.length)
        ids = torch.randint(model.config.vocab_size, shape, generator=generator).to(device)
        for impl in ("moe_patch", "hf_grouped_mm"):
            if impl == "moe_patch":
                patch_model(model)
                tiers = sorted({row.tier for row in patch_report(model)})
            else:
                unpatch_model(model)
            median, host = step_ms(model, ids, options.steps)
            measured = {
                "layout": layout, "world": world, "impl": impl, "median_ms": round(median, 3),
                "host_ms": round(host, 3),
                "tokens_per_s": round(batches * ids.numel() / median * 1e3),
                "tier": tiers[0] if impl == "moe_patch" else None,
            }  # fmt: skip
            if rank == 0:
                print(measured, flush=True)
                with rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(measured) + "\n")
        del model


def main() -> int:
    """Start the ranks, and store what they measured even if one of them fails."""
    parser = argparse.ArgumentParser(description="Tokens per second on several cards.")
    parser.add_argument("--world", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=4, help="in one batch")
    parser.add_argument("--length", type=int, default=8192, help="tokens of one sequence")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--size", choices=sorted(SIZES), default="card")
    parser.add_argument("--commit", help="HEAD, where the tree was copied without its .git")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    run, date = new_run()
    place = machine("cuda" if torch.cuda.is_available() else "cpu")
    common = {"run": run, "date": date, "commit": options.commit or commit_of(ROOT)} | place
    common |= {name: getattr(options, name) for name in ("size", "layers", "sequences", "steps")}
    common["tokens"] = options.sequences * options.length
    measured = options.out.with_suffix(f".{run}")
    measured.touch()
    ranks = max(options.world)
    turn = torch.multiprocessing.get_context("spawn").Barrier(ranks)
    try:
        torch.multiprocessing.start_processes(
            work, (options, turn, measured), nprocs=ranks, start_method="spawn"
        )
    finally:
        rows = [json.loads(line) for line in measured.read_text(encoding="utf-8").splitlines()]
        measured.unlink()
        with options.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(common | row) + "\n" for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
