"""Compare adapters in bf16 with adapters in fp32 over 300 steps: is a compensated update needed?

A small bf16 Qwen3-MoE learns the first half of the standard library's docstrings with all weights.
Adapters on attention and experts then learn the second half in three ways: fp32, bf16, and bf16
with a compensated update. The latter keeps each update's rounding error in a second bf16 tensor and
adds it to the next update (Kahan's summation). Learning rates are the recipe's and five times that,
seeds three.

    python benchmarks/studies/adapter_dtype.py --out rows.jsonl
    python benchmarks/studies/adapter_dtype.py --draw rows.jsonl --svg docs/img/adapter_dtype.svg
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1])]

WAYS = ("fp32", "bf16", "bf16 compensated")
RATES = (2e-4, 1e-3)
STEPS, BASE_STEPS = 300, 400
LENGTH, BATCH, VOCABULARY = 32, 8, 512
LAST = 50  # steps whose mean loss stands for a run
SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": 8, "num_experts_per_tok": 2, "initializer_range": 0.05,
}  # fmt: skip


def halves() -> tuple[Any, Any, Any]:
    """Return the tokens of both halves of the text, shuffled by document, and the end token."""
    import torch

    from moe_patch.train.config import DataConfig
    from moe_patch.train.data import make_blocks, read_texts, train_tokenizer

    texts = read_texts(DataConfig("python-stdlib-docstrings"))
    tokenizer = train_tokenizer(texts, VOCABULARY)
    blocks = make_blocks(texts, tokenizer, LENGTH).ids_NL
    middle = len(blocks) // 2
    order = torch.Generator().manual_seed(0)
    first, second = blocks[:middle], blocks[middle:]
    return (
        first[torch.randperm(len(first), generator=order)],
        second[torch.randperm(len(second), generator=order)],
        len(tokenizer),
    )


def pretrained(ids_NL: Any, vocabulary: int) -> Any:
    """Return a bf16 model that fp32 weights learnt in BASE_STEPS steps."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=vocabulary, **SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    losses = train(model, optimizer, ids_NL, BASE_STEPS, 3e-3)
    print(f"base: loss {losses[0]:.3f} to {losses[-1]:.3f}", flush=True)
    return model.to(torch.bfloat16)


def train(model: Any, optimizer: Any, ids_NL: Any, steps: int, rate: float) -> list[float]:
    """Train on batches in order, with a warm-up of 20 steps and a cosine; return the losses."""
    import math

    losses = []
    for step in range(steps):
        at = step * BATCH % (len(ids_NL) - BATCH)
        share = min((step + 1) / 20, (1 + math.cos(math.pi * step / steps)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate * share
        batch = ids_NL[at : at + BATCH]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


class Compensated:
    """AdamW whose steps on bf16 weights keep their rounding error in a second bf16 tensor.

    The optimizer steps on fp32 copies. A weight w with error c becomes bf16(w + c + update), and c
    the bf16 remainder, as in Kahan's summation.
    """

    def __init__(self, parameters: list[Any], rate: float) -> None:
        import torch

        self.parameters = parameters
        self.copies = [p.detach().float().requires_grad_() for p in parameters]
        self.errors = [torch.zeros_like(p) for p in parameters]
        self.inner = torch.optim.AdamW(self.copies, lr=rate, weight_decay=0.0)
        self.param_groups = self.inner.param_groups

    def step(self) -> None:
        for p, wide, error in zip(self.parameters, self.copies, self.errors, strict=True):
            wide.data = p.detach().float() + error.float()
            wide.grad = None if p.grad is None else p.grad.float()
        self.inner.step()
        for p, wide, error in zip(self.parameters, self.copies, self.errors, strict=True):
            p.data.copy_(wide.data)
            error.copy_(wide.data - p.data.float())

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.parameters:
            p.grad = None


def adapted(base: Any, way: str, rate: float, seed: int) -> tuple[Any, Any]:
    """Return a patched PeftModel over a copy of the base, and its optimizer."""
    import torch

    from moe_patch import lora_targets, patch_model
    from moe_patch.train.adapters import add_adapters

    model = copy.deepcopy(base)
    lora = {"r": 8, "lora_alpha": 16, **lora_targets(model, router=False)}
    dtype = "float32" if way == "fp32" else "bfloat16"
    model = patch_model(add_adapters(model, lora, seed, dtype)).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    if way == "bf16 compensated":
        return model, Compensated(trained, rate)
    return model, torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)


def run(options: argparse.Namespace) -> None:
    """Train every way, rate and seed, and append one row each."""
    import torch

    first, second, vocabulary = halves()
    base = pretrained(first, vocabulary)
    for rate in options.rates:
        for seed in range(options.seeds):
            order = torch.randperm(len(second), generator=torch.Generator().manual_seed(seed))
            for way in WAYS:
                start = time.perf_counter()
                model, optimizer = adapted(base, way, rate, seed)
                with torch.autocast("cpu", torch.bfloat16, enabled=way == "fp32"):
                    losses = train(model, optimizer, second[order], options.steps, rate)
                row = {
                    "way": way, "rate": rate, "seed": seed,
                    "losses": [round(loss, 4) for loss in losses],
                }  # fmt: skip
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                last = statistics.mean(losses[-LAST:])
                print(
                    f"{way} {rate} {seed}: {last:.4f}, {time.perf_counter() - start:.0f} s",
                    flush=True,
                )


def table(rows: list[dict[str, Any]]) -> str:
    """Return the mean loss of the last steps by rate and way, and its difference to fp32."""
    lines = []
    for rate in sorted({row["rate"] for row in rows}):
        means: dict[str, dict[int, float]] = {way: {} for way in WAYS}
        for row in rows:
            if row["rate"] == rate:
                means[row["way"]][row["seed"]] = statistics.mean(row["losses"][-LAST:])
        for way in WAYS:
            apart = [means[way][seed] - means["fp32"][seed] for seed in means["fp32"]]
            mean = statistics.mean(means[way].values())
            said = ", ".join(f"{one:+.4f}" for one in apart)
            lines.append(f"{rate:g} | {way} | {mean:.4f} | {said}")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the losses of the three ways, a panel a rate, as means over ten steps and all seeds."""
    import matplotlib
    from bench_lib.charts import COLOURS
    from matplotlib import pyplot

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "moe_patch", "svg.fonttype": "none", "font.size": 9}
    rates = sorted({row["rate"] for row in rows})
    figure, panels = pyplot.subplots(1, len(rates), figsize=(8, 3.2), layout="constrained")
    for axes, rate in zip(panels, rates, strict=True):
        for way, colour, style in zip(WAYS, COLOURS, ("-", "--", ":"), strict=False):
            runs = [r["losses"] for r in rows if r["way"] == way and r["rate"] == rate]
            mean = [statistics.mean(step) for step in zip(*runs, strict=True)]
            tens = [statistics.mean(mean[at : at + 10]) for at in range(0, len(mean), 10)]
            steps = [10 * at + 5 for at in range(len(tens))]
            axes.plot(steps, tens, style, color=colour, label=way, linewidth=1.4)
        axes.set_title(f"learning rate {rate:g}", loc="left", fontsize=9)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("training loss")
    panels[0].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to append the rows to")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="*", default=RATES)
    parser.add_argument("--draw", type=Path, help="rows to draw instead")
    parser.add_argument("--svg", type=Path, help="file of the drawing")
    options = parser.parse_args()
    if options.draw is None:
        return run(options)
    rows = [json.loads(line) for line in options.draw.read_text(encoding="utf-8").splitlines()]
    print(table(rows))
    if options.svg is not None:
        draw(rows, options.svg)


if __name__ == "__main__":
    main()
