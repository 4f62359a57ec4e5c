"""The experts on the Triton backend for long contexts: one chunk of tokens after another.

Each chunk has its own plan, and runs the passes of kernels/experts/experts.py on slices of x, ids
and weights. Outputs, h and the gradients of x and of the routing weights are written into slices.
So a, w a, y and the rows of dx exist for one chunk only; y and dx also by columns.

    forward     h and u, if saved, of all rows: in the order of the chunks' plans
    backward    dh over the chunk's h; gradients of weights, biases and factors are added in fp32,
                in the order of the chunks

A token's row sums do not depend on its chunk, because the kernels and tiles are those of a call
with all rows. Only gradients that sum over tokens are summed in another order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_patch.kernels.common.chunks import Chunk, chunks
from moe_patch.kernels.common.device import on_device_of
from moe_patch.kernels.experts.call import Call
from moe_patch.kernels.experts.experts import gradients, intermediate, unit_stride
from moe_patch.kernels.experts.norms import combine_with_norms
from moe_patch.kernels.experts.steps import steps_of
from moe_patch.kernels.plan.plan import build_plan
from moe_patch.kernels.plan.row_tiles import RowTiles
from moe_patch.types import (
    ExpertsBackward,
    ExpertsForward,
    ExpertsNeeds,
    ExpertWeights,
    Glu,
    Kept,
    Lora,
    Plan,
)

_NORMS = ("grad_norm_out_TK", "grad_norm_params_TK", "grad_norm_lora_TK")


def experts_forward(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w: ExpertWeights,
    glu: Glu,
    lora13: Lora | None = None,
    lora2: Lora | None = None,
    *,
    chunk: int,
    save_h: bool = True,
    save_u13: bool = False,
    save_u2: bool = False,
    norms: bool = False,
    batch_invariant: bool = False,
) -> ExpertsForward:
    """Compute the weighted sum of each token's experts, at most ``chunk`` tokens at a time.

    Takes the other arguments of :func:`moe_patch.kernels.experts.experts.experts_forward`, with at
    least one row.

    Returns:
        ExpertsForward; the plan holds the chunks' plans one after another, whose rows, slots and
        offsets count from the start of their chunk.
    """
    (T, K), E = ids_TK.shape, w.w13_EHD.shape[0]

    def rows(width: int, saved: bool) -> Tensor:
        return x_TD.new_empty((T * K, width) if saved else 0)

    kept = Kept(
        rows(w.w13_EHD.shape[1], save_h),
        rows(lora13.A_ERI.shape[1], save_u13) if lora13 is not None else rows(0, False),
        rows(lora2.A_ERI.shape[1], save_u2) if lora2 is not None else rows(0, False),
    )
    out_TD = x_TD.new_empty(x_TD.shape)
    norm_TK = weights_TK.new_empty((T, K) if norms else 0, dtype=torch.float32)
    plans = []
    with on_device_of(x_TD):
        for part in chunks(T, K, chunk):
            tiles = RowTiles(build_plan(ids_TK[part.tokens], E))
            x = unit_stride(x_TD[part.tokens])
            call = Call(tiles, x, w, glu, lora13, lora2, batch_invariant, rows=T * K)
            _forward(call, part, weights_TK[part.tokens].contiguous(), kept, out_TD, norm_TK)
            plans.append(tiles.plan)
    return ExpertsForward(out_TD, Plan(*map(torch.cat, zip(*plans, strict=True))), kept, norm_TK)


def _forward(
    call: Call, part: Chunk, weights_TK: Tensor, kept: Kept, out_TD: Tensor, norm_TK: Tensor
) -> None:
    """Run one chunk; write what ``kept``, ``out_TD`` and, unless empty, ``norm_TK`` hold of it."""
    N, F = call.tiles.count, call.w.w2_EDF.shape[2]
    u13_NR = call.inputs_of_B13()
    save_h = kept.h_NH.numel() > 0
    own_h = kept.h_NH[part.rows]
    h_NH, a_NF = call.up(
        u13_NR, save_h=save_h, save_a=True, into=(own_h, call.x_TD.new_empty(N, F))
    )
    if save_h and h_NH is not own_h:
        own_h.copy_(h_NH)
    del h_NH, own_h
    u2_NR = call.inputs_of_B2(a_NF)
    for saved, u_NR in ((kept.u13_NR, u13_NR), (kept.u2_NR, u2_NR)):
        if saved.numel() > 0:
            assert u_NR is not None
            saved[part.rows] = u_NR
    if norm_TK.numel() > 0:
        out_TD[part.tokens], norm_TK[part.tokens] = combine_with_norms(
            call.down(a_NF, u2_NR), call.plan, weights_TK
        )
    else:
        call.down_into(a_NF, u2_NR, weights_TK, out_TD[part.tokens])


def experts_backward(
    dout_TD: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    w: ExpertWeights,
    glu: Glu,
    lora13: Lora | None,
    lora2: Lora | None,
    plan: Plan,
    kept: Kept,
    needs: ExpertsNeeds,
    *,
    chunk: int,
    overwrite_h: bool = False,
    batch_invariant: bool = False,
) -> ExpertsBackward:
    """Compute the gradients listed in ``needs``, at most ``chunk`` tokens at a time.

    Takes the other arguments of :func:`moe_patch.kernels.experts.experts.experts_backward`, with
    the plan of :func:`experts_forward`.
    """
    (T, K), S = weights_TK.shape, w.w13_EHD.shape[0] + 1
    dx_TD = x_TD.new_empty(x_TD.shape) if needs.x else None
    by_token: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    with on_device_of(x_TD):
        for number, part in enumerate(chunks(T, K, chunk)):
            own = Plan(
                plan.row_of_N[part.rows],
                plan.slot_of_TK[part.tokens],
                # A copy is aligned like every allocation, so all chunks use one compiled kernel.
                plan.offsets_S[number * S : (number + 1) * S].clone(),
            )
            x, dout = unit_stride(x_TD[part.tokens]), unit_stride(dout_TD[part.tokens].to(x_TD.dtype))
            call = Call(RowTiles(own), x, w, glu, lora13, lora2, batch_invariant, rows=T * K)
            saved = Kept(*(t[part.rows] if t.numel() else t for t in kept))
            weights = weights_TK[part.tokens].contiguous()
            over = overwrite_h or saved.h_NH.numel() == 0
            found = gradients(
                call, dout, weights,
                intermediate(call, dout, weights, saved, needs, steps_of(needs), over),
                needs, None if dx_TD is None else dx_TD[part.tokens],
            )  # fmt: skip
            _add(found._asdict(), part, T, by_token, sums)
            del found
    like = {
        "w13": w.w13_EHD, "w2": w.w2_EDF, "b13": w.b13_EH, "b2": w.b2_ED,
        "lora13_A": lora13 and lora13.A_ERI, "lora13_B": lora13 and lora13.B_EOR,
        "lora2_A": lora2 and lora2.A_ERI, "lora2_B": lora2 and lora2.B_EOR,
    }  # fmt: skip
    totals = {name: sums.pop(name).to(like[name].dtype) for name in list(sums)}
    return ExpertsBackward(x=dx_TD, **by_token, **totals)


def _add(
    found: dict[str, Tensor | None],
    part: Chunk,
    tokens: int,
    by_token: dict[str, Tensor],
    sums: dict[str, Tensor],
) -> None:
    """Place a chunk's results by token, and add its other gradients in fp32; empties ``found``."""
    del found["x"]
    for name in list(found):
        grad = found.pop(name)
        if grad is None:
            continue
        if name == "weights" or name in _NORMS:
            if name not in by_token:
                by_token[name] = grad.new_empty(tokens, *grad.shape[1:])
            by_token[name][part.tokens] = grad
        elif name in sums:
            sums[name].add_(grad)
        else:
            sums[name] = grad.to(torch.float32)
