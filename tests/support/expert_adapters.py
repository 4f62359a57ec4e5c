"""Adapters on experts of a tiny model, in one process (PEFT alone) and on several ranks.

passes(...) runs forward and backward on batches whose tokens use few experts, or any; a run is
{"loss": ..., parameter: gradient, ...} with whole gradients. Rank r's batch has number r where
ranks have batches of their own.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers.distributed import DistributedConfig

from tests.support import tiny_models
from tests.support.adapters import EXPERTS, attention, lora_config

LEARNING_RATE = 0.5
# Tokens below HALF use the first experts, others the last; "few" has the former only.
HALF, VOCABULARY, FEW = 50, 100, 2
BATCHES = ("few", "any")
MODELS = ("qwen3_moe", "deepseek_v3", "gpt_oss")
# Older releases do not exchange tokens by default; their flag divides the experts alone.
DISPATCHES = "ep_implementation" in {field.name for field in fields(DistributedConfig)}
dispatches = pytest.mark.skipif(not DISPATCHES, reason="no ep_implementation in DistributedConfig")


class Layout(NamedTuple):
    """Options of transformers' config, and what follows from them.

    Attributes:
        options: arguments of DistributedConfig.
        batches: number of batches in one step; rank r has batch r * batches // world.
        ep: number of ranks that hold all experts together.
        dense: whether dense modules are whole on each rank, so that they can carry adapters.
    """

    options: dict[str, Any]
    batches: int
    ep: int
    dense: bool


def layouts(world: int) -> dict[str, Layout]:
    """Return each way to divide experts over ``world`` ranks."""
    if not DISPATCHES:
        shared = {"tp_size": world, "enable_expert_parallel": True}
        return {"all_reduce": Layout(shared, 1, world, True)}
    shared = {"tp_size": world, "ep_size": world}
    found = {
        "all_to_all": Layout(shared | {"ep_implementation": "all_to_all"}, 1, world, False),
        "all_reduce": Layout(shared | {"ep_implementation": "all_reduce"}, 1, world, False),
        "fsdp": Layout({"fsdp_size": world, "ep_size": world}, world, world, True),
    }
    if world == 4:
        both = {"fsdp_size": 2, "tp_size": 2}
        found["fsdp and copies"] = Layout({"fsdp_size": 4, "ep_size": 2}, 4, 2, True)
        found["tp and fsdp"] = Layout(both | {"ep_size": 2}, 2, 2, False)
        found["tp in ep"] = Layout(both | {"ep_size": 4}, 2, 4, False)
    return found


def make(name: str, **over: Any) -> Any:
    """Return a model whose router reads one direction of the stream, set by the token."""
    losses = {} if name == "deepseek_v3" else {"output_router_logits": False}
    model = tiny_models.build(name, vocab_size=VOCABULARY, **losses, **over)
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table *= 5.0
        table[:HALF, 0] = 6.0
        table[HALF:, 0] = -6.0
        for _, block in tiny_models.blocks(model):
            weight = router(block).weight
            weight *= 0.01
            weight[:FEW, 0] = 2.0
            weight[-FEW:, 0] = -2.0
    return model


def router(block: nn.Module) -> Any:
    return block._modules.get("gate") or block._modules["router"]


def config(name: str, dense: bool) -> LoraConfig:
    """Adapters on both projections of the experts, and on attention if ``dense``."""
    return lora_config(EXPERTS, attention(name) if dense else ())


def batch(kind: str, number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    high = HALF if kind == "few" else VOCABULARY
    ids = torch.randint(3, high, (2, 7), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def whole(t: Tensor) -> Tensor:
    """Gather a gradient from all ranks; factors B are strided, which torch 2.11 cannot gather."""
    if not isinstance(t, DTensor):
        return t.detach().clone()
    (placement,), local = t.placements, t.to_local().contiguous()
    if type(placement).__name__ != "_StridedShard":
        return t.redistribute(placements=[Replicate()]).to_local().clone()
    parts = [torch.empty_like(local) for _ in range(t.device_mesh.size())]
    torch.distributed.all_gather(parts, local, group=t.device_mesh.get_group())
    out, R = local.shape[0], placement.split_factor
    return torch.cat([part.view(out, R, -1) for part in parts], 2).reshape(out, -1)


def run(model: nn.Module, kind: str, numbers: tuple[int, ...]) -> dict[str, Tensor]:
    """Run forward and backward on each batch; losses and gradients are summed."""
    model.zero_grad(set_to_none=True)
    losses = []
    device = next(model.parameters()).device
    for number in numbers:
        given = {key: t.to(device) for key, t in batch(kind, number).items()}
        loss = model(**given).loss
        loss.backward()
        losses.append(loss.detach())
    found = {"loss": torch.stack(losses).sum()}
    for name, p in model.named_parameters():
        if p.grad is not None:
            found[name] = whole(p.grad)
    return found


def step(model: nn.Module) -> None:
    trained = [p for p in model.parameters() if p.grad is not None]
    torch.optim.SGD(trained, lr=LEARNING_RATE, foreach=False).step()


def decode(model: Any) -> Tensor:
    ids = batch("any", 7)["input_ids"].to(next(model.parameters()).device)
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    tokens = model.eval().generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    model.train()
    return tokens


def reference(base: Any, name: str, dense: bool) -> Any:
    """Return PEFT's own model of one process, with the adapter that a seed of 0 gives."""
    torch.manual_seed(0)
    return get_peft_model(base, config(name, dense)).train()


def load(model_class: Any, folder: str, options: dict[str, Any], **others: Any) -> Any:
    return model_class.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        distributed_config=DistributedConfig(**options),
        **others,
    ).train()
