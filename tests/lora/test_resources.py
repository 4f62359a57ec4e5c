"""Training loops around adapters on experts, and the memory that a step holds.

Accumulation, multi-tensor optimisers on 3-D weights, a gradient scaler; the tensors that autograd
keeps, with and without checkpointing. The reference is PEFT on the unpatched model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from moe_patch import patch_model
from tests.support import tiny_models
from tests.support.adapters import (
    EXPERTS,
    ORDERS,
    adapted_pair,
    adapter_gradients,
    attention,
    expert_modules,
    limit_on,
    recipe,
)
from tests.support.numerics import assert_close

F16 = torch.float16


@pytest.mark.parametrize("patched_first", [False, True])
def test_gradient_accumulation(patched_first, device):
    """Accumulate three micro-batches of different lengths before comparing gradients."""
    pair = adapted_pair(
        "qwen2_moe", recipe("qwen2_moe"),
        order=ORDERS[2] if patched_first else ORDERS[0], device=device,
    )  # fmt: skip
    ids = pair.batch["input_ids"]
    for model in pair[:2]:
        model.zero_grad(set_to_none=True)
        for part in (ids, ids[:, :5], ids[:1, :3]):
            (model(input_ids=part, labels=part).loss / 3).backward()
    wanted, got = adapter_gradients(pair.reference), adapter_gradients(pair.ours)
    for name, gradient in wanted.items():
        assert_close(got[name], gradient, limit_on(pair.batch), name)


def trained(
    model: nn.Module, batch: dict[str, Tensor], steps: int, optimizer: torch.optim.Optimizer
) -> Tensor:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("kind", ["foreach", "fused"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_adamw_on_the_experts_themselves(model_type, kind, device):
    """Train 3-D weights, transposed or not; gradients have the layouts multi-tensor code needs."""
    theirs = tiny_models.build(model_type).to(device)
    ours = patch_model(copy.deepcopy(theirs))
    batch = {key: value.to(device) for key, value in tiny_models.inputs(theirs).items()}
    curves = [
        trained(m, batch, 5, torch.optim.AdamW(m.parameters(), lr=1e-3, **{kind: True}))
        for m in (theirs, ours)
    ]
    assert curves[0][-1] < curves[0][0]
    assert_close(curves[1], curves[0], 1e-4)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert_close(a, b, 1e-3, name)
        if a.dim() == 3:
            assert a.grad.stride() == a.stride(), name


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_adamw_on_adapters(kind, device):
    pair = adapted_pair("qwen3_moe", EXPERTS, init_lora_weights=True, device=device)
    curves = []
    for model in pair[:2]:
        factors = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(factors, lr=1e-2, **{kind: True})
        curves.append(trained(model, pair.batch, 10, optimizer))
    assert curves[0][-1] < 0.99 * curves[0][0]
    assert_close(curves[1], curves[0], 1e-3)


@pytest.mark.parametrize("scale", [2.0**10, 2.0**60], ids=["fits", "overflows"])
def test_fp16_with_a_gradient_scaler(scale, device):
    """An overflow under fp16 autocast makes the scaler skip the step and lower the scale."""
    pair = adapted_pair("qwen3_moe", EXPERTS, init_lora_weights=True, device=device)
    curves, scales = [], []
    for model in pair[:2]:
        factors = [p for p in model.parameters() if p.requires_grad]
        before = [p.detach().clone() for p in factors]
        optimizer = torch.optim.AdamW(factors, lr=1e-2)
        scaler = torch.amp.GradScaler(device, init_scale=scale)
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            with torch.autocast(device, F16):
                loss = model(**pair.batch).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
        curves.append(torch.stack(losses).float())
        scales.append(scaler.get_scale())
        moved = any(not torch.equal(a, b) for a, b in zip(before, factors, strict=True))
        assert moved == (scale < 2.0**20)
    assert scales[0] == scales[1]
    assert (scales[1] < scale) == (scale > 2.0**20)
    assert_close(curves[1], curves[0], 1e-2)


def held_bytes(call: Callable[[], object], *inputs: Tensor) -> list[int]:
    """Return the bytes that autograd holds after ``call``, without the storages of ``inputs``."""
    known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    assert result is not None, "the graph has to live until it is counted"
    return list(held.values())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_checkpointed_layers_hold_what_unpatched_ones_hold(model_type, reentrant, device):
    pair = adapted_pair(
        model_type, EXPERTS, attention(model_type), device=device,
        overrides={"output_router_logits": False},
    )  # fmt: skip
    weight = expert_modules(pair.ours)[0].down_proj
    parameters = [*pair.reference.parameters(), *pair.reference.buffers()]
    without = sum(held_bytes(partial(pair.reference, **pair.batch), *parameters))
    held = []
    for model in pair[:2]:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": reentrant}
        )
        sizes = held_bytes(partial(model, **pair.batch), *model.parameters(), *model.buffers())
        assert max(sizes) < weight.nbytes
        held.append(sum(sizes))
    assert held[1] <= held[0] < without / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_kept_from_forward_to_backward(model_type, dtype, device):
    """Keep only h and rank-sized rows: no gathered input, activation, merged weight or cast."""
    T, K, R = 500, 2, 4
    pair = adapted_pair(model_type, EXPERTS, r=R, dtype=dtype, device=device)
    wrapper = next(m for n, m in pair.ours.named_modules() if n.endswith("mlp.experts"))
    experts = expert_modules(pair.ours)[0]
    F = experts.down_proj.shape[1 if experts.is_transposed else 2]
    x = torch.randn(T, 32, device=device, dtype=dtype, requires_grad=True)
    ids = torch.rand(T, 8, device=device).argsort(-1)[:, :K]
    weights = torch.rand(T, K, device=device, dtype=dtype)
    held = held_bytes(lambda: wrapper(x, ids, weights), x, ids, weights, *wrapper.parameters())
    rows = T * K * (2 * F + 2 * R) * x.element_size()
    assert rows <= sum(held) <= rows + 16 * T * K
