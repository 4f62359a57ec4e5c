#!/usr/bin/env python3
"""Time a training step of twelve layers of Qwen3-30B-A3B, LoRA, with and without a routing replay.

    python benchmarks/studies/replay_cost.py --commit SHA          a card of 80 GB or more
    python benchmarks/studies/replay_cost.py --tiny --device cpu   the same in small

A step is forward, backward and AdamW, in a plain loop. The kinds of step alternate, each round in
another order: plain, replay, and replay with ``compare=True``. The trace is the model's own
routing, so that every step has the same rows per expert. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from bench_lib import rows, training  # noqa: E402
from bench_lib.shapes import SHAPES  # noqa: E402

from moe_patch import patch_model, record_routing, replay_routing  # noqa: E402
from moe_patch.signals.trace import RoutingTrace  # noqa: E402

WARM_ROUNDS = 2


def steps_of(model: Any, ids_BS: torch.Tensor) -> tuple[Callable[[], torch.Tensor], RoutingTrace]:
    """Return a function that runs one step and returns its loss, and the model's routing."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, fused=ids_BS.is_cuda)
    autocast = torch.autocast(ids_BS.device.type, torch.bfloat16, enabled=ids_BS.is_cuda)

    def step() -> torch.Tensor:
        with autocast:
            loss = model(input_ids=ids_BS, labels=ids_BS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    with record_routing(model) as capture, torch.no_grad(), autocast:
        model(input_ids=ids_BS)
    return step, capture.trace()


def measure(model: Any, ids_BS: torch.Tensor, rounds: int) -> dict[str, Any]:
    """Return milliseconds per step of each kind, and the losses of the last round."""
    step, trace = steps_of(model, ids_BS)
    kinds: dict[str, Callable[[], Any]] = {
        "plain": contextlib.nullcontext,
        "replay": lambda: replay_routing(model, trace),
        "compare": lambda: replay_routing(model, trace, compare=True),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    losses: dict[str, float] = {}
    for turn in range(WARM_ROUNDS + rounds):
        names = list(kinds)
        for name in names[turn % 3 :] + names[: turn % 3]:
            synchronize(ids_BS.device)
            start = time.perf_counter()
            with kinds[name]():
                loss = step()
            synchronize(ids_BS.device)
            if turn >= WARM_ROUNDS:
                times[name].append(1e3 * (time.perf_counter() - start))
            losses[name] = loss.item()
    return {"ms": times, "loss": losses}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Run the command line described at the top of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--commit", help="full SHA, where there is no git")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    device = torch.device(options.device)
    shape = SHAPES["tiny" if options.tiny else "qwen3_30b_12L_4x4096"]
    layers, tokens = (2, (2, 16)) if options.tiny else (training.LAYERS, (4, 4096))
    model = training.build_model(shape, device, layers)
    training.reset_adapters(model)
    patch_model(model.train(), self_check=options.tiny)
    ids_BS = torch.randint(model.config.vocab_size, tokens, device=device)
    found = measure(model, ids_BS, options.rounds)
    median = {name: statistics.median(each) for name, each in found["ms"].items()}
    pairs = zip(found["ms"]["plain"], found["ms"]["replay"], found["ms"]["compare"], strict=True)
    gaps = [(replay / plain - 1, compare / plain - 1) for plain, replay, compare in pairs]
    run, date = rows.new_run()
    row = {
        "run": run, "date": date, "commit": options.commit or rows.commit_of(ROOT),
        **rows.machine(device.type), "layers": layers, "tokens": tokens, "median_ms": median,
        "replay_cost": statistics.median(gap for gap, _ in gaps),
        "compare_cost": statistics.median(gap for _, gap in gaps), **found,
    }  # fmt: skip
    line = json.dumps(row)
    print(line)
    if options.json is not None:
        options.json.write_text(line + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
