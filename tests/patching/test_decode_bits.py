"""With ``batch_invariant``, decoding gives a token the bits of the training forward.

Training keeps a graph and tensors for backward; decoding runs without a graph, on few rows. The
interpreter checks the kernels on a CPU (``check_decoding`` in tests/support/kernels_checks.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

from moe_patch import patch_model, patch_report
from moe_patch.ops.experts.op import experts_mlp
from moe_patch.ops.routing_op import route_impl
from moe_patch.types import ExpertWeights, Glu, Lora, RouteSpec
from tests.support import tiny_models
from tests.support.numerics import assert_bits

T, K, E, D, F, R = 1024, 8, 64, 512, 256, 16
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


class Layer:
    """Experts with random weights, or frozen ones with trained factors."""

    def __init__(self, dtype: torch.dtype, lora: bool) -> None:
        def random(*shape: int, std: float = 1.0, trained: bool = False) -> Tensor:
            drawn = torch.randn(shape, device="cuda") * std
            return drawn.to(dtype).requires_grad_(trained)

        self.w = ExpertWeights(
            random(E, 2 * F, D, std=D**-0.5, trained=not lora),
            random(E, D, F, std=F**-0.5, trained=not lora), None, None,
        )  # fmt: skip
        self.factors: dict[str, Lora] = {}
        for name, out, into in (("lora13", 2 * F, D), ("lora2", D, F)) if lora else ():
            A = random(E, R, into, std=into**-0.5, trained=True)
            B = random(E, out, R, std=R**-0.5, trained=True)
            self.factors[name] = Lora(A, B, 0.5)
        self.x_TD, self.logits_TE = random(T, D), random(T, E)
        self.spec = RouteSpec(K, renormalize=True)

    def run(self, rows: slice, **options: bool) -> Tensor:
        x_TD, logits_TE = self.x_TD[rows], self.logits_TE[rows]
        if torch.is_grad_enabled():
            x_TD, logits_TE = x_TD.requires_grad_(), logits_TE.requires_grad_()
        routing = route_impl("triton", batch_invariant=True)(logits_TE, self.spec)
        return experts_mlp(
            x_TD, routing.ids_TK, routing.weights_TK, self.w, Glu("silu"), **self.factors,
            backend="triton", batch_invariant=True, **options,
        )  # fmt: skip


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_rows_alone_and_together(lora: bool, dtype: torch.dtype, poisoned_memory: None) -> None:
    """T = 1, 3, 64 and 1024 without a graph, against 1024 rows with one."""
    layer = Layer(dtype, lora)
    trained = layer.run(slice(None))
    assert trained.requires_grad
    assert_bits(layer.run(slice(None), recompute=True), trained, "recompute")
    for count in (1, 3, 64, T):
        with torch.inference_mode():
            starts = range(0, T, count)
            parts = [layer.run(slice(start, start + count)) for start in starts]
        assert_bits(torch.cat(parts), trained.detach(), f"{count} rows at a time")


def _sum_in_order(terms: Iterator[Tensor], dtype: torch.dtype) -> Tensor:
    total = next(terms).clone()
    for term in terms:
        total += term
    return total.to(dtype)


def mm(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """A product that adds over K in order, in fp32, one term per launch."""
    a, b = a_MK.float(), b_KN.float()
    return _sum_in_order((a[:, k, None] * b[k] for k in range(a.shape[1])), a_MK.dtype)


def mm_out(a_MK: Tensor, b_KN: Tensor, *, out: Tensor) -> Tensor:
    return out.copy_(mm(a_MK, b_KN))


def addmm(c: Tensor, a_MK: Tensor, b_KN: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    assert beta == alpha == 1
    return c + mm(a_MK, b_KN)


def bmm(a_BMK: Tensor, b_BKN: Tensor) -> Tensor:
    a, b = a_BMK.float(), b_BKN.float()
    terms = (a[:, :, k, None] * b[:, k, None] for k in range(a.shape[2]))
    return _sum_in_order(terms, a_BMK.dtype)


def grouped_mm(
    a_NK: Tensor, b_EKO: Tensor, offs: Tensor, bias: None = None, out_dtype: None = None
) -> Tensor:
    """The product of the torch backend's experts, on a CPU."""
    ends = offs.tolist()
    parts = a_NK.split([end - start for start, end in zip([0, *ends], ends, strict=False)])
    return torch.cat([mm(part, b) for part, b in zip(parts, b_EKO, strict=True)])


def mean(x: Tensor, dim: list[int], keepdim: bool = False, *, dtype: None = None) -> Tensor:
    assert dim == [-1]
    assert keepdim
    return _sum_in_order(iter(x.unsqueeze(-2).unbind(-1)), x.dtype) / x.shape[-1]


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Terms that a mask makes zero change no bit, so the length of the cache does not matter."""
    assert dim in (-1, x.dim() - 1)
    e = (x.float() - x.float().amax(-1, keepdim=True)).exp()
    return (e / _sum_in_order(iter(e.unsqueeze(-2).unbind(-1)), e.dtype)).to(x.dtype)


IN_ORDER: dict[str, Callable[..., Tensor]] = {
    "mm": mm, "mm.out": mm_out, "addmm": addmm, "bmm": bmm, "_grouped_mm": grouped_mm,
    "mean.dim": mean, "_softmax": softmax,
}  # fmt: skip


@contextmanager
def sums_in_order(device: str) -> Iterator[None]:
    """Let torch's own products, means and softmaxes sum in an order that no shape changes."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for name, function in IN_ORDER.items():
                library.impl(name, function, device.upper(), allow_override=True)
        yield
    finally:
        library._destroy()


@DTYPES
@pytest.mark.parametrize("model_type", ["qwen3_moe", "olmoe"])
def test_a_model_whose_other_parts_are_invariant(model_type, dtype, device) -> None:
    """Logits of a training forward, and of prefill and steps of one token on a static cache.

    On a CPU there are no kernels: the experts' products are torch's too, and sum in order here.
    """
    model = tiny_models.build(model_type, dtype=dtype, output_router_logits=False).to(device)
    patch_model(model, batch_invariant=device == "cuda")
    used = "triton" if device == "cuda" else "torch"
    assert {row.experts_backend for row in patch_report(model)} == {used}
    ids_BS = torch.randint(4, 80, (2, 14), device=device)
    with sums_in_order(device):
        trained = model.train()(input_ids=ids_BS).logits
        assert trained.requires_grad
        decoded, prompt = [], 5
        model.eval()
        for ids_1S in ids_BS.split(1):
            cache = StaticCache(config=model.config, max_cache_len=32)
            parts = [ids_1S[:, :prompt], *ids_1S[:, prompt:].split(1, dim=1)]
            with torch.inference_mode():
                out = [model(input_ids=part, past_key_values=cache).logits for part in parts]
            decoded.append(torch.cat(out, dim=1))
    assert_bits(torch.cat(decoded), trained.detach(), "logits")
