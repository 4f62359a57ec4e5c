"""Patched models on a CUDA device: the Triton backend where the report says so, against eager.

Eager runs in fp32 with TF32 off; bf16 is held to 1.5 times eager's own distance to fp64.
"""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from moe_patch import lora_targets, patch_model, patch_report, unpatch_model
from moe_patch.config import PatchConfig
from moe_patch.families import lookup
from moe_patch.runtime.experts import run_experts
from tests.support import tiny_models
from tests.support.numerics import FP32, assert_bits, bf16_rule
from tests.support.parity import assert_parity, run_block, run_model
from tests.support.tiny_models import blocks, inputs

pytestmark = pytest.mark.gpu

REPEATS = 40
FIRST_EIGHT = (
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "mixtral",
    "deepseek_v3",
    "glm4_moe",
    "minimax_m2",
    "gpt_oss",
)


def build(model_type: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return tiny_models.build(model_type, dtype=dtype).to("cuda").train()


def batch_for(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.to("cuda") for name, tensor in inputs(model).items()}


def eager(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    if hasattr(twin, "set_experts_implementation"):
        twin.set_experts_implementation("eager")
    return twin


@pytest.mark.parametrize("model_type", tiny_models.patchable())
def test_fp32_training_step_equals_eager(model_type):
    model = build(model_type)
    reference = eager(model)
    batch = batch_for(model)
    patch_model(model)
    assert_parity(run_model(model, batch), run_model(reference, batch), 2 * FP32)


@pytest.mark.parametrize("model_type", FIRST_EIGHT)
def test_triton_runs_router_and_experts(model_type):
    from moe_patch.kernels.routing.route_kernels import backward_kernel, forward_kernel

    model = patch_model(build(model_type))
    for row in patch_report(model):
        assert (row.tier, row.router_backend, row.experts_backend) == ("full", "triton", "triton")
        assert row.self_check == "passed"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run_model(model, batch_for(model))
    kernels = {event.key for event in profile.key_averages()}
    ours = {name for name in kernels if name.startswith("_")}
    assert {"_up_kernel", "_dh_kernel", "_combine_kernel"} <= ours, sorted(kernels)
    assert {k.fn.__name__ for k in (forward_kernel, backward_kernel)} <= kernels, sorted(kernels)
    assert not any("grouped" in name.lower() for name in kernels - ours), sorted(kernels)


@pytest.mark.parametrize("model_type", FIRST_EIGHT)
def test_bf16_experts_on_equal_ids(model_type):
    model = build(model_type, torch.bfloat16)
    experts = blocks(model)[0][1].experts
    spec, _ = lookup(experts)
    twin = copy.deepcopy(experts).double()
    E = next(p.shape[0] for p in experts.parameters() if p.dim() == 3)
    D = tiny_models.SIZES["hidden_size"]
    x = torch.randn(333, D, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(333, E, device="cuda").argsort(-1)[:, :2]
    weights = torch.rand(333, 2, device="cuda", dtype=torch.bfloat16)
    original = type(experts).forward.__wrapped__

    def run(module: nn.Module, call) -> list[Tensor]:
        dtype = next(module.parameters()).dtype
        xs = x.to(dtype).requires_grad_()
        ws = weights.to(dtype).requires_grad_()
        out = call(module, xs, ids, ws)
        leaves = [xs, ws, *module.parameters()]
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    mine = run(experts, lambda m, *a: run_experts(m, spec, *a, PatchConfig(backend="triton")))
    for ours, theirs, exact in zip(mine, run(experts, original), run(twin, original), strict=True):
        bf16_rule(ours, theirs, exact, type(experts).__name__)


@pytest.mark.parametrize("model_type", FIRST_EIGHT)
def test_lora_equals_peft(model_type):
    model = build(model_type)
    peft_model = get_peft_model(model, LoraConfig(r=3, lora_alpha=7, **lora_targets(model)))
    for name, parameter in peft_model.named_parameters():
        if ".lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    batch = batch_for(model)
    reference = run_model(peft_model, batch)
    patch_model(peft_model)
    assert all("fused" in row.lora for row in patch_report(peft_model))
    assert_parity(run_model(peft_model, batch), reference, 2 * FP32)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeats_are_bit_identical(model_type, dtype):
    model = patch_model(build(model_type, dtype))
    block = blocks(model)[0][1]
    x = torch.randn(3, 41, tiny_models.SIZES["hidden_size"], device="cuda", dtype=dtype)
    first = run_block(block, x)
    for _ in range(REPEATS):
        for name, value in run_block(block, x).items():
            if value is not None:
                assert_bits(value, first[name], name)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_recompute_agrees_bit_for_bit(model_type):
    model = patch_model(build(model_type, torch.bfloat16))
    batch = batch_for(model)
    kept = run_model(model, batch)
    unpatch_model(model)
    patch_model(model, recompute=True)
    for name, value in run_model(model, batch).items():
        if value is not None:
            assert_bits(value, kept[name], name)


@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss"])
def test_block_compiles_whole_and_never_waits_for_the_device(model_type):
    model = patch_model(build(model_type, torch.bfloat16))
    block = blocks(model)[0][1]
    x = torch.randn(2, 50, tiny_models.SIZES["hidden_size"], device="cuda", dtype=torch.bfloat16)
    expected = run_block(block, x)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    first = lambda out: out[0] if isinstance(out, tuple) else out  # noqa: E731
    assert_bits(first(compiled(x)), expected["out.0"])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        first(block(x.requires_grad_())).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_graph_replay_routes_anew():
    model = patch_model(build("qwen3_moe", torch.bfloat16)).eval()
    block = blocks(model)[0][1]
    D = tiny_models.SIZES["hidden_size"]
    for tokens in (1, 8):
        static = torch.randn(1, tokens, D, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            for _ in range(3):
                block(static)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = block(static)
            for seed in range(4):
                torch.manual_seed(seed)
                fresh = torch.randn_like(static)
                static.copy_(fresh)
                graph.replay()
                assert_bits(out, block(fresh))
