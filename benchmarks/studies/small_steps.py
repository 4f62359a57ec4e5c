"""Time QLoRA steps of few tokens beside PEFT over bitsandbytes, on 12 layers of Qwen3-30B-A3B.

Both train adapters of rank 16 on attention and experts by the Trainer, with checkpointing and
torch's fused AdamW. Tokens a second are those of 20 steps after three. Weights are random.
bitsandbytes packs Linear modules alone, so attention is in NF4 and the fused experts of
transformers stay in bf16. In each forward PEFT adds B A to the whole weight of every expert, and
transformers' grouped products run on the sum. Ours has the experts in NF4 as well. "prepared" calls
peft.prepare_model_for_kbit_training first, as PEFT's guide says. That casts everything that is not
in 4 bits to fp32, experts included.

    python benchmarks/studies/small_steps.py --commit SHA --out rows.jsonl
    python benchmarks/studies/small_steps.py --device cpu --small
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import plan_rows
from plan_rows import Setting

MODEL, LAYERS, STEPS = "Qwen3-30B-A3B", 12, 23
TOKENS = (512, 2048, 8192)
IMPLS: dict[str, dict[str, Any]] = {
    "moe_patch": {"storage": "nf4"},
    "peft_bitsandbytes": {"storage": "bf16", "patched": False},
    "peft_bitsandbytes prepared": {"storage": "bf16", "patched": False, "prepared": True},
}


def settings() -> dict[tuple[str, int], Setting]:
    """Return the settings by implementation and tokens; those of "prepared" come last."""
    common = {"linear": "nf4", "steps": STEPS}
    pairs = [(impl, tokens) for tokens in TOKENS for impl in IMPLS]
    return {
        (impl, tokens): Setting(MODEL, LAYERS, tokens=tokens, **common, **IMPLS[impl])
        for impl, tokens in sorted(pairs, key=lambda pair: "prepared" in pair[0])
    }


def append(out: Path | None, impl: str, tokens: int, row: dict[str, Any] | None) -> None:
    """Append what a row of plan_rows has about steps."""
    if row is None or out is None:
        return
    kept = ("model", "layers", "rank", "allocated_gib", "reserved_gib", "context_gib",
            "tokens_per_s")  # fmt: skip
    found = {"impl": impl, "tokens": tokens} | {name: row[name] for name in kept}
    found |= {name: row[name] for name in ("card", "commit", "date")}
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", default="", help="full SHA, for the rows")
    parser.add_argument("--out", type=Path, help="file to append the rows to")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small widths, two layers, 64 tokens")
    parser.add_argument("--limit", type=float, help="seconds after which no setting is started")
    parser.add_argument("--warm", action="store_true", help="compile all kernels at once first")
    options = parser.parse_args()
    wanted = settings()
    out, options.out = options.out, None
    rows = plan_rows.run_all(list(wanted.values()), options)
    for (impl, tokens), row in zip(wanted, rows, strict=True):
        append(out, impl, tokens, row)


if __name__ == "__main__":
    main()
