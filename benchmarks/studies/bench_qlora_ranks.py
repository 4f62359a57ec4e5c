"""Measure QLoRA on several cards: tokens per second and peak memory under DDP and FSDP2.

    python benchmarks/studies/bench_qlora_ranks.py --world 2
    python benchmarks/studies/bench_qlora_ranks.py --tiny --layers 2 --out rows.jsonl    on a CPU

Rows are appended to benchmarks/results/parallel.jsonl. A step is forward, backward and AdamW on one
sequence a rank, with gradient checkpointing, over layers of Qwen3-30B-A3B's sizes. Experts are
random packed bytes (:mod:`qlora_30b`); under FSDP2 they are sharded and gathered as bytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Prefer the checkout to an installed moe_patch.
sys.path[1:1] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "studies")]

import qlora_30b  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from bench_lib.rows import commit_of, machine, new_run  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from moe_patch.quant.surgery import ignore_in_ddp  # noqa: E402

OUT = ROOT / "benchmarks" / "results" / "parallel.jsonl"
PORT = 29653
SKIPPED = 2


def parallel(model: Any, layout: str, device: torch.device) -> Any:
    """Wrap the adapted model for one layout."""
    if layout == "ddp":
        ignore_in_ddp(model)
        ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)
    for module in model.modules():
        if type(module).__name__.endswith("DecoderLayer"):
            fully_shard(module)
    return fully_shard(model)


def steps(model: Any, options: argparse.Namespace, vocab: int, device: torch.device) -> list[float]:
    """Return the seconds of each step on all ranks."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(vocab, (1, options.length), generator=generator).to(device)
    seconds = []
    for _ in range(options.steps + SKIPPED):
        wait(device)
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait(device)
        seconds.append(time.perf_counter() - start)
    return seconds[SKIPPED:]


def wait(device: torch.device) -> None:
    """Wait until every rank has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def work(rank: int, options: argparse.Namespace, rows: Path) -> None:
    """Run one rank; rank 0 writes a row for each layout."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(device)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.world}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
    os.environ.update({name: str(value) for name, value in names.items()})
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    sizes = qlora_30b.TINY if options.tiny else qlora_30b.QWEN3_30B
    for layout in options.layouts:
        torch.manual_seed(0)
        model = qlora_30b.build(sizes, options.layers, options.storage, device)
        model = qlora_30b.adapt(model, options.rank, checkpointing=True)
        model = parallel(model, layout, device)
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() if cuda else 0
        seconds = statistics.median(steps(model, options, sizes["vocab_size"], device))
        measured = {
            "layout": f"qlora {layout}", "world": options.world, "impl": "moe_patch",
            "median_ms": round(seconds * 1e3, 3),
            "tokens_per_s": round(options.world * options.length / seconds),
            "held_gib": round(held / 2**30, 3),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if cuda else None,
        }  # fmt: skip
        if rank == 0:
            print(time.strftime("%X"), measured, flush=True)
            with rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(measured) + "\n")
        del model
        gc.collect()  # A patched model has cycles, and would count in the next row.
    dist.destroy_process_group()


def main() -> int:
    """Start the ranks, and store what they measured even if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--layouts", nargs="+", choices=("ddp", "fsdp2"), default=["ddp", "fsdp2"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a rank's sequence")
    parser.add_argument("--storage", choices=("nf4", "fp8"), default="nf4")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tiny", action="store_true", help="a trial; the numbers mean nothing")
    parser.add_argument("--commit", help="HEAD, where the tree was copied without its .git")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if options.tiny:
        options.length = min(options.length, 64)
    run, date = new_run()
    common = {"run": run, "date": date, "commit": options.commit or commit_of(ROOT)}
    common |= machine("cuda" if torch.cuda.is_available() else "cpu")
    common |= {"size": "tiny" if options.tiny else "qwen3-30b", "storage": options.storage}
    common |= {"layers": options.layers, "sequences": 1, "steps": options.steps}
    common |= {"rank": options.rank, "tokens": options.length}
    rows = options.out.with_suffix(f".{run}")
    rows.touch()
    try:
        torch.multiprocessing.start_processes(
            work, (options, rows), nprocs=options.world, start_method="spawn"
        )
    finally:
        lines = rows.read_text(encoding="utf-8").splitlines()
        rows.unlink()
        with options.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(common | json.loads(line)) + "\n" for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
