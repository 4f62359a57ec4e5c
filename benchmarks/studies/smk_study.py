#!/usr/bin/env python3
"""Compare a small MoE trained with smk_loss with the same model under other router losses.

    python benchmarks/studies/smk_study.py      # every variant, three seeds, a CPU
    python benchmarks/studies/smk_study.py --variants none delta_sc --seeds 0 --steps 50
    python benchmarks/studies/smk_report.py     # the table and picture of the rows

Each run appends one JSON line to docs/data/smk_tiny.jsonl. It holds the losses and the routers'
measures by step, and the final measures of one held-out batch, for every target and norm.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from bench_lib import rows as bench_rows  # noqa: E402
from transformers import __version__ as transformers_version  # noqa: E402

from moe_patch import gate_accuracy, patch_model, record, smk_loss  # noqa: E402
from moe_patch.runtime.taps import LayerSignals  # noqa: E402
from moe_patch.signals.balance import balance  # noqa: E402
from moe_patch.signals.losses import GRADIENTS, TARGETS  # noqa: E402
from moe_patch.train import build  # noqa: E402
from moe_patch.train.config import TrainConfig, load_config  # noqa: E402
from moe_patch.train.data import TokenBlocks, make_blocks, read_texts  # noqa: E402
from moe_patch.train.loop import Trained, train_once  # noqa: E402
from moe_patch.train.router_losses import RouterLossConfig  # noqa: E402
from moe_patch.train.smk import SmkConfig  # noqa: E402

HELD_OUT_EVERY = 64
LOAD_BALANCE = 0.01


class Variant(NamedTuple):
    """Terms added to the language loss: smk_loss's words and factor, the load-balance loss."""

    target: str = "delta_sc"
    gradient: str = "params"
    weight: float = 1.0
    load_balance: bool = False


# Without smk_loss (weight 0) the default target is still measured.
VARIANTS = {
    "none": Variant(weight=0.0),
    "load_balance": Variant(weight=0.0, load_balance=True),
    "delta_sc": Variant("delta_sc"),
    "surprise": Variant("surprise"),
    "delta_sc_output": Variant("delta_sc", "output"),
    "surprise_output": Variant("surprise", "output"),
    "delta_sc_expert": Variant("delta_sc", "expert"),
    "surprise_expert": Variant("surprise", "expert"),
    "delta_sc_0.1": Variant("delta_sc", weight=0.1),
    "surprise_0.1": Variant("surprise", weight=0.1),
    "delta_sc+load_balance": Variant("delta_sc", load_balance=True),
    "surprise+load_balance": Variant("surprise", load_balance=True),
}


def run(config: TrainConfig, name: str, seed: int, steps: int | None) -> dict[str, Any]:
    """Train one variant from one seed; return its row."""
    variant = VARIANTS[name]
    config = dataclasses.replace(config, seed=seed)
    texts = read_texts(config.data)
    tokenizer = build.build_tokenizer(config.tokenizer, texts)
    ids_NL = make_blocks(texts, tokenizer, config.data.block_size).ids_NL
    held_out = torch.arange(len(ids_NL)) % HELD_OUT_EVERY == 0
    smk = SmkConfig(variant.target, variant.gradient, weight=variant.weight)
    model = patch_model(build.build_base(config.model, tokenizer, seed), config.moe_patch)
    with tempfile.TemporaryDirectory() as folder:
        overrides = {} if steps is None else {"max_steps": steps}
        trained = train_once(
            model,
            build.training_arguments(config, Path(folder), disable_tqdm=True, **overrides),
            TokenBlocks(ids_NL[~held_out]),
            name=name,
            router_losses=RouterLossConfig(LOAD_BALANCE) if variant.load_balance else None,
            smk=smk,
        )
    ids_NL = ids_NL[held_out]
    return {
        "variant": name,
        **variant._asdict(),
        "seed": seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": bench_rows.commit_of(ROOT),
        "torch": torch.__version__,
        "transformers": transformers_version,
        "device": "cpu",
        "seconds": round(trained.seconds, 1),
        "steps": by_step(trained),
        "held_out": {"loss": held_out_loss(model, ids_NL), **measures(model, ids_NL)},
    }


def by_step(trained: Trained) -> dict[str, list[float]]:
    """Return losses and measures as columns."""
    columns: dict[str, list[float]] = {"step": list(trained.losses)}
    columns["loss"] = [round(loss, 4) for loss in trained.losses.values()]
    for name in next(iter(trained.metrics.values())):
        columns[name] = [round(found[name], 4) for found in trained.metrics.values()]
    return columns


@torch.no_grad()
def held_out_loss(model: Any, ids: torch.Tensor) -> float:
    """Return the mean language loss, nats per token, in evaluation mode."""
    model.eval()
    losses = [model(input_ids=part, labels=part).loss.item() for part in ids.split(8)]
    return statistics.fmean(losses)


def measures(model: Any, ids: torch.Tensor) -> dict[str, float]:
    """Return every target and norm on held-out text, means over the layers; change no weight."""
    with record(model, router_input=True) as recorder:
        model(input_ids=ids[:16], labels=ids[:16]).loss.backward()
    model.zero_grad()
    found: dict[str, float] = {}
    for gradient in GRADIENTS:
        for target in TARGETS:
            hits = torch.stack(list(gate_accuracy(recorder, target, gradient).values()))
            found[f"accuracy/{target}/{gradient}"] = hits.nanmean().item()
        with torch.no_grad():
            found[f"kl/{gradient}"] = smk_loss(recorder, model, ce=0.0, gradient=gradient).item()
    layers = list(recorder.layers.values())
    for gradient in ("params", "output"):
        last = [_least_weighted(x, getattr(x, f"grad_norm_{gradient}")) for x in layers]
        found[f"least_weighted/{gradient}"] = statistics.fmean(last)
    loads = [balance(layer.tokens_per_expert) for layer in layers]
    weights = [layer.weights / layer.weights.sum(-1, keepdim=True) for layer in layers]
    found["entropy"] = statistics.fmean(load.entropy for load in loads)
    found["max_violation"] = max(load.max_violation for load in loads)
    found["dead"] = float(sum(load.dead for load in loads))
    found["confidence"] = statistics.fmean(w.amax(-1).mean().item() for w in weights)
    found["last_weight"] = statistics.fmean(w.amin(-1).mean().item() for w in weights)
    return found


def _least_weighted(layer: LayerSignals, surprise_TK: torch.Tensor) -> float:
    """Return how often the smallest surprise is that of the router's own last choice."""
    kept_T = (surprise_TK > 0).any(-1)
    last_T = surprise_TK.argmin(-1) == layer.weights.argmin(-1)
    return (last_T & kept_T).sum().item() / kept_T.sum().item()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line described at the top of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "smk_tiny.yaml")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="in place of the file's max_steps")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "data" / "smk_tiny.jsonl")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    config = load_config(args.config)
    for seed in args.seeds:
        for name in args.variants:
            row = run(config, name, seed, args.steps)
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            found = ", ".join(f"{key} {value:.3f}" for key, value in row["held_out"].items())
            print(f"{name} seed {seed} ({row['seconds']} s): {found}", flush=True)


if __name__ == "__main__":
    main()
