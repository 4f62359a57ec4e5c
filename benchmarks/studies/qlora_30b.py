"""Train LoRA adapters on a model of Qwen3-30B-A3B's size with 4- or 8-bit experts on one GPU.

The weights are random: this shows that the model fits and how fast it runs. The 16-bit experts
never exist; random packed bytes are made on the GPU, layer by layer. Prints one line of JSON.

    python benchmarks/studies/qlora_30b.py                       48 layers, nf4, 4096 tokens
    python benchmarks/studies/qlora_30b.py --tiny --device cpu   the same in small
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from moe_patch import lora_targets, patch_model
from moe_patch.formats.packed import PackedWeight, pack
from moe_patch.formats.tensor import QuantTensor, parameter
from moe_patch.quant import memory, state
from moe_patch.quant.surgery import expert_projections

QWEN3_30B = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "rope_theta": 1e6, "max_position_embeddings": 40960,
}  # fmt: skip
TINY = QWEN3_30B | {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip


def random_packed(shape: tuple[int, int, int], storage: str, device: torch.device) -> PackedWeight:
    """Make random packed experts of realistic scale: real scales of one, random bytes for all."""
    E, rows, columns = shape
    sample = torch.randn(1, rows, columns, device=device, dtype=torch.bfloat16) * columns**-0.5
    one = pack(sample, storage, device, "sample")
    if storage == "fp8":
        values = one.packed.expand(E, -1, -1).contiguous()
        return PackedWeight(storage, values, (one.scales[0].repeat(E, 1, 1),), one.dtype)
    absmax, nested, code, offset, levels = one.scales
    packed = torch.randint(0, 256, (E, rows, columns // 2), device=device, dtype=torch.uint8)
    absmax = absmax.repeat(E)
    nested = nested.mean().expand(-(-absmax.numel() // 256)).contiguous()
    return PackedWeight(storage, packed, (absmax, nested, code, offset, levels), one.dtype)


def build(sizes: dict[str, Any], layers: int, storage: str, device: torch.device) -> Any:
    """Build the model with packed experts on the meta device and fill it module by module."""
    config = Qwen3MoeConfig(**sizes, num_hidden_layers=layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for one in expert_projections(model):
        packed = random_packed(tuple(one.stored.shape), storage, device)
        setattr(one.module, one.name, parameter(QuantTensor(packed)))
        state.watch(one.module)
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None and value.is_meta:
                filled = torch.empty_like(value, device=device)
                filled = filled.normal_(std=0.02) if value.dim() > 1 else filled.fill_(1.0)
                setattr(module, name, nn.Parameter(filled, requires_grad=False))
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def adapt(model: Any, rank: int, checkpointing: bool) -> Any:
    """Add adapters to attention, router and experts, patch, and set training mode."""
    config = LoraConfig(r=rank, lora_alpha=2 * rank, **lora_targets(model))
    with torch.device(next(model.parameters()).device):  # else PEFT draws 0.6 billion on the CPU
        adapted = get_peft_model(model, config)
    patch_model(adapted, fuse_lora="require")
    if checkpointing:
        adapted.gradient_checkpointing_enable({"use_reentrant": False})
        adapted.enable_input_require_grads()
    return adapted.train()


def train(model: Any, sequence: int, steps: int, device: torch.device) -> tuple[list, list]:
    """Return losses and seconds of each step, on one random sequence."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
    ids = torch.randint(0, model.config.vocab_size, (1, sequence), device=device)
    losses, seconds = [], []
    for _ in range(steps):
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        seconds.append(round(time.perf_counter() - start, 3))
    return losses, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--storage", default="nf4", choices=("nf4", "fp8"))
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    sizes, layers = (TINY, 2) if options.tiny else (QWEN3_30B, options.layers)
    sequence = 64 if options.tiny else options.sequence
    model = build(sizes, layers, options.storage, device)
    experts = memory.experts_memory(model).stored
    values = sum(p.numel() for p in model.parameters())
    adapted = adapt(model, options.rank, not options.no_checkpointing)
    losses, seconds = train(adapted, sequence, options.steps, device)
    cuda = device.type == "cuda"
    print(json.dumps({
        "card": torch.cuda.get_device_name() if cuda else "cpu",
        "layers": layers, "storage": options.storage, "sequence": sequence, "rank": options.rank,
        "checkpointing": not options.no_checkpointing,
        "billion_parameters": round(values / 1e9, 2),
        "trained_parameters": sum(p.numel() for p in adapted.parameters() if p.requires_grad),
        "experts_gib": round(experts / 2**30, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "losses": losses, "seconds": seconds,
        "tokens_per_s": round(sequence / min(seconds), 1),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
