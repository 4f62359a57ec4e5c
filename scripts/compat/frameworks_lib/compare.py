"""Compare logs and adapters of two runs: compare.py FOLDER PLAIN PATCHED MODE; print JSON.

With mode ``merge`` PLAIN is the run that saved an adapter, and PATCHED one that merged it.

Runs in a framework's own environment, without moe_patch: plain PEFT loads both adapters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def logged(run: Path) -> list[float]:
    """The losses, step by step, from the Trainer's own state or a file of one loss a line."""
    if (run / "losses.jsonl").exists():
        return [float(line) for line in (run / "losses.jsonl").read_text().splitlines()]
    if (run / "log.jsonl").exists():  # verl's
        lines = [json.loads(line)["data"] for line in (run / "log.jsonl").read_text().splitlines()]
        return [data["train/loss"] for data in lines if "train/loss" in data]
    states = [json.loads(p.read_text()) for p in run.rglob("trainer_state.json")]
    last = max(states, key=lambda state: state["global_step"])
    return [float(entry["loss"]) for entry in last["log_history"] if "loss" in entry]


def of_shard(run: Path) -> Path:
    """Write verl's checkpoint of one process as PEFT would; the folder."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    (path,) = run.rglob("model_world_size_1_rank_0.pt")
    state = torch.load(path, weights_only=False)
    tensors = {
        key.replace(".default", ""): getattr(value, "_local_tensor", value).contiguous()
        for key, value in state.items()
        if "lora_" in key
    }
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], target_parameters=experts
    )
    config.save_pretrained(run / "adapter")
    save_file(tensors, run / "adapter" / "adapter_model.safetensors")
    return run / "adapter"


def adapter_logits(folder: Path, run: Path) -> torch.Tensor:
    from peft import PeftModel

    files = sorted(run.rglob("adapter_model.safetensors"), key=lambda p: p.stat().st_mtime)
    adapter = files[-1].parent if files else of_shard(run)
    base = AutoModelForCausalLM.from_pretrained(folder / "tiny", dtype=torch.float32)
    ids = torch.arange(4, 68).view(2, 32)
    with torch.no_grad():
        before = base(ids).logits
        after = PeftModel.from_pretrained(base, adapter)(ids).logits
    return torch.stack([before, after])


def merge(folder: Path, adapter: str, merged: str) -> dict:
    """Compare the logits of a merged model with those of PEFT's adapter on its base."""
    theirs = adapter_logits(folder, folder / adapter)
    ids = torch.arange(4, 68).view(2, 32)
    ours = AutoModelForCausalLM.from_pretrained(folder / merged / "merged", dtype=torch.float32)
    with torch.no_grad():
        apart = float((ours(ids).logits - theirs[1]).norm() / theirs[1].norm())
    moved = float((theirs[1] - theirs[0]).norm() / theirs[1].norm())
    return {"merged_max_rel": apart, "adapter_moved": moved}


def main(folder: Path, plain: str, patched: str, mode: str) -> dict:
    if mode == "merge":
        return merge(folder, plain, patched)
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
    if mode not in ("full", "by_name"):
        theirs, ours = (adapter_logits(folder, folder / run) for run in (plain, patched))
        far = float((ours[1] - ours[0]).norm())
        near = float((ours[1] - theirs[1]).norm())
        result["adapter_loads"] = far > 0 and near < 1e-2 * far
    return result


if __name__ == "__main__":
    where, *rest = sys.argv[1:]
    print(json.dumps(main(Path(where), *rest[:3])))
