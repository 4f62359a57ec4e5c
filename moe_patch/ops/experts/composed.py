"""The experts as separate differentiable steps, for activations without a fused kernel.

    x_TD -> token rows -> grouped linear -> the module's own gate -> grouped linear
         -> the module's own post-expert norm, if any -> weighted sum over a token's experts

Each step is an operator with autograd; the products run on either backend. The model's own code
runs between them. This path saves more for backward than the fused one: the gathered rows, the
activation and the expert outputs. The report names the blocks that use it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe_patch.errors import refuse_forward_mode
from moe_patch.ops.backend import choose_backend
from moe_patch.ops.define import define
from moe_patch.ops.experts.definition import build_plan
from moe_patch.ops.experts.rows import gather_sum, row_weights, rows_to_slots, token_rows
from moe_patch.ops.experts.schema import gradient_of
from moe_patch.types import ExpertWeights, Lora, Plan

# Each module has a class Groups with the same methods.
_GROUPS = {"torch": "moe_patch.ops.experts.grouped", "triton": "moe_patch.kernels.experts.groups"}
_PLAN = "Tensor row_of_N, Tensor slot_of_TK, Tensor offsets"
_ops = torch.ops.moe_patch_steps


def experts_composed(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w: ExpertWeights,
    gate: Callable[[Tensor], Tensor],
    post_norm: Callable[[Tensor], Tensor] | None = None,
    *,
    lora13: Lora | None = None,
    lora2: Lora | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute out_t = sum_k w_tk * norm(W2_e gate(W13_e x_t + b13_e) + b2_e).

    Takes the arguments of ``experts_mlp``, and:

    Args:
        gate: h_NH -> a_NF, differentiable; the experts module's own activation.
        post_norm: y_ND -> y_ND, differentiable; None for no norm.
        backend: backend of the grouped products, as in ``experts_mlp``.
    """
    plan = build_plan(ids_TK, w.w13_EHD.shape[0])
    x_ND = gather_rows(x_TD, plan)
    h_NH = grouped_linear(x_ND, w.w13_EHD, plan, w.b13_EH, lora13, backend=backend)
    y_ND = grouped_linear(gate(h_NH), w.w2_EDF, plan, w.b2_ED, lora2, backend=backend)
    if post_norm is not None:
        y_ND = post_norm(y_ND)
    return combine_rows(y_ND, weights_TK, plan).to(x_TD.dtype)


def gather_rows(x_TD: Tensor, plan: Plan) -> Tensor:
    """Return the token of each row, in plan order, [N, D]; differentiable."""
    refuse_forward_mode(x_TD)
    return _ops.rows(x_TD, *plan)


def grouped_linear(
    x_NI: Tensor,
    w_EOI: Tensor,
    plan: Plan,
    b_EO: Tensor | None = None,
    lora: Lora | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """Compute W_e x_n + b_e + s * B_e (A_e x_n) for rows in plan order, [N, O]; differentiable.

    Args:
        backend: "auto", "torch" or "triton", as in ``experts_mlp``.

    Raises:
        UnsupportedOptionError: Triton was requested and cannot run on this device and dtype.
    """
    refuse_forward_mode(x_NI, w_EOI, b_EO, *(lora or ())[:2])
    if lora is not None:
        lora = Lora(lora.A_ERI.to(x_NI.dtype), lora.B_EOR.to(x_NI.dtype), lora.scaling)
    chosen = choose_backend(backend, x_NI.device, x_NI.dtype).name
    return _ops.linear(x_NI, w_EOI, b_EO, *(lora or (None, None, 1.0)), chosen, *plan)


def combine_rows(y_ND: Tensor, weights_TK: Tensor, plan: Plan) -> Tensor:
    """Return sum_k w_tk y[slot_tk], [T, D]; differentiable."""
    refuse_forward_mode(y_ND, weights_TK)
    return _ops.combine(y_ND, weights_TK, *plan)


def _rows(x: Any, *plan: Any) -> Any:
    return token_rows(x, Plan(*plan))


def _combine(y: Any, weights: Any, *plan: Any) -> Any:
    return gather_sum(y, plan[1], weights).to(y.dtype)


def _combine_bwd(dout: Any, y: Any, weights: Any, *plan: Any) -> Any:
    plan = Plan(*plan)
    dout_ND = token_rows(dout, plan)
    wide = torch.promote_types(y.dtype, torch.float32)
    dweights_TK = rows_to_slots((dout_ND.to(wide) * y.to(wide)).sum(-1), plan).to(weights.dtype)
    return (row_weights(weights, plan).unsqueeze(1) * dout_ND).to(y.dtype), dweights_TK


@functools.cache
def _module(backend: str) -> ModuleType:
    return importlib.import_module(_GROUPS[backend])


def _groups(backend: str, plan: Plan, like: Tensor) -> Any:
    """Return a backend's grouped products; without rows torch's, as kernels need at least one."""
    return _module(backend if plan.row_of_N.numel() else "torch").Groups(plan, like)


def _linear(x: Any, w: Any, b: Any, a: Any, lb: Any, s: Any, backend: Any, *plan: Any) -> Any:
    plan = Plan(*plan)
    groups = _groups(backend, plan, x)
    with torch.autocast(x.device.type, enabled=False):
        low_rank = None if a is None else (groups.linear(x, a), Lora(a, lb, s))
        y = groups.linear(x, w, b, low_rank)
    return y.masked_fill_((plan.row_of_N < 0).unsqueeze(1), 0.0)


def _linear_bwd(
    dy: Any, x: Any, w: Any, b: Any, a: Any, lb: Any, s: Any, backend: Any, *args: Any
) -> Any:
    *plan, needs = args
    groups = _groups(backend, Plan(*plan), x)
    lora = None if a is None else Lora(a, lb, s)
    dy = dy.contiguous()
    empty = x.new_empty(0)
    with torch.autocast(x.device.type, enabled=False):
        dx, p = groups.linear_transposed(dy, w, lora)
        # Rows past the last valid one are unspecified, but a gate with parameters sums over all.
        dx.masked_fill_((plan[0] < 0).unsqueeze(1), 0.0)
        return [
            dx if needs[0] else empty,
            groups.outer_sum(dy, x, w) if needs[1] else empty,
            groups.row_sum(dy, b) if needs[2] else empty,
            groups.outer_sum(p, x, a).mul_(s) if needs[3] and p is not None else empty,
            groups.outer_sum(dy, groups.linear(x, a), lb).mul_(s) if needs[4] else empty,
        ]


def _rows_setup(ctx: Any, inputs: Any, output: Any) -> Any:
    ctx.save_for_backward(*inputs[1:])


def _rows_backward(ctx: Any, dx_ND: Any) -> Any:
    return _ops.combine(dx_ND, None, *ctx.saved_tensors), None, None, None


def _combine_setup(ctx: Any, inputs: Any, output: Any) -> Any:
    ctx.save_for_backward(*inputs)


def _combine_backward(ctx: Any, dout: Any) -> Any:
    y, weights, *plan = ctx.saved_tensors
    return *_ops.combine_bwd(dout, y, weights, *plan), None, None, None


def _linear_setup(ctx: Any, inputs: Any, output: Any) -> Any:
    *tensors, s, backend, row_of_N, slot_of_TK, offsets = inputs
    ctx.save_for_backward(*tensors, row_of_N, slot_of_TK, offsets)
    ctx.s, ctx.backend = s, backend


def _linear_backward(ctx: Any, dy: Any) -> Any:
    *tensors, row_of_N, slot_of_TK, offsets = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:5])
    plan = row_of_N, slot_of_TK, offsets
    grads = _ops.linear_bwd(dy, *tensors, ctx.s, ctx.backend, *plan, needs)
    others = [None] * (2 + len(plan))
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), *others


def _rows_fake(x: Any, row_of_N: Any, slot_of_TK: Any, offsets: Any) -> Any:
    return x.new_empty(row_of_N.shape[0], x.shape[1])


def _combine_fake(y: Any, weights: Any, row_of_N: Any, slot_of_TK: Any, offsets: Any) -> Any:
    return y.new_empty(slot_of_TK.shape[0], y.shape[1])


def _combine_bwd_fake(dout: Any, y: Any, weights: Any, *plan: Any) -> Any:
    return y.new_empty(y.shape), weights.new_empty(weights.shape)


def _linear_fake(x: Any, w: Any, *args: Any) -> Any:
    return x.new_empty(x.shape[0], w.shape[1])


def _linear_bwd_fake(dy: Any, x: Any, w: Any, b: Any, a: Any, lb: Any, s: Any, *args: Any) -> Any:
    return [
        gradient_of(t) if need and t is not None else x.new_empty(0)
        for t, need in zip((x, w, b, a, lb), args[-1], strict=True)
    ]


_STEPS = "moe_patch_steps::"
define(
    f"{_STEPS}rows", f"(Tensor x, {_PLAN}) -> Tensor",
    _rows, _rows_fake, _rows_backward, _rows_setup,
)  # fmt: skip
define(
    f"{_STEPS}combine", f"(Tensor y, Tensor? weights, {_PLAN}) -> Tensor",
    _combine, _combine_fake, _combine_backward, _combine_setup,
)  # fmt: skip
define(
    f"{_STEPS}combine_bwd",
    f"(Tensor dout, Tensor y, Tensor weights, {_PLAN}) -> (Tensor, Tensor)",
    _combine_bwd, _combine_bwd_fake,
)  # fmt: skip
_OPERANDS = "Tensor x, Tensor w, Tensor? b, Tensor? a, Tensor? lb, float s, str backend"
define(
    f"{_STEPS}linear", f"({_OPERANDS}, {_PLAN}) -> Tensor",
    _linear, _linear_fake, _linear_backward, _linear_setup,
)  # fmt: skip
define(
    f"{_STEPS}linear_bwd", f"(Tensor dy, {_OPERANDS}, {_PLAN}, bool[] needs) -> Tensor[]",
    _linear_bwd, _linear_bwd_fake,
)  # fmt: skip
