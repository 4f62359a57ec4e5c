"""READ FIRST. Definition of the experts in plain differentiable torch; every kernel follows it.

The code is small, slow and obvious. Autograd differentiates it; exact tests run it in fp64. The
torch backend (ops/experts/torch_backend.py) and the Triton kernels must agree with it. Training
never calls it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_patch.types import ExpertWeights, Glu, Lora, Plan


def build_plan(ids_TK: Tensor, num_experts: int) -> Plan:
    """Sort rows n = t*K + k by expert: a stable sort by (expert, n).

    Args:
        ids_TK: integer expert ids; an id outside [0, num_experts) means an empty slot.
        num_experts: E.

    Returns:
        Plan, int32, bit for bit the same for any device, grid or block size.
    """
    T, K = ids_TK.shape
    N = T * K
    flat_N = ids_TK.reshape(-1).long()
    valid_N = (flat_N >= 0) & (flat_N < num_experts)
    key_N = torch.where(valid_N, flat_N, num_experts)
    row_of_N = torch.argsort(key_N, stable=True)
    counts_E = torch.zeros(num_experts + 1, dtype=torch.long, device=ids_TK.device)
    counts_E.scatter_add_(0, key_N, torch.ones_like(key_N))
    offsets_S = torch.zeros_like(counts_E)
    offsets_S[1:] = counts_E[:num_experts].cumsum(0)
    slot_N = torch.empty_like(row_of_N)
    slot_N[row_of_N] = torch.arange(N, device=ids_TK.device)
    slot_N = torch.where(valid_N, slot_N, -1)
    row_of_N = torch.where(torch.arange(N, device=ids_TK.device) < offsets_S[-1], row_of_N, -1)
    return Plan(row_of_N.int(), slot_N.view(T, K).int(), offsets_S.int())


def split_gate(h: Tensor, glu: Glu) -> tuple[Tensor, Tensor]:
    """Return the gate and up halves of h, [..., F] each."""
    if glu.interleaved:
        return h[..., ::2], h[..., 1::2]
    gate, up = h.chunk(2, dim=-1)
    return gate, up


def activate(x: Tensor, kind: str) -> Tensor:
    """Apply the elementwise activation function of this name."""
    if kind == "silu":
        return torch.nn.functional.silu(x)
    if kind == "gelu":
        return torch.nn.functional.gelu(x)
    if kind == "gelu_tanh":
        return torch.nn.functional.gelu(x, approximate="tanh")
    if kind == "relu":
        return torch.relu(x)
    if kind == "relu2":
        return torch.relu(x).square()
    raise ValueError(f"activation is {kind!r}; accepted: silu, gelu, gelu_tanh, relu, relu2")


def gated_activation(h: Tensor, glu: Glu) -> Tensor:
    """Compute a from h in fp32 (fp64 for fp64), rounded once to the dtype of h."""
    wide = h if h.dtype == torch.float64 else h.float()
    if not glu.gated:
        return activate(wide, glu.kind).to(h.dtype)
    gate, up = split_gate(wide, glu)
    if glu.limit != float("inf"):
        gate = gate.clamp(max=glu.limit)
        up = up.clamp(min=-glu.limit, max=glu.limit)
    if glu.kind == "swiglu_oai":
        a = (up + 1) * gate * torch.sigmoid(glu.alpha * gate)
    else:
        a = activate(gate, glu.kind) * up
    return a.to(h.dtype)


def project(x_nI: Tensor, w_OI: Tensor, b_O: Tensor | None, lora: Lora | None, e: int) -> Tensor:
    """Apply the linear of expert e with its low-rank term: W x + b + s * B (A x)."""
    y_nO = x_nI @ w_OI.T
    if lora is not None:
        y_nO = y_nO + lora.scaling * ((x_nI @ lora.A_ERI[e].T) @ lora.B_EOR[e].T)
    return y_nO if b_O is None else y_nO + b_O


def experts(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w: ExpertWeights,
    glu: Glu,
    lora13: Lora | None = None,
    lora2: Lora | None = None,
) -> Tensor:
    """Compute out_t = sum_k w_tk * (W2_e act(W13_e x_t + b13_e) + b2_e), with e = ids[t, k].

    Args:
        x_TD, ids_TK, weights_TK: hidden states, expert ids, routing weights.
        w, glu: the experts' weights and activation.
        lora13, lora2: low-rank factors of the up and the down projection.

    Returns:
        out_TD in the dtype of x. Empty slots (an id outside [0, E)) contribute nothing.
    """
    out_TD = torch.zeros_like(x_TD)
    for e in range(w.w13_EHD.shape[0]):
        token_n, slot_n = torch.where(ids_TK == e)
        h_nH = project(
            x_TD[token_n], w.w13_EHD[e], None if w.b13_EH is None else w.b13_EH[e], lora13, e
        )
        a_nF = gated_activation(h_nH, glu)
        y_nD = project(a_nF, w.w2_EDF[e], None if w.b2_ED is None else w.b2_ED[e], lora2, e)
        weighted_nD = weights_TK[token_n, slot_n, None] * y_nD
        out_TD = out_TD.index_add(0, token_n, weighted_nD.to(out_TD.dtype))
    return out_TD
