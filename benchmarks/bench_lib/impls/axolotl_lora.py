"""axolotl's fused LoRA over scattermoe (Triton), from the peers folder (see scripts/peers.sh)."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from bench_lib.moe_layer import LORA_SCALING, LayerInputs
from bench_lib.shapes import Point
from bench_lib.spec import Impl, Program


def layer(inputs: LayerInputs, leaves: dict[str, Tensor], sort: Any, linear: Any) -> Tensor:
    """Run both projections with their adapters, in the variants that axolotl's own layers use."""
    K, E = inputs.ids_TK.shape[1], inputs.w13_EHD.shape[0]
    experts, rows, ends = sort(inputs.ids_TK, E)
    fused = {"use_fused_dX": True, "use_fused_gather": True}
    h_NH = linear(
        inputs.x_TD, inputs.w13_EHD.transpose(1, 2), K, experts, rows, ends,
        lora_A=leaves["a13"], lora_B=leaves["b13"], scaling=LORA_SCALING,
        grouped_out=True, **fused,
    )  # fmt: skip
    gate_NF, up_NF = h_NH.chunk(2, dim=-1)
    return linear(
        functional.silu(gate_NF) * up_NF, inputs.w2_EDF.transpose(1, 2), 1, experts, rows, ends,
        lora_A=leaves["a2"], lora_B=leaves["b2"], scaling=LORA_SCALING,
        gates=inputs.weights_TK, grouped_in=True, **fused,
    )  # fmt: skip


def to_a(a_ERI: Tensor) -> Tensor:
    """Reshape [E, R, in] -> [E * R, in]."""
    return a_ERI.detach().flatten(0, 1).clone().requires_grad_()


def to_b(b_EOR: Tensor) -> Tensor:
    """Reshape [E, out, R] -> [out, E * R], expert-major columns."""
    return b_EOR.detach().permute(1, 0, 2).flatten(1, 2).clone().requires_grad_()


def from_a(grad: Tensor, E: int) -> Tensor:
    """Reshape a gradient of A back to [E, R, in]."""
    return grad.view(E, -1, grad.shape[1])


def from_b(grad: Tensor, E: int) -> Tensor:
    """Reshape a gradient of B back to [E, out, R]."""
    return grad.view(grad.shape[0], E, -1).permute(1, 0, 2)


def tune_quickly(*modules: Any) -> None:
    """Tune only the tiles of four stages, each timed for milliseconds, not all hundred of a kernel.

    Compiling and timing all of them with Triton's defaults takes a quarter of an hour per size.
    """
    from triton.runtime import Autotuner
    from triton.testing import do_bench

    for module in modules:
        for kernel in vars(module).values():
            if isinstance(kernel, Autotuner):
                kernel._do_bench = partial(do_bench, warmup=2, rep=10)
                deep = [config for config in kernel.configs if config.num_stages == 4]
                kernel.configs = deep or kernel.configs


def build(inputs: LayerInputs, point: Point) -> Program:
    """Build the layer on the op's tensors, factors copied into the peer's packing."""
    from axolotl.integrations.kernels.libs.scattermoe_lora.kernels import lora_ops, ops
    from axolotl.integrations.kernels.libs.scattermoe_lora.parallel_experts import (
        flatten_sort_count,
    )
    from axolotl.integrations.kernels.libs.scattermoe_lora.parallel_linear_lora import (
        parallel_linear_lora,
    )

    tune_quickly(lora_ops, ops)
    E, factors = point.sizes.E, inputs.factors
    leaves = {"x": inputs.x_TD, "weights": inputs.weights_TK}
    leaves |= {name: to_a(factors[name]) for name in ("a13", "a2")}
    leaves |= {name: to_b(factors[name]) for name in ("b13", "b2")}
    canonical = {"a13": partial(from_a, E=E), "a2": partial(from_a, E=E)}
    canonical |= {"b13": partial(from_b, E=E), "b2": partial(from_b, E=E)}
    forward = partial(layer, inputs, leaves, flatten_sort_count, parallel_linear_lora)
    return Program(forward, leaves, canonical)


AXOLOTL_LORA = Impl(
    "axolotl_lora", build, peer=True, needs_cuda=True, compiles="shapes",
    modules=("axolotl.integrations.kernels.libs.scattermoe_lora.parallel_linear_lora",),
    covers=lambda point: point.R is not None,
)  # fmt: skip
