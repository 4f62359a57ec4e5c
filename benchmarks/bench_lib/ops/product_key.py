"""Op ``product_key``: from two rows of P logits to K of P * P ids and their softmax, and back."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from bench_lib.ops.routing import compare
from bench_lib.rotating import RotatingInputs, rotate
from bench_lib.shapes import Point
from bench_lib.spec import Impl, Op, Program, Work
from moe_patch.ops.product_key import product_key_reference, product_key_triton

SEED = 2026


def keys_of(point: Point) -> int:
    """Return P; a shape has E = P * P experts."""
    return math.isqrt(point.sizes.E)


def make_inputs(point: Point, device: torch.device) -> RotatingInputs:
    """Return normal logits and a normal gradient of the weights."""
    P = keys_of(point)
    generator = torch.Generator(device).manual_seed(SEED)
    normal = partial(torch.randn, generator=generator, device=device, dtype=point.torch_dtype)
    leaves = {"x": normal(point.T, P), "y": normal(point.T, P)}
    return rotate(leaves, normal(point.T, point.sizes.K))


def build(inputs: RotatingInputs, point: Point, *, triton: bool) -> Program:
    """Build our kernels, or the definition in torch."""
    run = product_key_triton if triton else product_key_reference
    return inputs.program(lambda leaf: run(leaf["x"], leaf["y"], point.sizes.K).weights_TK)


def build_all_pairs(inputs: RotatingInputs, point: Point) -> Program:
    """Build the loop and the softmax of its sums; it has no backward."""
    from bench_lib.impls.all_pairs import all_pairs_loop

    K = point.sizes.K

    def run(leaf: dict[str, Tensor]) -> Tensor:
        _, sums_TK = all_pairs_loop(leaf["x"].detach(), leaf["y"].detach(), K)
        return torch.softmax(sums_TK, dim=-1)

    return inputs.program(run)


def reference(point: Point, inputs: RotatingInputs) -> tuple[Tensor, Tensor]:
    """Return the weights of the definition's choice, and both gradients side by side, in fp64."""
    P, leaf = keys_of(point), inputs.copies[0]
    ids_TK = product_key_reference(leaf["x"].detach(), leaf["y"].detach(), point.sizes.K).ids_TK
    wide = {name: t.detach().double().requires_grad_() for name, t in leaf.items()}
    sums_TK = wide["x"].gather(1, ids_TK // P) + wide["y"].gather(1, ids_TK % P)
    weights_TK = torch.softmax(sums_TK, dim=-1)
    grads = torch.autograd.grad(weights_TK, tuple(wide.values()), inputs.dout_TD.double())
    return weights_TK.detach(), torch.cat(grads, dim=1)


def work(point: Point) -> Work:
    """Return the work: logits read (and gradients written), int64 ids and weights written, once."""
    size = torch.empty(0, dtype=point.torch_dtype).itemsize
    logits, chosen = 2 * point.T * keys_of(point) * size, point.rows * (8 + size)
    return Work(None, 2 * (logits + chosen) + logits if point.backward else logits + chosen)


PRODUCT_KEY = Op(
    name="product_key",
    shapes=tuple(f"P{P}_K{K}" for P in (64, 128, 256) for K in (16, 32)),
    tokens=(1024, 32768),
    ranks=(None,),
    passes=("fwd", "fwd+bwd"),
    dtypes=("bf16",),
    timer="cudagraph",
    grad=True,
    impls=(
        Impl(
            "moe_patch", partial(build, triton=True), ours=True, needs_cuda=True, compiles="shapes",
        ),
        Impl("torch", partial(build, triton=False)),
        Impl(
            "all_pairs_loop", build_all_pairs, needs_cuda=True, compiles="shapes",
            covers=lambda point: not point.backward,
        ),
    ),
    required=("all_pairs_loop", "torch"),
    make_inputs=make_inputs,
    reference=reference,
    compare=lambda point, expected, out, grads: compare(
        point, expected, out, {"both": torch.cat(list(grads.values()), dim=1)} if grads else {}
    ),
    limits={"bf16": 2e-2, "fp16": 2e-2, "fp32": 2e-2},
    work=work,
    input_bytes=lambda point: work(point).moved_bytes,
)  # fmt: skip
