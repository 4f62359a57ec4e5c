"""Models with packed experts for tests with several processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import accelerate
import torch
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.fsdp import fully_shard

from moe_patch import patch_model, quantize_experts
from moe_patch.formats import mxfp4
from moe_patch.formats.packed import PackedWeight
from moe_patch.formats.tensor import QuantTensor, parameter
from moe_patch.quant import saving, state
from moe_patch.quant.surgery import expert_projections
from tests.support.adapters import adapt, attention, lora_config
from tests.support.dist_helpers import device
from tests.support.fsdp_on_cpu import fsdp_on_cpu
from tests.support.quant_models import EXPERTS, build

STORAGES = ("nf4", "fp8", "mxfp4")
# Experts that two ranks share evenly, and not.
COUNTS = (8, 5)
LENGTH = 7


def base(storage: str, experts: int = 8, seed: int = 0, **overrides: Any) -> Any:
    """Return a model of two layers; gpt-oss in mxfp4, Qwen3-MoE otherwise."""
    overrides |= {"output_router_logits": False, "seed": seed}
    if storage != "mxfp4":
        return quantize_experts(build(num_experts=experts, **overrides), storage)
    model = build("gpt_oss", num_local_experts=experts, **overrides)
    for one in list(expert_projections(model)):
        packed, scales = mxfp4.quantize(one.stored.detach().mT.contiguous())
        weight = PackedWeight("mxfp4", packed, (scales,), one.stored.dtype, one.transposed)
        one.module.register_parameter(one.name, parameter(QuantTensor(weight)))
        state.watch(one.module)
    saving.guard_saving(model)
    return model


def adapted(
    storage: str, experts: int = 8, rank: int = 0, seed: int = 0, world: int = 2, **lora: Any
) -> Any:
    """Return a patched model with adapters and checkpointing on the rank's device, in training."""
    model: Any = base(storage, experts, seed)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    targets = attention("gpt_oss" if storage == "mxfp4" else "qwen3_moe")
    model = adapt(model, lora_config(EXPERTS, targets, **lora)).to(device(world, rank))
    model.enable_input_require_grads()
    return patch_model(model, fuse_lora="require").train()


def shard(model: Any, **options: Any) -> Any:
    """Shard layer by layer, with options of ``fully_shard``."""
    for layer in layers(model):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]


def batch_of(rank: int, where: int | None = None, world: int = 2) -> dict[str, torch.Tensor]:
    """Return the tokens of a rank, on the device of a rank."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, 90, (2, LENGTH), generator=generator)
    ids = ids.to(device(world, rank if where is None else where))
    return {"input_ids": ids, "labels": ids.clone()}


def whole_batch(world: int = 2) -> dict[str, torch.Tensor]:
    every = [batch_of(rank, 0, world) for rank in range(world)]
    return {key: torch.cat([batch[key] for batch in every]) for key in every[0]}


LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


@contextmanager
def launched_with_fsdp2() -> Iterator[None]:
    """Set what ``accelerate launch`` sets for FSDP2 with loading on rank 0."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with mock.patch.dict(os.environ, LAUNCHED), fsdp_on_cpu():
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


def accelerator() -> Any:
    """Return an Accelerator of the launched kind, on this test's devices."""
    return accelerate.Accelerator(cpu=device(2).type == "cpu")
