"""FSDP2 over packed experts on one card: the memory of each moment, offload, equal bits."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from moe_patch import patch_model, quantize_experts
from moe_patch.formats.shard import QuantShard
from moe_patch.quant.memory import experts_memory
from tests.support import packed_ranks as cases
from tests.support import tiny_models
from tests.support.adapters import adapt, lora_config
from tests.support.dist_helpers import free_port
from tests.support.numerics import assert_bits
from tests.support.quant_models import EXPERTS

pytestmark = pytest.mark.gpu
WIDE = {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 64}


@pytest.fixture
def group():
    """One process in a group of its own."""
    address = f"tcp://127.0.0.1:{free_port()}"
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=address, rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def wide(storage):
    """Return a bf16 model whose experts are most of it, with adapters and checkpointing."""
    torch.manual_seed(0)
    plain = tiny_models.build("qwen3_moe", **WIDE).to("cuda", torch.bfloat16)
    model = quantize_experts(plain, storage)
    experts = experts_memory(model).stored
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model = adapt(model, lora_config(EXPERTS, ["q_proj"], r=2))
    model.enable_input_require_grads()
    return patch_model(model, fuse_lora="require").train(), experts


@pytest.mark.parametrize("storage", ["nf4", "fp8"])
@pytest.mark.parametrize("offload", [False, True], ids=["on card", "offload"])
def test_one_card_equals_an_unsharded_model(group, storage, offload):
    """Bytes on the card between steps: none with offload, and never 16-bit experts."""
    batch = {key: value.cuda() for key, value in cases.batch_of(0, 0).items()}
    expected, _ = wide(storage)
    loss = expected(**batch).loss
    loss.backward()
    model, experts = wide(storage)
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    for layer in cases.layers(model):
        fully_shard(layer, offload_policy=policy)
    fully_shard(model, offload_policy=policy)
    parts = [p.to_local() for p in model.parameters() if isinstance(p.to_local(), QuantShard)]
    assert {part.held_weight.packed.device.type for part in parts} == {"cpu" if offload else "cuda"}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = model(**batch).loss
    found.backward()
    torch.cuda.synchronize()
    assert_bits(found.detach(), loss.detach())
    of = {n: p.grad for n, p in expected.named_parameters() if p.grad is not None}
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert_bits(p.grad.full_tensor().to("cuda"), of[name], name)
    # Gathered: one layer of two, the buffer of the next, and what is decoded at a time.
    plain = experts * (4 if storage == "nf4" else 2)
    assert torch.cuda.max_memory_allocated() - before < 2 * experts + plain
