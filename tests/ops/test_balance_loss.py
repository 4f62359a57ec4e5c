"""Auxiliary router losses against transformers' own function, and Triton's sums against torch's.

transformers gives a tie for the k-th place to whichever expert torch.topk returns. Comparisons with
transformers therefore use rows without equal probabilities.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from moe_patch.errors import UnsupportedOptionError
from moe_patch.ops.balance_loss import (
    load_balancing_loss,
    router_losses,
    router_z_loss,
    sums_backward_torch,
    sums_torch,
)
from tests.support import interpreted
from tests.support.numerics import assert_bits, assert_close
from tests.support.routing_cases import WRONG_LOGITS
from tests.support.window import sums_in_fp32

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# T, E, K; a line's comment says why.
SIZES = [
    (0, 8, 2),
    (1, 8, 2),
    (37, 12, 3),  # E not a power of two
    (5, 60, 60),  # all chosen
    (3000, 2, 1),  # more rows than one program takes at once
    (6, 257, 32),
]


def untied_logits(T: int, E: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Return evenly spaced values per row, shuffled, whose steps survive rounding to bf16."""
    ladder_E = torch.arange(E, device=device) * (8.0 / E) - 4.0
    rank_TE = torch.rand(T, E, device=device).argsort(-1)
    return ladder_E[rank_TE].to(dtype)


def mask_of(batch: int, sequence: int) -> Tensor:
    mask = torch.ones(batch, sequence, dtype=torch.long)
    mask[0, sequence // 2 :] = 0
    mask[-1, :2] = 0
    return mask


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("dtype", "limit"),
    [
        pytest.param(torch.float64, 1e-6, marks=sums_in_fp32),
        (F32, 2e-6),
        pytest.param(BF16, 2e-2, marks=sums_in_fp32),
    ],
    ids=str,
)
@pytest.mark.parametrize(("E", "K"), [(8, 2), (12, 3), (32, 8)])
def test_is_transformers_loss(
    E: int, K: int, dtype: torch.dtype, limit: float, masked: bool
) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    batch, sequence = 3, 7
    mask = mask_of(batch, sequence) if masked else None
    ours = tuple(untied_logits(batch * sequence, E, dtype).requires_grad_() for _ in range(3))
    theirs = tuple(t.detach().clone().requires_grad_() for t in ours)
    loss = load_balancing_loss(ours, E, K, mask)
    expected = load_balancing_loss_func(theirs, E, K, mask)
    assert loss.dtype == expected.dtype == F32
    assert abs(loss.item() / expected.item() - 1) < 1e-6
    loss.backward()
    expected.backward()
    for mine, ref in zip(ours, theirs, strict=True):
        assert_close(mine.grad, ref.grad, limit)
        if masked:
            assert (mine.grad[mask.reshape(-1) == 0] == 0).all()


@pytest.mark.parametrize("masked", [False, True])
def test_z_loss(masked: bool) -> None:
    mask = mask_of(3, 7) if masked else None
    layers = [torch.randn(21, 12, requires_grad=True) for _ in range(2)]
    wide = [t.detach().double().requires_grad_() for t in layers]
    weight_T = torch.ones(21) if mask is None else mask.reshape(-1)
    expected = sum((torch.logsumexp(t, -1).square() * weight_T).sum() for t in wide) / (
        2 * weight_T.sum()
    )
    loss = router_z_loss(layers, mask)
    assert_close(loss, expected, 1e-6)
    loss.backward()
    expected.backward()
    for mine, ref in zip(layers, wide, strict=True):
        assert_close(mine.grad, ref.grad, 1e-6)


def test_one_pass_gives_both() -> None:
    layers = [torch.randn(21, 12, requires_grad=True) for _ in range(2)]
    balance, z = router_losses(layers, 3)
    assert torch.equal(balance, load_balancing_loss(layers, 12, 3))
    assert torch.equal(z, router_z_loss(layers))
    both = torch.autograd.grad(balance + 0.5 * z, layers)
    one = torch.autograd.grad(load_balancing_loss(layers, 12, 3), layers)
    two = torch.autograd.grad(router_z_loss(layers), layers)
    for sum_grad, a, b in zip(both, one, two, strict=True):
        assert_close(sum_grad, a + 0.5 * b, 1e-6)


def test_nothing_larger_than_the_logits_is_allocated() -> None:
    """Allocate no one-hot [T, K, E]: the largest tensor of a step has T * E elements."""

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for leaf in torch.utils._pytree.tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.size = max(self.size, leaf.numel())
            return result

    layers = tuple(torch.randn(64, 16, requires_grad=True) for _ in range(3))
    with Largest() as largest:
        load_balancing_loss(layers, 16, 4).backward()
    assert largest.size == 64 * 16


def test_no_logits_give_zero_as_in_transformers() -> None:
    assert load_balancing_loss(None, 8, 2) == 0
    assert router_z_loss(()) == 0


@pytest.mark.parametrize(("E", "K", "word"), [(9, 2, "9"), (8, 9, "top_k=9"), (8, 0, "top_k=0")])
def test_what_cannot_hold_is_refused(E: int, K: int, word: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=word):
        load_balancing_loss((torch.randn(4, 8),), E, K)


@pytest.mark.parametrize("wrong", WRONG_LOGITS, ids=str)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_logits_that_are_no_matrix_of_numbers_are_refused(which: int, wrong: str) -> None:
    losses = (load_balancing_loss, router_z_loss, partial(router_losses, top_k=2))
    said = rf"gate_logits of layer 1 is {wrong}; accepted: a tensor \[tokens, experts\] of"
    with pytest.raises(UnsupportedOptionError, match=said):
        losses[which]([torch.zeros(2, 4), WRONG_LOGITS[wrong]])


def test_layers_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="layer 1 have 5 columns, .* 0 have 4"):
        router_z_loss([torch.zeros(2, 4), torch.zeros(2, 5)])
    with pytest.raises(UnsupportedOptionError, match="no router logits; accepted"):
        router_losses([], 2)
    with pytest.raises(UnsupportedOptionError, match="top_k=5; accepted: 1 to 4"):
        router_losses([torch.zeros(2, 4)], 5)


def check_sums(T: int, E: int, K: int, dtype: torch.dtype, device: str) -> None:
    from moe_patch.kernels.routing.losses import router_sums, router_sums_backward

    for integers in (True, False):
        logits_TE = untied_logits(T, E, dtype, device)
        if integers:
            logits_TE = torch.randint(-4, 5, (T, E), device=device).to(dtype)
        strided_TE = logits_TE.T.contiguous().T
        for mask_T in (None, torch.rand(T, device=device).round(decimals=1)):
            expected = sums_torch(logits_TE, mask_T, K)
            ours = router_sums(strided_TE, mask_T, K)
            if mask_T is None:
                assert_bits(ours.tokens_E, expected[0])
            for name, mine, ref in zip(ours._fields, ours, expected, strict=True):
                assert_close(
                    mine, ref, 2e-3 if dtype == BF16 else 1e-4 if dtype == F16 else 2e-6, name
                )
            g_E, dz = torch.randn(E, device=device), torch.tensor(0.3, device=device)
            wide_TE = logits_TE.double()
            reference = sums_backward_torch(g_E, dz, wide_TE, mask_T)
            limit = {F32: 3e-6, F16: 1e-3, BF16: 4e-3}[dtype]
            assert_close(router_sums_backward(g_E, dz, strided_TE, mask_T), reference, limit)


CASES = {
    f"T{T}_E{E}_K{K}-{str(d)[6:]}": partial(check_sums, T, E, K, d)
    for T, E, K in SIZES
    for d in (F32, F16)
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
    return interpreted.run(__file__)


@pytest.mark.parametrize("case", CASES)
def test_interpreted(outcomes: dict[str, str], case: str) -> None:
    assert not outcomes[case], outcomes[case]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_gpu(case: str, poisoned_memory: None) -> None:
    CASES[case]("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize(("E", "K"), [(64, 8), (128, 8), (512, 10)])
def test_gpu_losses(E: int, K: int, dtype: torch.dtype, poisoned_memory: None) -> None:
    check_sums(8191, E, K, dtype, "cuda")
    layers = [torch.randn(8192, E, device="cuda").to(dtype).requires_grad_() for _ in range(2)]
    first = None
    for _ in range(40):
        balance, z = router_losses(layers, K)
        found = (balance, z, *torch.autograd.grad(balance + z, layers))
        first = first or found
        for a, b in zip(first, found, strict=True):
            assert_bits(a, b)
    on_cpu = load_balancing_loss([t.detach().cpu() for t in layers], E, K)
    assert abs(first[0].item() / on_cpu.item() - 1) < 1e-3


@pytest.mark.gpu
def test_gpu_losses_hold_and_allocate_one_gradient_per_layer() -> None:
    """Use little memory; transformers' own function would hold [L * T, K, E] int64, 1.6 GB here."""
    L, T, E, K = 6, 32768, 128, 8
    layers = [torch.randn(T, E, device="cuda", dtype=BF16).requires_grad_() for _ in range(L)]
    for mask in (None, torch.ones(2, T // 2, device="cuda")):
        torch.autograd.grad(
            sum(router_losses(layers[:1], K, None if mask is None else mask)), layers[:1]
        )
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = sum(router_losses(layers, K, mask))
        held = torch.cuda.memory_allocated() - before
        torch.autograd.grad(loss, layers)
        peak = torch.cuda.max_memory_allocated() - before
        # The partial sums of 2048 programs, 2E + 1 fp32 each, and for the mask T fp32.
        assert held <= 2**20, held
        assert peak <= L * T * E * 2 + 2048 * (2 * E + 1) * 4 + 2**20, peak


if __name__ == "__main__":
    interpreted.report(CASES)


@pytest.mark.parametrize("shape", [(2, 1, 6, 6), (2, 9), (2, 5), (0,)])
@pytest.mark.parametrize("loss", [load_balancing_loss, router_z_loss])
def test_a_mask_of_other_tokens_is_refused(loss, shape):
    """Refuse the mask: the kernel reads one number per row, also past the end of a mask."""
    layers = [torch.randn(12, 8), torch.randn(12, 8)]
    with pytest.raises(UnsupportedOptionError, match=r"attention_mask is \(.* have 12; accepted"):
        loss(layers, attention_mask=torch.ones(shape))
    assert torch.isfinite(loss(layers, attention_mask=torch.ones(2, 6)))
