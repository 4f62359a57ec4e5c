"""Time and memory of ``moe-patch merge`` on layers of Qwen3-30B-A3B's shape.

    python benchmarks/studies/merge.py /tmp/merge_study --layers 2 8

For each number of layers, write a random bf16 base (11 GB for 8) and a random fp32 adapter. The
adapter has rank 16 and is on experts, router and attention. Merge in a separate process, then
delete everything. Memory is the largest RssAnon of that process, read 20 times a second.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

SHAPE = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts_per_tok": 8, "vocab_size": 151936, "intermediate_size": 6144,
    "tie_word_embeddings": False,
}  # fmt: skip
RANK = 16


def make(folder: Path, layers: int) -> None:
    """Write a base and an adapter."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from moe_patch import lora_targets
    from moe_patch.serving.checkpoint import Entry, Part
    from moe_patch.serving.write import ShardFile, index_text

    config = Qwen3MoeConfig(num_hidden_layers=layers, dtype=torch.bfloat16, **SHAPE)
    config.architectures = ["Qwen3MoeForCausalLM"]
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    base = folder / "base"
    config.save_pretrained(base)
    noise = (torch.randn(1 << 26) * 0.02).bfloat16()
    files = {}
    for i in range(layers + 1):
        named = {
            k: v for k, v in model.state_dict().items() if (f"layers.{i}." in k) == (i < layers)
        }
        if i == layers:
            named = {k: v for k, v in model.state_dict().items() if ".layers." not in k}
        name = f"model-{i + 1:05d}-of-{layers + 1:05d}.safetensors"
        parts = [part for key, value in named.items() for part in stored(key, tuple(value.shape))]
        entries = [Entry(k, "plain", (Part(k, torch.bfloat16, s),), s, name) for k, s in parts]
        file = ShardFile(base / name, entries)
        for entry in entries:
            count = torch.Size(entry.shape).numel()
            for start in range(0, count, len(noise)):
                rows = start // (count // entry.shape[0])
                file.write(entry.parts[0], noise[: min(len(noise), count - start)], rows)
        file.close()
        files[name] = entries
    (base / "model.safetensors.index.json").write_text(index_text(files))
    wrapped = get_peft_model(
        model, LoraConfig(r=RANK, **lora_targets(model)), low_cpu_mem_usage=True
    )
    factors = {
        key.replace(".default", ""): torch.randn(value.shape) * 0.02
        for key, value in wrapped.state_dict().items()
        if "lora_" in key
    }
    wrapped.peft_config["default"].save_pretrained(folder / "adapter")
    save_file(factors, folder / "adapter" / "adapter_model.safetensors")


def stored(key: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Return a parameter's tensors in the hub's layout: names and shapes."""
    if not key.endswith(("gate_up_proj", "down_proj")):
        return [(key, shape)]
    experts = key.rpartition(".")[0]
    E, rows, columns = shape
    names = ["down_proj"] if key.endswith("down_proj") else ["gate_proj", "up_proj"]
    own = (rows // len(names), columns)
    return [(f"{experts}.{e}.{name}.weight", own) for e in range(E) for name in names]


def merge_here(folder: Path) -> None:
    """Merge, then print seconds, parameters and the largest RssAnon."""
    from moe_patch.cli import main

    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            lines = Path("/proc/self/status").read_text().splitlines()
            most[0] = max(most[0], *(int(x.split()[1]) for x in lines if x.startswith("RssAnon")))

    thread = threading.Thread(target=watch)
    thread.start()
    start = time.monotonic()
    status = main(["merge", str(folder / "adapter"), "--base", str(folder / "base"), "--out",
                   str(folder / "out")])  # fmt: skip
    done.set()
    thread.join()
    size = sum(p.stat().st_size for p in (folder / "out").glob("*.safetensors"))
    seconds = time.monotonic() - start
    print(json.dumps({
        "status": status, "seconds": round(seconds, 1),
        "processor_seconds": round(time.process_time(), 1),
        "rss_anon_gib": round(most[0] / 2**20, 2),
        "parameters": size // 2, "million_per_second": round(size / 2e6 / seconds, 1),
    }))  # fmt: skip


def main_study() -> None:
    """Run the study for every number of layers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        merge_here(args.folder)
        return
    for layers in args.layers:
        args.folder.mkdir(parents=True)
        try:
            make(args.folder, layers)
            command = [sys.executable, __file__, str(args.folder), "--here"]
            found = subprocess.run(command, check=True, capture_output=True, text=True)
            print(layers, "layers:", found.stdout.strip().splitlines()[-1], flush=True)
        finally:
            shutil.rmtree(args.folder)


if __name__ == "__main__":
    main_study()
