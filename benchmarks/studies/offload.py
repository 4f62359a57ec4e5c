"""Time and memory of QLoRA steps with the experts resident and with them in host memory.

Qwen3-30B-A3B's sizes with random weights made in packed form; fewer layers if --layers says so. One
process measures how fast page-locked memory is copied to the card, and steps with resident
experts. Then come the same steps of the same model with offload_experts. Rows go to --out.

    python benchmarks/studies/offload.py --layers 48 --tokens 2048 16384 --commit SHA --out FILE
    python benchmarks/studies/offload.py --tiny --device cpu          the same in small
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers
from peft import LoraConfig, get_peft_model
from qlora_30b import QWEN3_30B, TINY, build
from torch import Tensor

from moe_patch import lora_targets, patch_model, unpatch_model
from moe_patch.runtime import offload
from moe_patch.runtime.transfers import CudaTransfer, HostTransfer, LockedMemory

GIB = 2**30
PIECE = 192 << 20  # the packed up projection of one block


class Counting:
    """The transfer to a device, counting bytes."""

    moved = 0

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Any) -> Any:
        pairs = list(pairs)
        Counting.moved += sum(source.nbytes for _, source in pairs)
        return super().copy(pairs, after)  # type: ignore[misc]


class CountingCuda(Counting, CudaTransfer):
    """Copies of CUDA, counted."""


class CountingHost(Counting, HostTransfer):
    """Copies of the host, counted."""


def say(*words: Any) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S}", *words, flush=True)


def copy_rate(device: torch.device) -> float:
    """Return GiB a second from page-locked host memory to the device, median of ten pieces."""
    if device.type != "cuda":
        return 0.0
    source = torch.ones(PIECE, dtype=torch.uint8)
    locked = LockedMemory(source.untyped_storage(), "copy rate")
    into = torch.empty(PIECE, dtype=torch.uint8, device=device)
    times = []
    for _ in range(11):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        into.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    locked.unlock()
    return PIECE / GIB / (statistics.median(times[1:]) / 1e3)


def adapted(model: Any, options: argparse.Namespace, device: torch.device) -> Any:
    """Add adapters in the model's dtype to attention, router and experts; checkpoint the layers."""
    config = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, **lora_targets(model))
    with torch.device(device):
        found = get_peft_model(model, config, autocast_adapter_dtype=False)
    for factor in found.parameters():
        if factor.requires_grad:
            factor.data = factor.data.bfloat16()
    found.gradient_checkpointing_enable({"use_reentrant": False})
    found.enable_input_require_grads()
    return found.train()


def on_liger(model: Any) -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3_moe

    apply_liger_kernel_to_qwen3_moe(
        rope=True, rms_norm=True, swiglu=False, fused_linear_cross_entropy=True, model=model
    )


def optimizer_of(name: str, model: Any) -> Any:
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(trained, lr=1e-4)
    if name == "sgd":
        return torch.optim.SGD(trained, lr=1e-4)
    return torch.optim.AdamW(trained, lr=1e-4, fused=trained[0].is_cuda)


def synchronised(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(step: Callable[[], None], steps: int, device: torch.device) -> dict[str, Any]:
    """Return median milliseconds of a step, its peak and the bytes it copied, after two steps."""
    for _ in range(2):
        step()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times = []
    Counting.moved = 0
    for _ in range(steps):
        begin = synchronised(device)
        step()
        times.append((synchronised(device) - begin) * 1e3)
    cuda = device.type == "cuda"
    return {
        "ms": round(statistics.median(times), 2),
        "all_ms": [round(t, 1) for t in times],
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 3) if cuda else None,
        "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 3) if cuda else None,
        "moved_gib": round(Counting.moved / steps / GIB, 4),
    }


def decoding(model: Any, count: int, device: torch.device) -> float:
    """Return milliseconds a token of greedy decoding."""
    model.eval()
    prompt = torch.ones(1, 4, dtype=torch.long, device=device)
    options = {"do_sample": False, "min_new_tokens": count, "max_new_tokens": count}
    with torch.no_grad():
        model.generate(input_ids=prompt, pad_token_id=0, **options)
        begin = synchronised(device)
        model.generate(input_ids=prompt, pad_token_id=0, **options)
        end = synchronised(device)
    model.train()
    return round((end - begin) * 1e3 / count, 2)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--storage", default="nf4", choices=("nf4", "fp8"))
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--optimizer", default="sgd", choices=("sgd", "adamw", "adamw_8bit"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--decode", type=int, default=0, help="tokens to decode")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out")
    return parser.parse_args()


def common(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the fields that all rows of a run share."""
    return {
        "run": f"{datetime.now(UTC):%Y%m%d%H%M%S}", "date": f"{datetime.now(UTC):%FT%TZ}",
        "commit": options.commit, "torch": torch.__version__,
        "transformers": transformers.__version__,
        "card": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "model": "tiny" if options.tiny else "Qwen3-30B-A3B",
        "layers": 2 if options.tiny else options.layers, "storage": options.storage,
        "rank": options.rank, "adapters": "bf16", "optimizer": options.optimizer,
        "checkpointing": True, "liger": options.liger,
        "copy_gib_s": round(copy_rate(device), 2),
    }  # fmt: skip


def main() -> None:
    options = arguments()
    device = torch.device(options.device)
    torch.manual_seed(0)
    shared = common(options, device)
    say(shared)
    sizes = TINY if options.tiny else QWEN3_30B
    base = build(sizes, shared["layers"], options.storage, device)
    if options.liger:
        on_liger(base)
    model = adapted(base, options, device)
    say("built")
    optimizer = optimizer_of(options.optimizer, model)
    offload.transfer_to = lambda d: (CountingCuda if d.type == "cuda" else CountingHost)(d)
    resident: dict[int, float] = {}
    for away in (False, True):
        begin = synchronised(device)
        patch_model(model, fuse_lora="require", offload_experts=away)
        seconds = round(synchronised(device) - begin, 2)
        say("patched", away, seconds, "s")
        for tokens in options.tokens:
            ids = torch.randint(0, sizes["vocab_size"], (1, tokens), device=device)

            def step(ids: Tensor = ids) -> None:
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            found = measure(step, options.steps, device)
            row = {**shared, "tokens": tokens, "offload": away, "patch_s": seconds, **found}
            if away:
                row |= compared(row, resident[tokens])
            resident.setdefault(tokens, row["ms"])
            if options.decode and tokens == options.tokens[0]:
                row["decode_ms"] = decoding(model, options.decode, device)
            say(row)
            if options.out:
                with Path(options.out).open("a") as file:
                    file.write(json.dumps(row) + "\n")
        if not away:
            unpatch_model(model)


def compared(row: dict[str, Any], resident: float) -> dict[str, float]:
    """Return the time of the copies alone, and the step's over the larger of it and resident."""
    copies = row["moved_gib"] / row["copy_gib_s"] * 1e3 if row["copy_gib_s"] else 0.0
    ratio = row["ms"] / max(resident, copies)
    return {"resident_ms": resident, "copies_ms": round(copies, 2), "ratio": round(ratio, 4)}


if __name__ == "__main__":
    main()
