"""Checks of the self-test: each returns an error over its limit, or raises Failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_patch.ops.backend import choose_backend
from moe_patch.ops.experts import definition as reference
from moe_patch.ops.experts.op import experts_mlp
from moe_patch.ops.product_key import product_key_reference, product_key_topk
from moe_patch.ops.routing import route
from moe_patch.ops.routing_op import route_impl
from moe_patch.types import ExpertWeights, Glu, Lora, RouteSpec

# Largest relative errors. In fp32: FP32_LIMIT. In lower precision: EAGER_FACTOR times the error of
# the same formulas in torch in that dtype, plus FP32_INSIDE for what is computed in fp32.
FP32_LIMIT = 1e-5
EAGER_FACTOR = 1.5
FP32_INSIDE = 1e-6
REPEATS = 10

SILU = Glu("silu")
GPT_OSS = Glu("swiglu_oai", interleaved=True, alpha=1.702, limit=7.0)


class Failed(Exception):
    """A check does not hold; the message says why."""


# A group of titles and checks that run the same kernels.
Group = list[tuple[str, Callable[[], float]]]


def groups_of(device: torch.device) -> Iterator[Group]:
    """Yield all checks of a device, in order."""
    if choose_backend("auto", device, torch.bfloat16).name == "triton":
        yield [("plan", partial(_plan, device))]
    for score in ("softmax", "sigmoid"):
        for dtype in (torch.float32, torch.bfloat16):
            name = f"routing {score} {short(dtype)}"
            yield [(name, partial(tie_routing, device, score, dtype))]
    yield [("product key fp32", partial(_product_key, device))]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        layer, name = Layer(device, dtype, 200), f"experts {short(dtype)}"
        yield [(name, layer.check), (f"{name} bit-identical", layer.repeats)]
    for T, rows in ((2, "decode"), (60, "short")):
        yield [(f"experts bf16 {rows}", Layer(device, torch.bfloat16, T).check)]
    yield [("experts bf16 lora", Layer(device, torch.bfloat16, 200, rank=16).check)]
    yield [("experts fp32 lora", Layer(device, torch.float32, 60, rank=5).check)]
    yield [("experts bf16 transposed bias", Layer(device, torch.bfloat16, 200, GPT_OSS).check)]
    ungated = Glu("relu2", gated=False)
    yield [("experts bf16 ungated", Layer(device, torch.bfloat16, 200, ungated).check)]


def short(dtype: torch.dtype) -> str:
    """Return a dtype's name for the titles of checks."""
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def distance(ours: Tensor, exact: Tensor) -> float:
    """Return the relative error in norm; infinite for NaN, or if only ``exact`` is zero."""
    apart, size = (ours.double() - exact).norm().item(), exact.norm().item()
    if size == 0.0:
        return 0.0 if apart == 0.0 else float("inf")
    return apart / size if apart == apart else float("inf")


def _plan(device: torch.device) -> float:
    from moe_patch.kernels.plan.plan import build_plan

    for T, K, E in ((700, 8, 128), (1, 1, 1), (37, 3, 5), (0, 2, 4)):
        ids_TK = torch.randint(-1, E + 2, (T, K), device=device)
        for mine, exact in zip(build_plan(ids_TK, E), reference.build_plan(ids_TK, E), strict=True):
            if not torch.equal(mine, exact):
                raise Failed(f"differs from a stable sort at T={T}, K={K}, E={E}")
    return 0.0


def tie_routing(device: torch.device, score: str, dtype: torch.dtype) -> float:
    """Check routing on small integer logits, which are sure to tie; compare ids exactly."""
    spec = RouteSpec(8, score=score, renormalize=True)
    logits_TE = torch.randint(-4, 5, (300, 128), device=device).to(dtype).requires_grad_()
    wide_TE = logits_TE.detach().double().requires_grad_()
    ours, exact = route_impl("auto")(logits_TE, spec, None), route(wide_TE, spec)
    if not torch.equal(ours.ids_TK, exact.ids_TK):
        raise Failed("chooses other experts than the definition, or in another order")
    grad_TK = torch.randn_like(ours.weights_TK)
    (mine,) = torch.autograd.grad(ours.weights_TK, logits_TE, grad_TK)
    (theirs,) = torch.autograd.grad(exact.weights_TK, wide_TE, grad_TK.to(exact.weights_TK.dtype))
    limit = 4e-3 if dtype == torch.bfloat16 else FP32_LIMIT
    errors = distance(ours.weights_TK, exact.weights_TK.detach()), distance(mine, theirs)
    return max(errors) / limit


def _product_key(device: torch.device) -> float:
    x_TP, y_TP = (torch.randn(65, 32, device=device).requires_grad_() for _ in range(2))
    ours = product_key_topk(x_TP, y_TP, 8)
    wide = x_TP.detach().double().requires_grad_(), y_TP.detach().double().requires_grad_()
    exact = product_key_reference(*wide, 8)
    if not torch.equal(ours.ids_TK, exact.ids_TK):
        raise Failed("chooses other pairs of keys than the definition")
    grad_TK = torch.randn(65, 8, device=device)
    mine = torch.autograd.grad(ours.weights_TK, (x_TP, y_TP), grad_TK)
    theirs = torch.autograd.grad(exact.weights_TK, wide, grad_TK.double())
    pairs = [(ours.weights_TK, exact.weights_TK), *zip(mine, theirs, strict=True)]
    return max(distance(a.detach(), b.detach()) for a, b in pairs) / FP32_LIMIT


class Layer:
    """One experts call over random tensors, some slots empty; tensors are made on demand."""

    E, K = 8, 4

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        tokens: int,
        glu: Glu = SILU,
        rank: int = 0,
    ) -> None:
        self.device, self.dtype, self.tokens, self.glu, self.rank = device, dtype, tokens, glu, rank
        # Wider than one tile on devices that use tiles.
        self.D, self.F = (272, 136) if device.type == "cuda" else (64, 40)

    def check(self) -> float:
        """Return the largest error of the output and every gradient, over its limit."""
        tensors, ids_TK, grad_TD = self.inputs()
        ours = self.results(tensors, ids_TK, grad_TD)
        exact = self.reference(self.cast(tensors, torch.float64), ids_TK, grad_TD)
        eager = self.reference(self.cast(tensors, self.dtype), ids_TK, grad_TD)
        errors = {}
        for name, mine in ours.items():
            limit = FP32_LIMIT
            if self.dtype != torch.float32:
                theirs = eager[name].to(mine.dtype)
                limit = EAGER_FACTOR * distance(theirs, exact[name]) + FP32_INSIDE
            errors[name] = distance(mine, exact[name]) / limit
        worst = max(errors, key=lambda name: errors[name])
        if errors[worst] > 1.0:
            raise Failed(f"{worst} is {errors[worst]:.2f} times as far from fp64 as allowed")
        return errors[worst]

    def repeats(self) -> float:
        """Check that every run gives the same bits."""
        self.repeated(*self.inputs())
        return 0.0

    def repeated(
        self, tensors: dict[str, Tensor], ids_TK: Tensor, grad_TD: Tensor
    ) -> dict[str, Tensor]:
        """Return output and gradients of the operator, after checking that every run repeats them.

        Raises:
            Failed: a run gave other bits than the first.
        """
        first = self.results(tensors, ids_TK, grad_TD)
        for _ in range(REPEATS):
            again = self.results(tensors, ids_TK, grad_TD)
            for name, value in first.items():
                if not torch.equal(again[name], value):
                    raise Failed(f"{name} differs between two runs")
        return first

    def results(
        self, tensors: dict[str, Tensor], ids_TK: Tensor, grad_TD: Tensor
    ) -> dict[str, Tensor]:
        """Return output and gradients of the operator."""
        return self.run(experts_mlp, tensors, ids_TK, grad_TD)

    def reference(
        self, tensors: dict[str, Tensor], ids_TK: Tensor, grad_TD: Tensor
    ) -> dict[str, Tensor]:
        """Return output and gradients of the definition."""
        return self.run(reference.experts, tensors, ids_TK, grad_TD)

    @staticmethod
    def cast(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors in another dtype, as leaves."""
        return {name: t.detach().to(dtype).requires_grad_() for name, t in tensors.items()}

    def inputs(self) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return tensors that require gradients, ids and the gradient of the output."""
        E, K, D, F, R, T = self.E, self.K, self.D, self.F, self.rank, self.tokens
        H = 2 * F if self.glu.gated else F

        def random(*shape: int) -> Tensor:
            scale = shape[-1] ** -0.5 if len(shape) == 3 else 1.0
            values = torch.randn(shape, device=self.device) * scale
            return values.to(self.dtype).requires_grad_()

        tensors = {"x": random(T, D), "weights": torch.rand(T, K, device=self.device)}
        tensors["weights"].requires_grad_()
        if self.glu.interleaved:  # gpt_oss stores transposed weights
            tensors |= {"w13": random(E, D, H), "w2": random(E, F, D)}
            tensors |= {"b13": random(E, H), "b2": random(E, D)}
        else:
            tensors |= {"w13": random(E, H, D), "w2": random(E, D, F)}
        if R:
            tensors |= {"a13": random(E, R, D), "lb13": random(E, H, R)}
            tensors |= {"a2": random(E, R, F), "lb2": random(E, D, R)}
        ids_TK = torch.rand(T, E, device=self.device).argsort(1)[:, :K]
        hole_TK = torch.rand(T, K, device=self.device)
        ids_TK = torch.where(hole_TK < 0.05, -1, torch.where(hole_TK > 0.95, E, ids_TK))
        return tensors, ids_TK, torch.randn(T, D, device=self.device).to(self.dtype)

    def run(
        self, function: Any, tensors: dict[str, Tensor], ids_TK: Tensor, grad_TD: Tensor
    ) -> dict[str, Tensor]:
        """Return output and gradients of ``function``: :func:`experts_mlp` or one like it."""
        t = tensors
        w13, w2 = (t["w13"].mT, t["w2"].mT) if self.glu.interleaved else (t["w13"], t["w2"])
        lora13 = Lora(t["a13"], t["lb13"], 0.5) if self.rank else None
        lora2 = Lora(t["a2"], t["lb2"], 2.0) if self.rank else None
        w = ExpertWeights(w13, w2, t.get("b13"), t.get("b2"))
        out = function(t["x"], ids_TK, t["weights"], w, self.glu, lora13=lora13, lora2=lora2)
        grads = torch.autograd.grad(out, list(t.values()), grad_TD.to(out.dtype))
        return {"out": out.detach()} | dict(zip(t, grads, strict=True))
