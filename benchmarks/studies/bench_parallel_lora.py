"""Measure tokens per second of LoRA on experts on several cards: DDP and expert parallelism.

    python benchmarks/studies/bench_parallel_lora.py --world 2

Rows are appended to benchmarks/results/parallel.jsonl, with the adapters' rank as ``lora``.

A step is forward and backward in bf16 with fp32 adapters on both projections of all experts,
without an optimizer. The model has 12 layers of Qwen3-30B-A3B's sizes with random weights. Every
rank has its own batch, except under ``ep`` in releases of transformers that do not exchange tokens.
``peft`` is PEFT on transformers' own experts; it cannot run on divided experts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Prefer the checkout to an installed moe_patch.
sys.path[1:1] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "studies")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from bench_lib.rows import commit_of, machine, new_run  # noqa: E402
from bench_parallel import OUT, SIZES, random_model, step_ms  # noqa: E402
from peft import LoraConfig  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

from moe_patch import patch_model, unpatch_model  # noqa: E402
from moe_patch.expert_parallel import attach_adapter  # noqa: E402

PORT = 29641
THREADS = 8  # PEFT draws the factors on the CPU


def expert_parallel(world: int) -> tuple[dict[str, Any], int]:
    """Return transformers' options for experts over all ranks, and the batches of one step."""
    if "ep_implementation" in {field.name for field in fields(DistributedConfig)}:
        return {"fsdp_size": world, "ep_size": world}, world
    return {"tp_size": world, "enable_expert_parallel": True}, 1


def ddp(options: argparse.Namespace, device: torch.device) -> tuple[Any, Any, int]:
    """Return a model with adapters, the same inside DDP, and the batches of one step."""
    model = adapted(random_model(options.size, options.layers, {}, device), options)
    devices = [device] if device.type == "cuda" else None
    return model, DistributedDataParallel(model, device_ids=devices), options.world


def ep(options: argparse.Namespace, device: torch.device) -> tuple[Any, Any, int]:
    """Return a model with divided experts and adapters twice, and the batches of one step."""
    distributed, batches = expert_parallel(options.world)
    model = adapted(random_model(options.size, options.layers, distributed, device), options)
    return model, model, batches


def adapted(model: Any, options: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(
        r=options.lora, lora_alpha=options.lora, target_modules=[], target_parameters=parameters
    )
    return patch_model(attach_adapter(model, config))


LAYOUTS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "ddp": (ddp, ("moe_patch", "peft")),
    "ep": (ep, ("moe_patch",)),
}


def work(rank: int, options: argparse.Namespace, rows: Path) -> None:
    """Measure every layout on one rank; rank 0 writes the rows as they are measured."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.set_num_threads(THREADS if cuda else 1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.world, "MASTER_PORT": PORT}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    for layout in options.layouts:
        measure(rank, layout, options, device, rows)
    dist.destroy_process_group()


def measure(
    rank: int, layout: str, options: argparse.Namespace, device: torch.device, rows: Path
) -> None:
    """Measure one layout with each implementation that runs there."""
    start = time.perf_counter()
    build, impls = LAYOUTS[layout]
    model, wrapped, batches = build(options, device)
    generator = torch.Generator().manual_seed(rank if batches > 1 else 0)
    shape = (options.sequences, options.length)
    ids = torch.randint(model.config.vocab_size, shape, generator=generator).to(device)
    for impl in impls:
        if impl == "peft":
            unpatch_model(model)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        median, host = step_ms(wrapped, ids, options.steps)
        measured = {
            "layout": layout, "world": options.world, "impl": impl, "median_ms": round(median, 3),
            "host_ms": round(host, 3),
            "tokens_per_s": round(batches * ids.numel() / median * 1e3),
            "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        }  # fmt: skip
        if rank == 0:
            print(f"{time.perf_counter() - start:.1f} s", measured, flush=True)
            with rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(measured) + "\n")


def main() -> int:
    """Start the ranks, and store what they measured even if one of them fails."""
    parser = argparse.ArgumentParser(description="Tokens per second of LoRA on several cards.")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--layouts", nargs="+", choices=sorted(LAYOUTS), default=["ddp", "ep"])
    parser.add_argument("--lora", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sequences", type=int, default=2, help="in one batch")
    parser.add_argument("--length", type=int, default=4096, help="tokens of one sequence")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--size", choices=sorted(SIZES), default="card")
    parser.add_argument("--commit", help="HEAD, where the tree was copied without its .git")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    run, date = new_run()
    place = machine("cuda" if torch.cuda.is_available() else "cpu")
    common = {"run": run, "date": date, "commit": options.commit or commit_of(ROOT)} | place
    common |= {n: getattr(options, n) for n in ("size", "layers", "sequences", "steps", "lora")}
    common["tokens"] = options.sequences * options.length
    measured = options.out.with_suffix(f".{run}")
    measured.touch()
    try:
        torch.multiprocessing.start_processes(
            work, (options, measured), nprocs=options.world, start_method="spawn"
        )
    finally:
        rows = [json.loads(line) for line in measured.read_text(encoding="utf-8").splitlines()]
        measured.unlink()
        with options.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(common | row) + "\n" for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
