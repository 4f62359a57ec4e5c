#!/usr/bin/env python3
"""Measure saving and loading: memory of an adapter on experts, time of packed experts.

    python benchmarks/studies/saved_files.py adapter --folder /tmp/study
    python benchmarks/studies/saved_files.py packed --folder /tmp/study --storage fp8

``adapter``: layers of Qwen3-30B's shape without values, adapters of 0.64 billion parameters in fp32
by a high rank. One process saves and another one loads. Meanwhile this one reads their RssAnon
(memory that belongs to no file). It prints the peak above the resident memory before, in bytes of
the adapter.

``packed``: a model of about a gigabyte with packed experts is saved, and read by load_quantized.
The shape is that of Qwen3-30B, for mxfp4 that of gpt-oss-20b. A plain read of the same
files into memory is timed beside it. Both end with a sum over every byte, because loading may map
files without reading them. Times are with the files in the page cache, and with the files dropped
from it before each read.

The folder is made and deleted again.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

SHAPE = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 1024,
    "intermediate_size": 768,
}  # fmt: skip
LAYERS, RANK = 2, 384
POLL_S = 0.002


def base(layers: int = LAYERS) -> Any:
    """Layers of the shape whose weights are never written, so that they take no memory."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(num_hidden_layers=layers, **SHAPE))
    return model.to(torch.bfloat16).to_empty(device="cpu")


def adapted() -> Any:
    """The base with adapters, every value written."""
    from peft import LoraConfig, get_peft_model

    targets = ["experts.gate_up_proj", "experts.down_proj"]
    model = get_peft_model(base(), LoraConfig(r=RANK, target_parameters=targets))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.fill_(0.5)
    return model


def save(folder: Path, tell: Connection) -> None:
    """Save an adapter; tells when it begins and ends."""
    model = adapted()
    tell.send(["begin"])
    model.save_pretrained(folder)
    tell.send(["end"])


def load(folder: Path, tell: Connection) -> None:
    """Load it on a base of its own."""
    from peft import PeftModel

    model = base()
    tell.send(["begin"])
    loaded = PeftModel.from_pretrained(model, folder)
    tell.send(["end"])
    assert all((p == 0.5).all() for name, p in loaded.named_parameters() if "lora_" in name)


def anonymous(pid: int) -> int:
    """Bytes of RssAnon of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"process {pid}: no RssAnon in /proc/{pid}/status")


def peak(work: Callable[[Path, Connection], None], folder: Path) -> tuple[int, int]:
    """Bytes resident before a work in a process of its own, and at its peak."""
    context = multiprocessing.get_context("spawn")
    hear, tell = context.Pipe()
    process = context.Process(target=work, args=(folder, tell))
    process.start()
    tell.close()
    hear.recv()
    before = highest = anonymous(process.pid or 0)
    while not hear.poll(POLL_S):
        highest = max(highest, anonymous(process.pid or 0))
    hear.recv()
    process.join()
    return before, highest


def study_adapter(folder: Path) -> dict[str, Any]:
    """Peaks in bytes of the adapter's file."""
    found: dict[str, Any] = {}
    for work in (save, load):
        before, highest = peak(work, folder)
        nbytes = (folder / "adapter_model.safetensors").stat().st_size
        found["bytes"] = nbytes
        found[work.__name__] = {
            "before": before, "peak": highest, "ratio": round((highest - before) / nbytes, 3)
        }  # fmt: skip
        print(json.dumps(found), flush=True)
    return found


def touched(tensors: Any) -> int:
    """Read every byte, eight at a time."""
    total = 0
    for tensor in tensors:
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        whole = len(flat) // 8 * 8
        total += int(flat[:whole].view(torch.int64).sum()) + int(flat[whole:].sum())
    return total


def timed(work: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def drop(folder: Path) -> None:
    """Take the files of a folder out of the page cache; no tensor may still map them."""
    gc.collect()
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_packed(folder: Path, storage: str) -> None:
    """Write about a gigabyte with experts in the storage, no value left unwritten."""
    from moe_patch import quantize_experts

    if storage == "mxfp4":
        write_gpt_oss(folder)
        return
    model = base(3 if storage == "nf4" else 2)
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    quantize_experts(model, storage).save_pretrained(folder, max_shard_size="100MB")


def write_gpt_oss(folder: Path) -> None:
    """Write layers of gpt-oss-20b's shape, in the names and with the config of published files."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, GptOssConfig

    config = GptOssConfig(num_hidden_layers=3, num_local_experts=32, vocab_size=1024)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    tensors = {}
    for name, value in empty.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            E, inputs, out = value.shape
            tensors[f"{name}_blocks"] = torch.ones(E, out, inputs // 32, 16, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.full((E, out, inputs // 32), 120, dtype=torch.uint8)
        else:
            tensors[name] = torch.full(value.shape, 0.01, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config.architectures, config.dtype = ["GptOssForCausalLM"], "bfloat16"
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(folder)


def read_into_memory(path: Path) -> torch.Tensor:
    """Read a file into new memory."""
    found = torch.empty(path.stat().st_size, dtype=torch.uint8)
    with path.open("rb", buffering=0) as file:
        file.readinto(found.numpy())  # type: ignore[attr-defined]
    return found


def study_packed(folder: Path, storage: str, repeats: int = 5) -> dict[str, Any]:
    """Seconds of a plain read and of load_quantized, in turn, and their ratio."""
    from moe_patch import load_quantized

    write_packed(folder, storage)
    files = sorted(folder.glob("*.safetensors"))

    def plain() -> int:
        return touched(map(read_into_memory, files))

    def ours() -> int:
        return touched(load_quantized(str(folder), storage).state_dict().values())

    size = sum(file.stat().st_size for file in files)
    found: dict[str, Any] = {"storage": storage, "bytes": size}
    for cache in ("warm", "cold"):
        times = []
        for _ in range(repeats + 1):
            pair = []
            for work in (plain, ours):
                if cache == "cold":
                    drop(folder)
                pair.append(timed(work))
            times.append(pair)
        read, loaded = (statistics.median(column) for column in zip(*times[1:], strict=True))
        found[cache] = {"plain_s": read, "loaded_s": loaded, "speed": round(read / loaded, 3)}
    return found


def main() -> None:
    """Run one study and delete its files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("study", choices=("adapter", "packed"))
    parser.add_argument("--folder", type=Path, required=True, help="to make; deleted at the end")
    parser.add_argument("--storage", choices=("nf4", "fp8", "mxfp4"), default="nf4")
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    try:
        if args.study == "adapter":
            print(json.dumps(study_adapter(args.folder)))
        else:
            print(json.dumps(study_packed(args.folder, args.storage)))
    finally:
        shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
