"""Prove adapters on divided experts on cards within two minutes, and measure them.

    python scripts/compat/expert_parallel_cards.py --world 2 --out rows.jsonl

The ranks start once. They (1) compare loss and gradients with PEFT in one process on a tiny model,
in each layout; (2) measure tokens per second as benchmarks/studies/bench_parallel_lora.py does;
(3) lose the last rank in a forward: the others must end within the group's limit of 20 s. Every
step prints its time, and a part that begins after ``--until`` seconds is left out. The whole proof
is ``scripts/compat/compat.py --on card --rows ep``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Prefer the checkout to an installed moe_patch.
sys.path[1:1] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "studies")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from bench_lib.rows import commit_of, machine, new_run  # noqa: E402
from bench_parallel_lora import LAYOUTS, measure  # noqa: E402

from moe_patch import patch_model  # noqa: E402
from moe_patch.expert_parallel import attach_adapter  # noqa: E402
from tests.support import expert_adapters as cases  # noqa: E402
from tests.support.numerics import FP32, rel_err  # noqa: E402

PORT, GROUP_S, MARGIN_S = 29661, 20.0, 25.0
START = time.time()


class Rank:
    """One rank: its device, and lines with the time since the start."""

    def __init__(self, rank: int, options: argparse.Namespace) -> None:
        self.rank, self.options = rank, options
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", rank) if cuda else torch.device("cpu")
        torch.set_num_threads(8 if cuda else 1)
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.world}
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        if cuda:
            torch.cuda.set_device(self.device)

    def say(self, text: str) -> None:
        print(f"[{time.time() - self.options.start:5.1f} s] rank {self.rank}: {text}", flush=True)

    def join(self, port: int, seconds: float) -> None:
        """Join a new process group."""
        os.environ["MASTER_PORT"] = str(port)
        backend = "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(seconds=seconds))

    def late(self) -> bool:
        """Return whether rank 0's clock has passed the limit; equal on all ranks."""
        found = [time.time() - self.options.start > self.options.until]
        dist.broadcast_object_list(found, src=0)
        return found[0]


def equal_one_process(own: Rank, name: str, folder: str) -> None:
    """Compare every layout with PEFT's own model in one process, on each rank's device."""
    base = cases.make(name)
    if own.rank == 0:
        base.save_pretrained(folder)
    dist.barrier()
    world = own.options.world
    for layout, (options, batches, _, dense) in cases.layouts(world).items():
        model = cases.load(type(base), folder, options)
        torch.manual_seed(0)
        model = patch_model(attach_adapter(model, cases.config(name, dense)))
        number = own.rank * batches // world
        found = cases.run(model, "any", (number,))
        alone = cases.reference(cases.make(name).to(own.device), name, dense)
        runs = [cases.run(alone, "any", (i,)) for i in range(batches)]
        assert found.keys() == runs[0].keys()
        worst = rel_err(found["loss"], runs[number]["loss"])
        for key in found.keys() - {"loss"}:
            mean = sum(run[key] for run in runs) / batches
            worst = max(worst, rel_err(found[key], mean))
        verdict = "equal" if worst <= FP32 else "DIFFERENT"
        own.say(f"{name}, {layout}: worst relative error {worst:.1e}, limit {FP32}: {verdict}")


def lose_a_rank(own: Rank, folder: str) -> None:
    """Kill the last rank in a forward; report how the others end."""
    layout = list(cases.layouts(own.options.world).values())[-1]
    model = cases.load(type(cases.make("qwen3_moe")), folder, layout.options)
    torch.manual_seed(0)
    model = patch_model(attach_adapter(model, cases.config("qwen3_moe", False)))
    cases.run(model, "any", (own.rank,))
    if own.rank == own.options.world - 1:
        experts = model.base_model.model.model.layers[1].mlp.experts
        own.say("ends itself in the next forward")
        experts.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    try:
        cases.run(model, "any", (own.rank,))
    except RuntimeError as error:
        own.say(f"ends with {type(error).__name__}: {str(error)[:200]}")
        # Leaving the group would wait for the dead rank.
        os._exit(3)
    own.say("NO ERROR")


def work(rank: int, options: argparse.Namespace, folder: str, rows: Path) -> None:
    own = Rank(rank, options)
    own.join(PORT, 120.0)
    own.say("has joined")
    equal_one_process(own, "qwen3_moe", f"{folder}/qwen3_moe")
    for layout in options.layouts:
        if not own.late():
            measure(rank, layout, options, own.device, rows)
            torch.cuda.empty_cache()
            own.say(f"has measured {layout}")
    for name in ("gpt_oss", "deepseek_v3"):
        if not own.late():
            equal_one_process(own, name, f"{folder}/{name}")
    dist.destroy_process_group()
    own.join(PORT + 1, GROUP_S)
    lose_a_rank(own, f"{folder}/qwen3_moe")


def main() -> int:
    """Start the ranks, wait for their ends, and store the rows."""
    parser = argparse.ArgumentParser(description="Adapters on divided experts, on cards.")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--layouts", nargs="*", choices=sorted(LAYOUTS), default=["ep", "ddp"])
    parser.add_argument("--lora", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sequences", type=int, default=2, help="in one batch")
    parser.add_argument("--length", type=int, default=4096, help="tokens of one sequence")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--size", default="card")
    parser.add_argument("--until", type=float, default=70.0, help="seconds; begin no part later")
    parser.add_argument("--commit", help="HEAD, where the tree was copied without its .git")
    parser.add_argument("--out", type=Path, required=True, help="append the rows to this file")
    options = parser.parse_args()
    options.start = START
    run, date = new_run()
    place = machine("cuda" if torch.cuda.is_available() else "cpu")
    common = {"run": run, "date": date, "commit": options.commit or commit_of(ROOT)} | place
    common |= {n: getattr(options, n) for n in ("size", "layers", "sequences", "steps", "lora")}
    common["tokens"] = options.sequences * options.length
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.touch()
        ranks = [
            context.Process(target=work, args=(rank, options, folder, rows))
            for rank in range(options.world)
        ]
        for process in ranks:
            process.start()
        ranks[-1].join()
        lost = time.time()
        for process in ranks[:-1]:
            process.join(max(0.0, lost + GROUP_S + MARGIN_S - time.time()))
        seconds, codes = time.time() - lost, [process.exitcode for process in ranks]
        print(f"[{time.time() - START:5.1f} s] exit codes {codes}, {seconds:.1f} s after the last")
        for process in ranks:
            process.kill()
        with options.out.open("a", encoding="utf-8") as file:
            for line in rows.read_text(encoding="utf-8").splitlines():
                file.write(json.dumps(common | json.loads(line)) + "\n")
    good = codes[-1] == -signal.SIGKILL and all(code not in (0, None) for code in codes[:-1])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
