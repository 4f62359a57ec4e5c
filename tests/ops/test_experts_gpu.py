"""The experts operator on a CUDA device, under autograd: memory, sizes, compile, CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from moe_patch.ops.experts import definition as reference
from moe_patch.ops.experts.op import experts_mlp
from moe_patch.types import ExpertWeights, Glu, Lora
from tests.support.numerics import FP32, assert_bits, assert_close, bf16_rule

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
SILU = Glu("silu")


def random(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda", dtype=dtype) * scale).requires_grad_()


class Layer:
    """Random tensors of one experts call; ``leaves`` are those that take gradients."""

    def __init__(
        self, T: int, K: int, E: int, D: int, F: int, dtype: torch.dtype = BF16, glu: Glu = SILU,
        rank: int = 0,
    ) -> None:  # fmt: skip
        H = 2 * F if glu.gated else F
        self.K, self.E, self.D, self.glu = K, E, D, glu
        self.x_TD = random(T, D, dtype=dtype)
        self.ids_TK = torch.rand(T, E, device="cuda").argsort(1)[:, :K].contiguous()
        self.weights_TK = torch.rand(T, K, device="cuda").requires_grad_()
        self.w = ExpertWeights(
            random(E, H, D, dtype=dtype, scale=D**-0.5), random(E, D, F, dtype=dtype, scale=F**-0.5)
        )
        self.lora13 = self.lora2 = None
        if rank:
            self.lora13 = Lora(
                random(E, rank, D, dtype=dtype, scale=D**-0.5), random(E, H, rank, dtype=dtype), 0.5
            )
            self.lora2 = Lora(
                random(E, rank, F, dtype=dtype, scale=F**-0.5), random(E, D, rank, dtype=dtype), 2.0
            )

    @property
    def leaves(self) -> list[Tensor]:
        factors = [*(self.lora13 or ())[:2], *(self.lora2 or ())[:2]]
        return [self.x_TD, self.weights_TK, self.w.w13_EHD, self.w.w2_EDF, *factors]

    def forward(self, **options) -> Tensor:
        return experts_mlp(
            self.x_TD, self.ids_TK, self.weights_TK, self.w, self.glu,
            lora13=self.lora13, lora2=self.lora2, backend="triton", **options,
        )  # fmt: skip

    def run(self, dout_TD: Tensor, **options) -> list[Tensor]:
        out_TD = self.forward(**options)
        return [out_TD.detach(), *torch.autograd.grad(out_TD, self.leaves, dout_TD)]


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("glu", [SILU, Glu("relu2", gated=False)], ids=["gated", "ungated"])
@pytest.mark.parametrize("rank", [0, 16])
def test_between_forward_and_backward_only_h_and_the_plan_live(glu, rank) -> None:
    T, K, E, D, F = 4096, 4, 16, 512, 384
    layer, N = Layer(T, K, E, D, F, glu=glu, rank=rank), T * K
    layer.run(torch.ones_like(layer.x_TD))  # allocations made once and kept: handles, workspaces
    h_bytes = N * (2 * F if glu.gated else F) * 2
    gc.collect()  # else cycles left by an earlier test are freed in between
    for recompute in (False, True):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out_TD = layer.forward(recompute=recompute)
        held = torch.cuda.memory_allocated() - before - T * D * 2
        allowed = 16 * N + (0 if recompute else h_bytes + 2 * N * rank * 2)
        assert held <= allowed, f"recompute={recompute}: {held} bytes, {allowed} allowed"
        assert recompute or held >= h_bytes
        del out_TD


def test_peak_of_a_forward_and_of_a_step() -> None:
    """Allocate h, a, y and output in forward; dh, w·a, dx rows and gradients in backward."""
    T, K, E, D, F = 4096, 4, 16, 512, 384
    layer, N = Layer(T, K, E, D, F), T * K
    dout_TD = torch.ones_like(layer.x_TD)
    layer.run(dout_TD)
    row_bytes = {"h": N * 2 * F * 2, "a": N * F * 2, "y": N * D * 2, "out": T * D * 2}
    weights = 2 * (layer.w.w13_EHD.numel() + layer.w.w2_EDF.numel())
    small = 64 * N + (1 << 20)
    for recompute in (False, True):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out_TD = layer.forward(recompute=recompute)
        peak = torch.cuda.max_memory_allocated() - before
        assert peak <= sum(row_bytes.values()) + small
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(out_TD, layer.leaves, dout_TD)
        peak = torch.cuda.max_memory_allocated() - before
        step = 2 * row_bytes["h"] + row_bytes["a"] + row_bytes["y"] + 2 * row_bytes["out"] + weights
        assert peak <= step + small, f"recompute={recompute}: {peak} bytes, {step + small} allowed"
        del out_TD


# --- sizes ----------------------------------------------------------------------------------------


def eager_and_exact(layer: Layer, dout_TD: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the reference under autograd, in the layer's own dtype and in fp64."""
    runs = []
    for dtype in (layer.x_TD.dtype, torch.float64):
        leaves = [t.detach().to(dtype).requires_grad_() for t in layer.leaves]
        x, weights, w13, w2 = leaves
        out = reference.experts(x, layer.ids_TK, weights, ExpertWeights(w13, w2), layer.glu)
        runs.append([out.detach(), *torch.autograd.grad(out, leaves, dout_TD.to(dtype))])
    return runs[0], runs[1]


# D, F, E, K: each size of a public list of failures once.
ODD_SIZES = [
    (1025, 704, 1, 1), (2880, 1025, 3, 3), (80, 704, 8, 8), (2880, 56, 60, 6), (1025, 24, 72, 2),
    (32, 8, 96, 10), (48, 24, 160, 1), (80, 56, 256, 8), (32, 1025, 384, 6), (2880, 8, 512, 10),
]  # fmt: skip
DTYPES = (BF16, torch.float16, torch.float32)
ODD_CASES = [
    *((*sizes, DTYPES[i % 3]) for i, sizes in enumerate(ODD_SIZES)),
    *((*sizes, torch.float32) for sizes in ODD_SIZES[:2]),
    *((*sizes, BF16) for sizes in ODD_SIZES[4:6]),
]


@pytest.mark.parametrize(("D", "F", "E", "K", "dtype"), ODD_CASES, ids=str)
def test_odd_sizes(D, F, E, K, dtype, poisoned_memory) -> None:
    layer = Layer(97, K, E, D, F, dtype)
    dout_TD = torch.randn_like(layer.x_TD)
    found, (eager, exact) = layer.run(dout_TD), eager_and_exact(layer, dout_TD)
    for name, mine, theirs, ref in zip(
        ("out", "x", "weights", "w13", "w2"), found, eager, exact, strict=True
    ):
        if dtype == torch.float32:
            assert_close(mine, ref, FP32, name)
        else:
            bf16_rule(mine, theirs.to(mine.dtype), ref, name)


STRIDED = {
    "x beside other columns": lambda t: torch.cat([t, t, t], 1)[:, 5 : 5 + t.shape[1]],
    "x one row for all": lambda t: t[:1].expand(96, -1),
    "x column by column": lambda t: t.T.contiguous().T,
    "weights of a packed tensor": lambda t: torch.cat([t, t], 2)[..., 3 : 3 + t.shape[2]],
    "weights transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
}


@pytest.mark.parametrize("name", [*STRIDED, "gradient of out.sum()"])
def test_strides(name, poisoned_memory) -> None:
    layer = Layer(96, 2, 4, 128, 64, torch.float32)
    dout_TD = torch.randn_like(layer.x_TD)
    if name.startswith("x"):
        layer.x_TD = STRIDED[name](layer.x_TD.detach()).requires_grad_()
    elif name.startswith("weights"):
        layer.w = ExpertWeights(*(STRIDED[name](w.detach()).requires_grad_() for w in layer.w[:2]))
    else:
        dout_TD = torch.ones((), device="cuda").expand_as(layer.x_TD)
    found = layer.run(dout_TD)
    assert any(not t.is_contiguous() for t in [*layer.leaves, dout_TD])
    layer.x_TD = layer.x_TD.detach().contiguous().requires_grad_()
    layer.w = ExpertWeights(*(w.detach().contiguous().requires_grad_() for w in layer.w[:2]))
    for strided, plain in zip(found, layer.run(dout_TD.contiguous()), strict=True):
        assert_close(strided, plain, 1e-6)


def test_counts_of_a_public_bug_report(poisoned_memory) -> None:
    """Give experts without rows between full ones exact zeros, and repeat bits on a second step."""
    counts = torch.tensor([162, 0, 2577, 446, 0, 83])
    layer = Layer(int(counts.sum()), 1, 6, 256, 136)
    ids = torch.repeat_interleave(torch.arange(6), counts)[torch.randperm(int(counts.sum()))]
    layer.ids_TK = ids.view(-1, 1).to("cuda")
    dout_TD = torch.randn_like(layer.x_TD)
    for size in (layer.x_TD.numel(), layer.w.w13_EHD.numel(), layer.w.w2_EDF.numel()):
        torch.full((size,), float("nan"), device="cuda", dtype=BF16)
    first, second = layer.run(dout_TD), layer.run(dout_TD)
    for one, two in zip(first, second, strict=True):
        assert torch.isfinite(one).all()
        assert_bits(two, one)
    for grad in first[3:]:
        assert not grad[[1, 4]].any()
        assert grad[[0, 2, 3, 5]].flatten(1).any(1).all()


@pytest.mark.parametrize(("D", "F"), [(64, 1024), (2048, 64)])
def test_rows_past_two_billion_elements(D, F) -> None:
    """Give the last tokens the result they get alone if N·2F (or N·D, second case) exceeds 2^31."""
    T, K, E, last = 131_329, 8, 8, 256
    layer = Layer(T, K, E, D, F)
    assert T * K * max(2 * F, D) > 2**31
    dout_TD = torch.randn_like(layer.x_TD)
    found = layer.run(dout_TD, batch_invariant=True)
    assert all(torch.isfinite(t).all() for t in found)
    tail = Layer(1, K, E, D, F)
    tail.w, tail.ids_TK = layer.w, layer.ids_TK[-last:]
    tail.x_TD = layer.x_TD.detach()[-last:].requires_grad_()
    tail.weights_TK = layer.weights_TK.detach()[-last:].requires_grad_()
    alone = tail.run(dout_TD[-last:], batch_invariant=True)
    for name, whole, part in zip(("out", "x", "weights"), found, alone[:3], strict=False):
        assert_bits(whole[-last:], part, name)
    sums = [torch.zeros_like(w, dtype=torch.float32) for w in layer.w[:2]]
    for start in range(0, T, 16_384):
        rows = slice(start, start + 16_384)
        tail.ids_TK, tail.x_TD = layer.ids_TK[rows], layer.x_TD.detach()[rows].requires_grad_()
        tail.weights_TK = layer.weights_TK.detach()[rows].requires_grad_()
        for total, grad in zip(sums, tail.run(dout_TD[rows])[3:], strict=True):
            total += grad
    for whole, total in zip(found[3:], sums, strict=True):
        assert_close(whole, total, 2e-2)


def test_an_expert_past_two_billion_elements() -> None:
    """Give the last expert the same result as alone if E·2F·D exceeds 2^31."""
    E, D, F, T = 65, 4096, 4096, 96
    layer = Layer(1, 1, E, D, F)
    assert layer.w.w13_EHD.numel() > 2**31
    layer.x_TD, layer.weights_TK = random(T, D), torch.rand(T, 1, device="cuda").requires_grad_()
    layer.ids_TK = torch.full((T, 1), E - 1, device="cuda")
    dout_TD = torch.randn_like(layer.x_TD)
    found = layer.run(dout_TD, batch_invariant=True)
    layer.w = ExpertWeights(*(w.detach()[E - 1 :].requires_grad_() for w in layer.w[:2]))
    layer.ids_TK = torch.zeros_like(layer.ids_TK)
    alone = layer.run(dout_TD, batch_invariant=True)
    for name, whole, part in zip(("out", "x", "weights"), found, alone, strict=False):
        assert_bits(whole, part, name)
    for whole, part in zip(found[3:], alone[3:], strict=True):
        assert_bits(whole[E - 1 :], part)
        assert not whole[: E - 1].any()


# --- determinism, compilation, graphs -------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 16])
def test_forty_repeats_under_deterministic_algorithms(rank, poisoned_memory) -> None:
    assert torch.are_deterministic_algorithms_enabled()
    layer = Layer(1500, 8, 32, 512, 256, rank=rank)
    dout_TD = torch.randn_like(layer.x_TD)
    first = layer.run(dout_TD)
    for _ in range(40):
        for again, once in zip(layer.run(dout_TD), first, strict=True):
            assert_bits(again, once)


def call(layer: Layer) -> Callable[..., Tensor]:
    def function(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return experts_mlp(
            x_TD * 1.0, ids_TK, weights_TK, layer.w, layer.glu,
            lora13=layer.lora13, lora2=layer.lora2, backend="triton",
        ) * 2.0  # fmt: skip

    return function


@pytest.mark.parametrize("rank", [0, 16])
def test_inductor_compiles_forward_and_backward_whole(rank) -> None:
    layer = Layer(300, 4, 8, 256, 128, rank=rank)
    dout_TD = torch.randn_like(layer.x_TD)
    results = []
    for function in (call(layer), torch.compile(call(layer), fullgraph=True)):
        out_TD = function(layer.x_TD, layer.ids_TK, layer.weights_TK)
        results.append([out_TD, *torch.autograd.grad(out_TD, layer.leaves, dout_TD)])
    for eager, compiled in zip(*results, strict=True):
        assert_bits(compiled, eager)


def test_five_sizes_compile_at_most_twice() -> None:
    layer = Layer(64, 4, 8, 256, 128)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call(layer), fullgraph=True, dynamic=True, backend=counter)
    for T in (64, 7, 130, 33, 500):
        part = Layer(T, 4, 8, 256, 128)
        out_TD = compiled(part.x_TD, part.ids_TK, part.weights_TK)
        torch.autograd.grad(out_TD, [part.x_TD, layer.w.w13_EHD], torch.ones_like(out_TD))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("T", [1, 8, 700])
def test_cuda_graph_of_forward_and_backward(T) -> None:
    layer = Layer(T, 4, 16, 256, 128, rank=8)
    dout_TD = torch.randn_like(layer.x_TD)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer.run(dout_TD)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = layer.run(dout_TD)
    for seed in range(3):
        torch.manual_seed(seed)
        fresh = Layer(T, 4, 16, 256, 128)
        with torch.no_grad():
            layer.x_TD.copy_(fresh.x_TD)
            layer.ids_TK.copy_(fresh.ids_TK)
            layer.weights_TK.copy_(fresh.weights_TK)
        graph.replay()
        torch.cuda.synchronize()
        for replayed, eager in zip(captured, layer.run(dout_TD), strict=True):
            assert_bits(replayed, eager)
