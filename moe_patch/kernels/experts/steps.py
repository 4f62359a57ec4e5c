"""Intermediate results of a backward for the requested gradients; gradients without rows."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from moe_patch.types import ExpertsBackward, ExpertsNeeds, ExpertWeights, Lora


class Steps(NamedTuple):
    """Flags of the intermediate results of backward.

    Attributes:
        h: some result that needs h.
        dh, wa: the gradient of h; the activation times the routing weight.
        p, q: s B13ᵀ dh and s B2ᵀ dout, if there are factors.
        u13, u2: the inputs of B13 and B2, if there are factors.
    """

    h: bool
    dh: bool
    wa: bool
    p: bool
    q: bool
    u13: bool
    u2: bool


@functools.cache
def steps_of(needs: ExpertsNeeds) -> Steps:
    """Return the steps of a backward that computes these gradients."""
    p = needs.x or needs.lora13_A or needs.norms
    dh = any((p, needs.w13, needs.b13, needs.lora13_B))
    wa = needs.w2 or needs.lora2_A or needs.norms
    return Steps(
        h=dh or wa or needs.weights,
        dh=dh,
        wa=wa,
        p=p,
        q=dh or needs.weights or needs.lora2_A,
        u13=needs.lora13_B or needs.norms,
        u2=needs.lora2_B or needs.norms,
    )


def zero_gradients(
    x_TD: Tensor,
    weights_TK: Tensor,
    w: ExpertWeights,
    lora13: Lora | None,
    lora2: Lora | None,
    needs: ExpertsNeeds,
) -> ExpertsBackward:
    """Return the gradients of a call without rows."""
    inputs: dict[str, Tensor | None] = {
        "x": x_TD, "weights": weights_TK, "w13": w.w13_EHD, "w2": w.w2_EDF, "b13": w.b13_EH, "b2":
        w.b2_ED,
        "lora13_A": lora13 and lora13.A_ERI, "lora13_B": lora13 and lora13.B_EOR,
        "lora2_A": lora2 and lora2.A_ERI, "lora2_B": lora2 and lora2.B_EOR,
    }  # fmt: skip
    wanted = needs._asdict()
    grads = {
        name: torch.zeros_like(tensor) if tensor.dim() == 3 else tensor.new_zeros(tensor.shape)
        for name, tensor in inputs.items()
        if wanted[name] and tensor is not None
    }
    if needs.norms:
        zero_TK = torch.zeros(weights_TK.shape, dtype=torch.float32, device=x_TD.device)
        grads |= {"grad_norm_out_TK": zero_TK, "grad_norm_params_TK": zero_TK.clone()}
        if lora13 is not None or lora2 is not None:
            grads["grad_norm_lora_TK"] = zero_TK.clone()
    return ExpertsBackward(**grads)
