"""Compare logs and adapters of two runs: compare.py FOLDER PLAIN PATCHED MODE; print JSON.

Runs in a framework's own environment, without moe_patch: plain PEFT loads both adapters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def logged(run: Path) -> list[float]:
    """Return the losses, step by step, from the Trainer's own state."""
    states = [json.loads(p.read_text()) for p in run.rglob("trainer_state.json")]
    last = max(states, key=lambda state: state["global_step"])
    return [float(entry["loss"]) for entry in last["log_history"] if "loss" in entry]


def adapter_logits(folder: Path, run: Path) -> torch.Tensor:
    from peft import PeftModel

    files = sorted(run.rglob("adapter_model.safetensors"), key=lambda p: p.stat().st_mtime)
    base = AutoModelForCausalLM.from_pretrained(folder / "tiny", dtype=torch.float32)
    ids = torch.arange(4, 68).view(2, 32)
    with torch.no_grad():
        before = base(ids).logits
        after = PeftModel.from_pretrained(base, files[-1].parent)(ids).logits
    return torch.stack([before, after])


def main(folder: Path, plain: str, patched: str, mode: str) -> dict:
    a, b = (logged(folder / run) for run in (plain, patched))
    pairs = list(zip(a, b, strict=True))
    result = {
        "steps": len(a),
        "first": a[0],
        "last": a[-1],
        "losses_max_rel": max(abs(x - y) / max(abs(x), 1e-8) for x, y in pairs),
        "loss_moved": abs(a[-1] - a[0]) / max(abs(a[0]), 1e-8),
        "adapter_loads": None,
    }
    if mode != "full":
        theirs, ours = (adapter_logits(folder, folder / run) for run in (plain, patched))
        far = float((ours[1] - ours[0]).norm())
        near = float((ours[1] - theirs[1]).norm())
        result["adapter_loads"] = far > 0 and near < 1e-2 * far
    return result


if __name__ == "__main__":
    where, *rest = sys.argv[1:]
    print(json.dumps(main(Path(where), *rest[:3])))
