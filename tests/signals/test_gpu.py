"""Recording on a CUDA device: exact on the Triton backend, free when off, no host sync."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_patch import (
    patch_model,
    patch_report,
    record,
    replay_file,
    shadow_results,
)
from tests.support import tiny_models
from tests.support.adapters import EXPERTS, adapt, lora_config
from tests.support.numerics import assert_bits, assert_close
from tests.support.replay_cases import check_own_routing
from tests.support.signals_cases import experts_below, last_layer, sum_loss

pytestmark = pytest.mark.gpu

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 1e-2}
# One of each way to choose and to weigh.
REPLAYED = (
    "qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "deepseek_v2", "mistral4", "gpt_oss",
    "cohere2_moe",
)  # fmt: skip
NORMS = ("act_norm", "grad_norm_output", "grad_norm_params")


def patched(
    model_type: str = "qwen3_moe",
    dtype: torch.dtype = torch.float32,
    lora: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    model = tiny_models.build(model_type, dtype=dtype)
    if lora:
        model = adapt(model, lora_config(lora))
    return patch_model(model.to("cuda"), self_check=False, **options)


def batch_of(model: Any) -> dict[str, Tensor]:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return {n: t.to("cuda") for n, t in tiny_models.inputs(inner, batch=4, seq=16).items()}


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("lora", [(), EXPERTS, EXPERTS[1:]], ids=["plain", "both", "down"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_norms_of_the_kernels_equal_fp64(model_type, lora, dtype) -> None:
    """The same experts, ids and weights in fp64, which run on the torch backend."""
    low = patched(model_type, dtype, lora)
    high = copy.deepcopy(low).double()
    assert patch_report(low)[0].experts_backend == "triton"
    assert patch_report(high)[0].experts_backend == "torch"
    x = torch.randn(37, 32, device="cuda").to(dtype)
    ids = torch.rand(37, 8, device="cuda").argsort(-1)[:, :2].contiguous()
    ids[3, 1], ids[5] = -1, 8
    weights = torch.rand(37, 2, device="cuda").to(dtype)
    direction = torch.randn(37, 32, device="cuda").to(dtype)
    layers = []
    for model, cast in ((low, Tensor.detach), (high, Tensor.double)):
        experts = last_layer(model).mlp.experts
        with record(model) as recorder:
            out = experts(cast(x).requires_grad_(), ids, cast(weights))
            out.backward(cast(direction))
        layers.append(list(recorder.layers.values())[-1])
    names = (*NORMS, "grad_norm_lora") if lora else NORMS
    for name in names:
        found, wanted = (getattr(layer, name) for layer in layers)
        assert found.dtype == torch.float32
        assert torch.equal(found > 0, (ids >= 0) & (ids < 8)), name
        assert_close(found, wanted, LIMITS[dtype], name)
    assert torch.equal(layers[0].tokens_per_expert, layers[1].tokens_per_expert)


def test_recording_changes_no_bit_and_repeats_bit_for_bit() -> None:
    model = patched(dtype=torch.bfloat16)
    batch = batch_of(model)
    results, norms = [], []
    for on in (False, True, True):
        model.zero_grad(set_to_none=True)
        if on:
            with record(model, router_input=True) as recorder:
                sum_loss(model, batch).backward()
            norms.append([getattr(x, n) for x in recorder.layers.values() for n in NORMS])
        else:
            sum_loss(model, batch).backward()
        results.append([p.grad for p in model.parameters()])
    for other in results[1:]:
        for with_signals, without in zip(other, results[0], strict=True):
            assert_bits(with_signals, without)
    for first, second in zip(*norms, strict=True):
        assert_bits(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", REPLAYED)
def test_a_replay_of_the_own_routing_changes_no_bit(model_type, dtype) -> None:
    model = patched(model_type, dtype)
    batch = batch_of(model)
    assert patch_report(model)[0].router_backend == "triton"
    check_own_routing(model, batch)


def cost(model: Any, batch: dict[str, Tensor]) -> tuple[list[str], dict[str, int]]:
    """Return the names of the kernels of one step, and its allocations."""
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        sum_loss(model, batch).backward()
        torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    found = {
        name: after[name] - before[name]
        for name in (
            "allocation.all.allocated",
            "allocated_bytes.all.allocated",
            "allocated_bytes.all.current",
            "allocated_bytes.all.peak",
        )
    }
    kernels = [e.name for e in profile.events() if e.device_type.name == "CUDA"]
    return sorted(kernels), found


def test_off_launches_no_kernel_and_allocates_no_byte() -> None:
    model = patched(dtype=torch.bfloat16)
    batch = batch_of(model)
    for _ in range(2):  # compiles kernels, creates library handles and workspaces
        cost(model, batch)
    never = cost(model, batch)
    with record(model, router_input=True):
        on = cost(model, batch)
    after = cost(model, batch)
    assert any(name.startswith("_up_kernel") for name in never[0])
    assert after == never
    assert len(on[0]) > len(never[0])
    assert on[1]["allocated_bytes.all.allocated"] > never[1]["allocated_bytes.all.allocated"]


@contextmanager
def syncs_are_errors() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_recorded_block_does_not_wait_for_the_device() -> None:
    model = patched(dtype=torch.bfloat16)
    block = last_layer(model).mlp
    x = torch.randn(2, 9, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    block(x).sum().backward()
    with record(model, router_input=True) as recorder:
        for _ in range(2):
            with syncs_are_errors():
                block(x).sum().backward()
                recorder.step()
    assert experts_below(block) is block.experts
    assert recorder.history[1].load


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lora", [(), EXPERTS], ids=["plain", "lora"])
def test_shadow_check_finds_the_kernels_within_the_limit(lora, dtype) -> None:
    model = patched(dtype=dtype, lora=lora, shadow_check=1)
    for _ in range(3):
        sum_loss(model, batch_of(model)).backward()
    results = shadow_results(model)
    assert sum(result.role == "experts" for result in results) == 3
    for result in results:
        assert not result.skipped
        assert result.within, str(result)


def test_a_nan_is_written_on_the_device_and_replayed_on_both_machines(tmp_path) -> None:
    model = patched(debug_nan=True, debug_dir=str(tmp_path))
    experts_below(last_layer(model).mlp).down_proj.data[:, 1, 1] = float("nan")
    sum_loss(model, batch_of(model))
    (file,) = tmp_path.iterdir()
    for device, backend in (("cuda", "triton"), ("cpu", "torch")):
        result = replay_file(file, device)
        assert (result.device, result.backend) == (device, backend)
        assert len(result.ours) == len(result.theirs) == result.tokens == 64
