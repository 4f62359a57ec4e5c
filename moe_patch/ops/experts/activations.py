"""Gated activation of the torch backend and its analytic derivative.

Forward is the function of ops/experts/definition.py. Backward also returns a, which forward does
not save: the gradients of the down projection and of the routing weights both need it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_patch.ops.experts.definition import activate, gated_activation, split_gate
from moe_patch.types import Glu

__all__ = ["gated_activation", "gated_activation_backward"]

_aten = torch.ops.aten


def gated_activation_backward(
    h_NH: Tensor, da_NF: Tensor, w_N1: Tensor, glu: Glu
) -> tuple[Tensor, Tensor]:
    """Compute a and dL/dh from h and the unweighted gradient of a.

    Args:
        h_NH: output of the up projection.
        da_NF: W2ᵀ dout, before it is multiplied by the routing weight.
        w_N1: routing weights of the rows, fp32 (fp64 for fp64).
        glu: the activation.

    Returns:
        (a_NF, dh_NH) in the dtype of h, each rounded once.
    """
    wide = torch.float64 if h_NH.dtype == torch.float64 else torch.float32
    h = h_NH.to(wide)
    da = da_NF.to(wide) * w_N1.to(wide)
    if not glu.gated:
        return activate(h, glu.kind).to(h_NH.dtype), activate_backward(da, h, glu.kind).to(
            h_NH.dtype
        )
    gate, up = split_gate(h, glu)
    clamped = glu.limit != float("inf")
    gate_c = gate.clamp(max=glu.limit) if clamped else gate
    up_c = up.clamp(min=-glu.limit, max=glu.limit) if clamped else up
    if glu.kind == "swiglu_oai":
        s = torch.sigmoid(glu.alpha * gate_c)
        a = (up_c + 1) * gate_c * s
        dgate = da * (up_c + 1) * (s + glu.alpha * gate_c * s * (1 - s))
        dup = da * gate_c * s
    else:
        value = activate(gate_c, glu.kind)
        a = value * up_c
        dgate = activate_backward(da * up_c, gate_c, glu.kind)
        dup = value.mul_(da)
    if clamped:
        dgate = torch.where(gate > glu.limit, 0.0, dgate)
        dup = torch.where(up.abs() > glu.limit, 0.0, dup)
    dh_NH = torch.empty_like(h_NH)
    dh_gate, dh_up = split_gate(dh_NH, glu)
    dh_gate.copy_(dgate)
    dh_up.copy_(dup)
    return a.to(h_NH.dtype), dh_NH


def activate_backward(grad: Tensor, x: Tensor, kind: str) -> Tensor:
    """Return grad * act'(x), elementwise."""
    if kind == "silu":
        return _aten.silu_backward(grad, x)
    if kind == "gelu":
        return _aten.gelu_backward(grad, x)
    if kind == "gelu_tanh":
        return _aten.gelu_backward(grad, x, approximate="tanh")
    if kind == "relu":
        return torch.where(x > 0, grad, 0.0)
    if kind == "relu2":
        return grad * 2 * torch.relu(x)
    raise ValueError(f"activation is {kind!r}; accepted: silu, gelu, gelu_tanh, relu, relu2")
