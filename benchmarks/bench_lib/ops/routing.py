"""Op ``routing``: from router logits to int32 ids and weights, and back to the logits."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from bench_lib.impls import te_router
from bench_lib.rotating import RotatingInputs, rotate
from bench_lib.shapes import Point
from bench_lib.spec import Grads, Impl, Op, Program, Work
from moe_patch.ops.routing import route
from moe_patch.types import RouteSpec

SEED = 2026
# Groups of the shapes that limit them; the other values are those of DeepSeek-V3.
GROUPS = {"E256_K8_G8": 8}


def spec_of(point: Point) -> RouteSpec:
    """Return renormalised softmax (Qwen3-MoE), or DeepSeek-V3's sigmoid, bias and group limit."""
    groups = GROUPS.get(point.shape, 0)
    if groups == 0:
        return RouteSpec(point.sizes.K, renormalize=True)
    return RouteSpec(
        point.sizes.K, score="sigmoid", groups=groups, top_groups=groups // 2,
        renormalize=True, eps=1e-20, scale=2.5,
    )  # fmt: skip


def make_inputs(point: Point, device: torch.device) -> RotatingInputs:
    """Return normal logits, a small correction bias, a normal gradient of the fp32 weights."""
    s = point.sizes
    generator = torch.Generator(device).manual_seed(SEED)
    normal = partial(torch.randn, generator=generator, device=device)
    logits_TE = normal(point.T, s.E).to(point.torch_dtype)
    return rotate({"logits": logits_TE}, normal(point.T, s.K), bias=0.1 * normal(s.E))


def _bias(inputs: RotatingInputs, point: Point) -> Tensor | None:
    return inputs.fixed["bias"] if point.shape in GROUPS else None


def build_triton(inputs: RotatingInputs, point: Point) -> Program:
    """Build ``moe_patch.ops.routing_op.route`` with int32 ids."""
    from moe_patch.ops import routing_op

    spec, bias_E = spec_of(point), _bias(inputs, point)
    return inputs.program(
        lambda leaf: (
            routing_op.route(leaf["logits"], spec, bias_E, ids_dtype=torch.int32).weights_TK
        )
    )


def build_torch(inputs: RotatingInputs, point: Point, *, compiled: bool = False) -> Program:
    """Build the definition, eager or under torch.compile."""
    spec, bias_E = spec_of(point), _bias(inputs, point)
    if compiled:
        # After a few sizes torch.compile would silently fall back to eager.
        torch.compiler.reset()
    run = torch.compile(route, dynamic=False) if compiled else route
    return inputs.program(lambda leaf: run(leaf["logits"], spec, bias_E).weights_TK)


def build_te(inputs: RotatingInputs, point: Point) -> Program:
    """Build Transformer Engine's router."""
    return te_router.build(inputs, spec_of(point), _bias(inputs, point))


def reference(point: Point, inputs: RotatingInputs) -> tuple[Tensor, Tensor]:
    """Return fp64 weights and the gradient of the logits."""
    wide_TE = inputs.copies[0]["logits"].detach().double().requires_grad_()
    bias_E = _bias(inputs, point)
    bias_E = None if bias_E is None else bias_E.double()
    weights_TK = route(wide_TE, spec_of(point), bias_E).weights_TK
    (grad_TE,) = torch.autograd.grad(weights_TK, wide_TE, inputs.dout_TD.double())
    return weights_TK.detach(), grad_TE


def compare(point: Point, expected: tuple[Tensor, Tensor], out: Tensor, grads: Grads) -> float:
    """Return the largest relative error; a wrong id puts its gradient into a wrong column."""
    pairs = [(out, expected[0]), *((grad, expected[1]) for grad in grads.values())]
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)


def work(point: Point) -> Work:
    """Return the work: logits read (gradient written), int32 ids and fp32 weights, once a pass."""
    s, size = point.sizes, torch.empty(0, dtype=point.torch_dtype).itemsize
    moved = point.T * s.E * size + point.rows * 8
    return Work(None, 2 * moved + point.T * s.E * size if point.backward else moved)


ROUTING = Op(
    name="routing",
    shapes=("E64_K8", "E128_K8", "E512_K10", "E256_K8_G8"),
    tokens=(1, 64, 4096, 32768),
    ranks=(None,),
    passes=("fwd", "fwd+bwd"),
    dtypes=("bf16",),
    timer="cudagraph",
    grad=True,
    impls=(
        Impl("moe_patch", build_triton, ours=True, needs_cuda=True, compiles="sizes"),
        Impl("torch", build_torch),
        Impl(
            "torch_compile", partial(build_torch, compiled=True), needs_cuda=True, compiles="sizes"
        ),
        Impl(
            "te_router",
            build_te,
            peer=True,
            needs_cuda=True,
            modules=("transformer_engine.pytorch.router",),
        ),
    ),
    required=("torch", "torch_compile"),
    make_inputs=make_inputs,
    reference=reference,
    compare=compare,
    limits={"bf16": 2e-2, "fp16": 2e-2, "fp32": 2e-2},
    work=work,
    input_bytes=lambda point: work(point).moved_bytes,
)
