"""Memory on a CUDA device: frozen experts allocate no gradients of their weights."""

from __future__ import annotations

import pytest
import torch

from moe_patch import patch_model
from moe_patch.ops.experts.op import experts_mlp
from moe_patch.types import ExpertWeights, Glu
from tests.stack.test_stacks_gpu import DEVICE, assert_ours
from tests.support import tiny_models

pytestmark = pytest.mark.gpu

WIDE = {"moe_intermediate_size": 512, "num_experts": 32, "num_hidden_layers": 1}


def peak_of_a_step(block, x):
    """Return the peak bytes of a forward and backward, above those allocated before."""
    block.zero_grad(set_to_none=True)
    x.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    block(x).square().sum().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_frozen_experts_save_their_gradients(dtype):
    """Save the gradients of experts while frozen after patching, not once thawed.

    With 14 tokens, weights are nearly all of the memory.
    """
    model = patch_model(tiny_models.build("qwen3_moe", dtype=dtype, **WIDE).to(DEVICE))
    assert_ours(model)
    block = tiny_models.blocks(model)[0][1]
    x = tiny_models.hidden(block, 2, 7)
    gradients = sum(p.nbytes for p in block.experts.parameters())
    peaks = {}
    for trained in (True, False, True, False):  # the first of each also compiles
        block.experts.requires_grad_(trained)
        peaks[trained] = peak_of_a_step(block, x)
        assert all((p.grad is not None) == trained for p in block.experts.parameters())
    # The two peaks may lie at different points of the step: activations are 2 % of the gradients.
    assert peaks[True] - peaks[False] >= 0.95 * gradients


def test_the_gradient_of_h_takes_its_place_where_backward_comes_once():
    """Lower the peak of a step, which is in backward, by the size of dh if no graph is kept."""
    T, D, F, E, K = 8192, 256, 512, 8, 2
    make = lambda *size: torch.randn(size, device=DEVICE, dtype=torch.bfloat16)  # noqa: E731
    w = ExpertWeights(make(E, 2 * F, D) / 16, make(E, D, F) / 23)
    x, weights = make(T, D).requires_grad_(), torch.rand(T, K, device=DEVICE).requires_grad_()
    ids = torch.rand(T, E, device=DEVICE).argsort(1)[:, :K]
    peaks, gradients = {}, {}
    for kept in (True, False, True, False):
        loss = experts_mlp(x, ids, weights, w, Glu("silu"), backend="triton").float().sum()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients[kept] = torch.autograd.grad(loss, (x, weights), retain_graph=kept)
        peaks[kept] = torch.cuda.max_memory_allocated() - before
        del loss
    for one, other in zip(*gradients.values(), strict=True):
        assert torch.equal(one, other)
    assert peaks[True] - peaks[False] >= 0.99 * T * K * 2 * F * x.element_size()
