"""The experts on the Triton backend for long contexts: one chunk of tokens after another.

Each chunk has its own plan, and runs the passes of kernels/experts/experts.py on slices of x, ids
and weights. Outputs, h and the gradients of x and of the routing weights are written into slices.
So a, w a, y and the rows of dx exist for one chunk only; y and dx also by columns.

    forward     h and u, if saved, of all rows: in the order of the chunks' plans
    backward    dh over the chunk's h; gradients of biases and factors are added in fp32, in the
                order of the chunks, and those of weights too if h was not saved. If it was, they
                are one sum over the rows of all chunks, from dh and w a

A token's row sums do not depend on its chunk, because the kernels and tiles are those of a call
with all rows. Only gradients that sum over tokens are summed in another order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_patch.formats.packed import PackedWeight
from moe_patch.kernels.common.chunks import COLUMNS, LEAST, Chunk, chunks, forward_columns
from moe_patch.kernels.common.device import on_device_of
from moe_patch.kernels.experts.alone import forward_alone
from moe_patch.kernels.experts.call import Call
from moe_patch.kernels.experts.dw import outer_sum
from moe_patch.kernels.experts.experts import gradients, intermediate, unit_stride
from moe_patch.kernels.experts.norms import combine_with_norms
from moe_patch.kernels.experts.reduce import combine
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

_BY_TOKEN = ("weights", "grad_norm_out_TK", "grad_norm_params_TK", "grad_norm_lora_TK")


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
    alone: bool = False,
    save_h: bool = True,
    save_u13: bool = False,
    save_u2: bool = False,
    norms: bool = False,
    batch_invariant: bool = False,
) -> ExpertsForward:
    """Compute the weighted sum of each token's experts, at most ``chunk`` tokens at a time.

    Takes the other arguments of :func:`moe_patch.kernels.experts.experts.experts_forward`, with at
    least one row.

    Args:
        chunk: tokens of a chunk.
        alone: nothing but the output and ``norms`` is used.

    Returns:
        ExpertsForward; the plan holds the chunks' plans one after another, whose rows, slots and
        offsets count from the start of their chunk. With ``alone`` it may be that of all rows.
    """
    (T, K), E = ids_TK.shape, w.w13_EHD.shape[0]
    if alone and not norms and not isinstance(w.w13_EHD, PackedWeight):
        return forward_alone(
            x_TD, ids_TK, weights_TK, w, glu, lora13, lora2,
            chunk=chunk, batch_invariant=batch_invariant,
        )  # fmt: skip

    def rows(width: int, saved: bool) -> Tensor:
        return x_TD.new_empty((T * K, width) if saved else 0)

    kept = Kept(
        rows(w.w13_EHD.shape[1], save_h),
        rows(lora13.A_ERI.shape[1], save_u13) if lora13 is not None else rows(0, False),
        rows(lora2.A_ERI.shape[1], save_u2) if lora2 is not None else rows(0, False),
    )
    out_TD = x_TD.new_empty(x_TD.shape)
    norm_TK = weights_TK.new_empty((T, K) if norms else 0, dtype=torch.float32)
    plans: list[Plan] = []
    parts, H = chunks(T, K, chunk), w.w13_EHD.shape[1]
    least, freed = (LEAST, 0) if save_h else (COLUMNS, H)
    columns = forward_columns(len(parts), K, x_TD.shape[1], least, freed)
    with on_device_of(x_TD):
        for part in parts:
            tiles = RowTiles(build_plan(ids_TK[part.tokens], E))
            x = unit_stride(x_TD[part.tokens])
            call = Call(tiles, x, w, glu, lora13, lora2, batch_invariant, rows=T * K)
            weights = weights_TK[part.tokens].contiguous()
            _forward(call, part, weights, kept, out_TD, norm_TK, columns)
            plans.append(tiles.plan)
    plan = Plan(*map(torch.cat, zip(*plans, strict=True)))
    return ExpertsForward(out_TD, plan, kept, norm_TK)


def _forward(
    call: Call,
    part: Chunk,
    weights_TK: Tensor,
    kept: Kept,
    out_TD: Tensor,
    norm_TK: Tensor,
    columns: int,
) -> None:
    """Run one chunk; write what ``kept``, ``out_TD`` and, unless empty, ``norm_TK`` hold of it.

    Outputs of later tokens are not written yet, so y is there if ``columns`` of it fit.
    """
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
    del u13_NR, u_NR
    if norm_TK.numel() > 0:
        out_TD[part.tokens], norm_TK[part.tokens] = combine_with_norms(
            call.down(a_NF, u2_NR), call.plan, weights_TK
        )
    else:
        spare = out_TD[part.tokens.stop :]
        for some, compute in call.down_by_columns(a_NF, u2_NR, spare, columns):
            # Without a name, rows are freed before the next ones.
            combine(compute(), call.plan, weights_TK, out_TD[part.tokens, some])


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
    T, K = weights_TK.shape
    N, S, parts = T * K, w.w13_EHD.shape[0] + 1, chunks(T, K, chunk)
    by_chunk, wa_NF = needs, None
    # With dh and w a of all rows, a weight's gradient is one sum. Without h, dh has no place.
    at_once = kept.h_NH.numel() > 0 and (needs.w13 or needs.w2)
    if at_once:
        if not overwrite_h:
            kept, overwrite_h = kept._replace(h_NH=kept.h_NH.clone()), True
        by_chunk = needs._replace(w13=False, w2=False)
        wa_NF = x_TD.new_empty(N, w.w2_EDF.shape[2]) if needs.w2 else None
    found = _Found(T, {"x": x_TD.new_empty(x_TD.shape)} if needs.x else {}, {})
    with on_device_of(x_TD):
        x_TD, dout_TD = unit_stride(x_TD), unit_stride(dout_TD.to(x_TD.dtype))
        weights_TK = weights_TK.contiguous()
        for number, part in enumerate(parts):
            tokens, rows = part
            own = Plan(
                plan.row_of_N[rows],
                plan.slot_of_TK[tokens],
                # A copy is aligned like every allocation, so all chunks use one compiled kernel.
                plan.offsets_S[number * S : (number + 1) * S].clone(),
            )
            args = RowTiles(own), x_TD[tokens], w, glu, lora13, lora2, batch_invariant
            call, dout, weights = Call(*args, rows=N), dout_TD[tokens], weights_TK[tokens]
            saved = Kept(*(t[rows] if t.numel() else t for t in kept))
            mid = functools.partial(
                intermediate, call, dout, weights, saved, needs, steps_of(needs),
                overwrite_h or saved.h_NH.numel() == 0,
                wa_NF if wa_NF is None else wa_NF[rows],
            )  # fmt: skip
            call.sums = found.sums
            dx = found.by_token["x"][tokens] if needs.x else None
            found.add(gradients(call, dout, weights, mid(), by_chunk, dx), part)
        if at_once:
            among_all = _among_all(plan, parts, S)
            found.sums |= _weight_gradients(
                call, dout_TD, x_TD, among_all, kept.h_NH, wa_NF, needs, len(parts)
            )
    return found.typed(w, lora13, lora2)


def _among_all(plan: Plan, parts: list[Chunk], S: int) -> Plan:
    """Return the chunks' plans with rows and offsets that count from the first chunk."""
    row_of_N, offsets_S = plan.row_of_N.clone(), plan.offsets_S.clone()
    for number, (_, rows) in enumerate(parts):
        row_of_N[rows] += rows.start
        offsets_S[number * S : (number + 1) * S] += rows.start
    return plan._replace(row_of_N=row_of_N, offsets_S=offsets_S)


def _weight_gradients(
    call: Call,
    dout_TD: Tensor,
    x_TD: Tensor,
    plan: Plan,
    dh_NH: Tensor,
    wa_NF: Tensor | None,
    needs: ExpertsNeeds,
    count: int,
) -> dict[str, Tensor]:
    """Sum over the rows of all ``count`` chunks at once; ``call`` is that of any chunk."""
    found, w = {}, call.w
    if wa_NF is not None:
        found["w2"] = outer_sum(
            dout_TD, wa_NF, plan, w.w2_EDF, call.tile("dw2"), gather_left=True, chunks=count
        )
    if needs.w13:
        found["w13"] = outer_sum(
            dh_NH, x_TD, plan, w.w13_EHD, call.tile("dw13"), gather_right=True, chunks=count
        )
    return found


@dataclass
class _Found:
    """Gradients found so far.

    Attributes:
        tokens: T.
        by_token: gradients and norms with a row for each token.
        sums: other gradients, added in fp32.
    """

    tokens: int
    by_token: dict[str, Tensor]
    sums: dict[str, Tensor]

    def add(self, gradients: ExpertsBackward, part: Chunk) -> None:
        """Place a chunk's results by token and add the others; x is in its place."""
        for name, grad in gradients._asdict().items():
            if grad is None or name == "x":
                continue
            if name in _BY_TOKEN:
                if name not in self.by_token:
                    self.by_token[name] = grad.new_empty(self.tokens, *grad.shape[1:])
                self.by_token[name][part.tokens] = grad
            elif name in self.sums:
                if grad is not self.sums[name]:
                    self.sums[name].add_(grad)
            else:
                self.sums[name] = grad.to(torch.float32)

    def typed(self, w: ExpertWeights, lora13: Lora | None, lora2: Lora | None) -> ExpertsBackward:
        """Return all gradients, each in the dtype of its input."""
        like = {
            "w13": w.w13_EHD, "w2": w.w2_EDF, "b13": w.b13_EH, "b2": w.b2_ED,
            "lora13_A": lora13 and lora13.A_ERI, "lora13_B": lora13 and lora13.B_EOR,
            "lora2_A": lora2 and lora2.A_ERI, "lora2_B": lora2 and lora2.B_EOR,
        }  # fmt: skip
        sums = {name: self.sums.pop(name).to(like[name].dtype) for name in list(self.sums)}
        return ExpertsBackward(**self.by_token, **sums)
