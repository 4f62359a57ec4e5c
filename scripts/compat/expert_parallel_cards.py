"""Prove adapters on divided experts on cards within a minute.

    python scripts/compat/expert_parallel_cards.py --world 2

The ranks start once. They (1) compare loss and gradients with PEFT in one process on tiny models,
in each layout; (2) lose the last rank in a forward: the others must end within the group's limit of
20 s. Every step prints its time. The whole proof is ``scripts/compat/compat.py --on card --rows
ep``; ``benchmarks/studies/bench_parallel_lora.py`` measures the layouts.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Prefer the checkout to an installed moe_patch.
sys.path[1:1] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from bench_lib.ranks import Rank, free_ports, joined  # noqa: E402

from moe_patch import patch_model  # noqa: E402
from moe_patch.expert_parallel import attach_adapter  # noqa: E402
from tests.support import expert_adapters as cases  # noqa: E402
from tests.support.numerics import FP32, rel_err  # noqa: E402

GROUP_S, MARGIN_S = 20.0, 8.0
MODELS = ("qwen3_moe", "gpt_oss", "deepseek_v3")
START = time.time()


def say(rank: Rank, text: str) -> None:
    print(f"{time.strftime('%X')} rank {rank.number}: {text}", flush=True)


def equal_one_process(own: Rank, name: str, folder: str) -> None:
    """Compare every layout with PEFT's own model in one process, on each rank's device."""
    base = cases.make(name)
    if own.number == 0:
        base.save_pretrained(folder)
    dist.barrier()
    for layout, (options, batches, _, dense) in cases.layouts(own.world).items():
        model = cases.load(type(base), folder, options)
        torch.manual_seed(0)
        model = patch_model(attach_adapter(model, cases.config(name, dense)))
        number = own.number * batches // own.world
        found = cases.run(model, "any", (number,))
        alone = cases.reference(cases.make(name).to(own.device), name, dense)
        runs = [cases.run(alone, "any", (i,)) for i in range(batches)]
        assert found.keys() == runs[0].keys()
        worst = rel_err(found["loss"], runs[number]["loss"])
        for key in found.keys() - {"loss"}:
            mean = sum(run[key] for run in runs) / batches
            worst = max(worst, rel_err(found[key], mean))
        verdict = "equal" if worst <= FP32 else "DIFFERENT"
        say(own, f"{name}, {layout}: worst relative error {worst:.1e}, limit {FP32}: {verdict}")


def lose_a_rank(own: Rank, folder: str) -> None:
    """Kill the last rank in a forward; report how the others end."""
    layout = list(cases.layouts(own.world).values())[-1]
    model = cases.load(type(cases.make("qwen3_moe")), folder, layout.options)
    torch.manual_seed(0)
    model = patch_model(attach_adapter(model, cases.config("qwen3_moe", False)))
    cases.run(model, "any", (own.number,))
    if own.number == own.world - 1:
        experts = model.base_model.model.model.layers[1].mlp.experts
        say(own, "ends itself in the next forward")
        experts.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    try:
        cases.run(model, "any", (own.number,))
    except RuntimeError as error:
        say(own, f"ends with {type(error).__name__}: {str(error)[:200]}")
        # Leaving the group would wait for the dead rank.
        os._exit(3)
    say(own, "NO ERROR")


def work(number: int, world: int, ports: list[int], names: list[str], folder: str) -> None:
    """Run one rank: the comparisons, then the loss of the last rank."""
    torch.set_num_threads(8 if torch.cuda.is_available() else 1)
    with joined(number, world, ports[0]) as own:
        for name in names:
            equal_one_process(own, name, f"{folder}/{name}")
    with joined(number, world, ports[1], GROUP_S) as own:
        lose_a_rank(own, f"{folder}/qwen3_moe")


def main() -> int:
    """Start the ranks and wait for their ends."""
    parser = argparse.ArgumentParser(description="Adapters on divided experts, on cards.")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    names = list(dict.fromkeys(["qwen3_moe", *options.models]))
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ports = free_ports(2)
        ranks = [
            context.Process(target=work, args=(rank, options.world, ports, names, folder))
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
    good = codes[-1] == -signal.SIGKILL and all(code not in (0, None) for code in codes[:-1])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
