"""Experts in host memory on a CUDA device: the bits of resident ones while copies or kernels lag.

What does not depend on a device is in test_offload.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_patch import patch_model, unpatch_model
from moe_patch.formats.weights import projection
from moe_patch.runtime import offload
from moe_patch.runtime.module_patch import patch_of
from moe_patch.runtime.transfers import CudaTransfer
from tests.support import tiny_models
from tests.support.adapters import (
    EXPERTS,
    adapt,
    adapter_gradients,
    attention,
    expert_modules,
    lora_config,
    step,
)
from tests.support.numerics import assert_bits
from tests.support.quant_models import store

pytestmark = pytest.mark.gpu

# Each projection has more than a mebibyte in every storage, so its pages are locked in place.
SIZES = {
    "hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4,
    "num_hidden_layers": 5,
}  # fmt: skip
LAG = 4_000_000  # cycles, some two milliseconds


class Late(CudaTransfer):
    """Copies begin late, so that a kernel that does not wait reads what was there before."""

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Any) -> Any:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(LAG)
        return super().copy(pairs, after)


class Slow(CudaTransfer):
    """Kernels run late, so that a copy that does not wait overwrites what they read."""

    def wait(self, event: Any) -> None:
        super().wait(event)
        torch.cuda._sleep(LAG)


def build(storage: str) -> tuple[nn.Module, dict[str, Tensor]]:
    base = tiny_models.build("qwen3_moe", dtype=torch.bfloat16, **SIZES)
    batch = {name: t.to("cuda") for name, t in tiny_models.inputs(base, 2, 64).items()}
    store(base.to("cuda"), storage)
    return adapt(base, lora_config(EXPERTS, attention("qwen3_moe"))), batch


def weights(model: nn.Module) -> list[Tensor]:
    names = "gate_up_proj", "down_proj"
    return [projection(e, name) for e in expert_modules(model) for name in names]


def assert_same_steps(ours: nn.Module, resident: nn.Module, batch: dict[str, Tensor]) -> None:
    for _ in range(2):
        assert_bits(step(ours, batch), step(resident, batch))
        found, expected = adapter_gradients(ours), adapter_gradients(resident)
        for name, gradient in expected.items():
            assert_bits(found[name], gradient)


@pytest.mark.parametrize("storage", ["nf4", "", "fp8", "mxfp4"])
def test_bits_of_a_step_and_of_generate(storage, monkeypatch):
    """The same bits, late or slow, with and without checkpointing; undo moves the weights back."""
    resident, batch = build(storage)
    ours = copy.deepcopy(resident)
    patch_model(resident)
    for transfer in (Late, Slow):
        monkeypatch.setattr(offload, "transfer_to", transfer)
        patch_model(ours, offload_experts=True)
        locked = [patch_of(e).seat.locked for e in expert_modules(ours)]
        assert all(len(one) >= 2 for one in locked)
        assert all(w.device.type == "cpu" for w in weights(ours))
        ours.to("cuda")
        assert all(w.device.type == "cpu" for w in weights(ours))
        for checkpointing in (False, True):
            for model in (ours, resident):
                model.train()
                if checkpointing:
                    model.gradient_checkpointing_enable({"use_reentrant": False})
                    model.enable_input_require_grads()
                else:
                    model.gradient_checkpointing_disable()
            assert_same_steps(ours, resident, batch)
        prompt = batch["input_ids"][:1, :5]
        options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
        options |= {"output_logits": True, "pad_token_id": 0}
        found, expected = (m.eval().generate(input_ids=prompt, **options) for m in (ours, resident))
        assert_bits(torch.stack(found.logits), torch.stack(expected.logits))
        unpatch_model(ours)
        assert all(w.device.type == "cuda" for w in weights(ours))
    for name, value in resident.state_dict().items():
        assert_bits(ours.state_dict()[name], value)


def test_memory_and_adapters():
    """Two blocks' weights on the device, whatever the number of blocks."""
    resident, batch = build("")
    one = sum(w.nbytes for w in weights(resident)[:2])
    patch_model(resident, offload_experts=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    step(resident, batch)
    resident.zero_grad()
    torch.cuda.synchronize()
    assert 2 * one <= torch.cuda.memory_allocated() - before < 3 * one
    assert all(p.device.type == "cuda" for p in resident.parameters() if p.requires_grad)
    unpatch_model(resident)
