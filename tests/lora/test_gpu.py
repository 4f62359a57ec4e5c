"""Adapters on experts on a CUDA device: which kernels run, what they hold, that bits repeat.

What they compute is in test_lora*.py, whose tests run on the GPU too.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from moe_patch import patch_report
from tests.support.adapters import (
    EXPERTS,
    adapted_pair,
    adapter_gradients,
    attention,
    expert_modules,
    recipe,
    step,
)
from tests.support.numerics import assert_bits

pytestmark = pytest.mark.gpu

T, K, E, D, F, R = 4096, 4, 32, 1024, 512, 16
SIZES = {
    "hidden_size": D, "moe_intermediate_size": F, "num_experts": E, "num_experts_per_tok": K,
    "num_hidden_layers": 1, "output_router_logits": False,
}  # fmt: skip
REPEATS = 40


def kernels(call) -> set[str]:
    """Return the names of the kernels that ``call`` launches."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return {event.key for event in profiled.key_averages()}


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_kernels_of_a_step(model_type):
    """Run our kernels and no batched product over all experts, by which PEFT forms its delta."""
    pair = adapted_pair(model_type, recipe(model_type), attention(model_type), device="cuda")
    found = kernels(lambda: step(pair.ours, pair.batch))
    assert {"_up_kernel", "_dh_kernel", "_combine_kernel", "_dw_kernel"} <= found
    assert not any("grouped" in name.lower() for name in found)
    frozen = adapted_pair(model_type, modules=attention(model_type), device="cuda")
    found = kernels(lambda: step(frozen.ours, frozen.batch))
    assert {"_up_kernel", "_dh_kernel", "_combine_kernel"} <= found
    assert "_dw_kernel" not in found, "a weight gradient of experts that nothing trains"


def experts_call(wrapper: nn.Module) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(T, D, generator=generator, device="cuda").bfloat16().requires_grad_()
    ids = torch.rand(T, E, generator=generator, device="cuda").argsort(-1)[:, :K]
    weights = torch.rand(T, K, generator=generator, device="cuda").bfloat16().requires_grad_()
    return x, ids, weights


def experts_wrapper(model: nn.Module) -> nn.Module:
    return next(m for name, m in model.named_modules() if name.endswith("mlp.experts"))


@pytest.fixture(scope="module")
def pair():
    """One layer of experts of real size with adapters on both projections, bf16."""
    return adapted_pair(
        "qwen3_moe", EXPERTS, r=R, dtype=torch.bfloat16, device="cuda", overrides=SIZES
    )


def test_kernels_of_a_step_in_bf16(pair):
    """Run the kernels that the report names and no library GEMM, such as that of PEFT's delta."""
    from moe_patch.kernels.common.versions import available

    wrapper, base = experts_wrapper(pair.ours), expert_modules(pair.ours)[0]
    x, ids, weights = experts_call(wrapper)
    prefix = "_hopper" if available(x) else ""
    products = {f"{prefix}_{name}_kernel" for name in ("up", "rows", "dh")}
    (row,) = patch_report(pair.ours)
    assert (row.lora, row.reason) == ("fused (down_proj, gate_up_proj)", "")
    factors = [p for p in wrapper.parameters() if p.requires_grad]
    assert len(factors) == 4
    for module, trained in ((wrapper, factors), (base, [])):

        def run(module=module, trained=trained):
            torch.autograd.grad(module(x, ids, weights).sum(), [x, weights, *trained])

        run()
        found = kernels(run)
        assert products <= found, sorted(found)
        assert not any(
            part in name.lower() for name in found for part in ("gemm", "cutlass", "bmm")
        )
        # Frozen experts have no weight gradient; those of the factors are thin.
        assert "_hopper_dw_kernel" not in found
        assert ("_dw_kernel" in found) == bool(trained)


def test_bytes_from_forward_to_backward(pair):
    wrapper = experts_wrapper(pair.ours)
    x, ids, weights = experts_call(wrapper)
    wrapper(x, ids, weights).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = wrapper(x, ids, weights)
    held = torch.cuda.memory_allocated() - before - out.untyped_storage().nbytes()
    N = T * K
    assert N * 4 * F <= held <= 1.05 * (4 * N * F + 4 * N * R)


def test_peak_and_time_of_a_step_are_below_pefts(pair):
    """Never allocate a merged weight, a delta or a dense weight gradient (R33)."""
    found = []
    for model in pair[:2]:
        wrapper = experts_wrapper(model)
        x, ids, weights = experts_call(wrapper)
        leaves = [x, weights, *(p for p in wrapper.parameters() if p.requires_grad)]

        def run(wrapper=wrapper, leaves=leaves, ids=ids):
            torch.autograd.grad(wrapper(leaves[0], ids, leaves[1]).sum(), leaves)

        for _ in range(3):
            run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        for _ in range(5):
            run()
        end.record()
        torch.cuda.synchronize()
        found.append((torch.cuda.max_memory_allocated() - before, start.elapsed_time(end) / 5))
    (theirs, slow), (ours, fast) = found
    weights_bytes = sum(p.nbytes for p in expert_modules(pair.ours)[0].parameters())
    rows = T * K * (3 * F + 2 * D) * 2
    assert ours < theirs
    assert ours < rows + T * D * 2 * 4 + weights_bytes // 4, (ours, rows, weights_bytes)
    assert fast < slow


def test_forty_repeats_are_bit_identical(pair):
    wrapper = experts_wrapper(pair.ours)
    x, ids, weights = experts_call(wrapper)
    leaves = [x, weights, *(p for p in wrapper.parameters() if p.requires_grad)]
    first = None
    for _ in range(REPEATS):
        out = wrapper(x, ids, weights)
        again = [out, *torch.autograd.grad(out.square().mean(), leaves)]
        first = first or again
        for a, b in zip(again, first, strict=True):
            assert_bits(a, b)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_training_never_copies_expert_weights(reentrant):
    """Hold what the unpatched model holds between forward and backward, and less at the peak."""
    pair = adapted_pair(
        "qwen3_moe", EXPERTS, attention("qwen3_moe"), r=R, dtype=torch.bfloat16, device="cuda",
        overrides={**SIZES, "num_hidden_layers": 2},
    )  # fmt: skip
    layer = sum(p.nbytes for p in expert_modules(pair.ours)[0].parameters())
    ids = torch.randint(3, 90, (2, 64), device="cuda", generator=torch.Generator("cuda"))
    held, peaks = [], []
    for model in pair[:2]:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": reentrant}
        )
        step(model, {"input_ids": ids, "labels": ids})
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = model(input_ids=ids, labels=ids).loss
        held.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        adapter_gradients(model)
    assert held[1] <= held[0] + 2**20
    assert peaks[1] < layer < peaks[0], (peaks, layer)
