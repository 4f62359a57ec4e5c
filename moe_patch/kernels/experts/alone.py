"""The experts in chunks of tokens where nothing but the output is used.

A chunk computes full row tiles of the plan of all rows. Rows of later tokens fill its last tiles.
Their results are carried on, as kernels/plan/full_tiles.py describes. Half of the columns of y
exist at a time. Activations are where outputs of later tokens will be, while they fit there.
"""

from __future__ import annotations

from torch import Tensor

from moe_patch.kernels.common.chunks import LEAST, half_columns, tapered
from moe_patch.kernels.common.device import on_device_of
from moe_patch.kernels.experts.call import Call
from moe_patch.kernels.experts.carried import carry, combine_carried
from moe_patch.kernels.experts.experts import unit_stride
from moe_patch.kernels.plan.full_tiles import FullTiles
from moe_patch.kernels.plan.plan import build_plan
from moe_patch.kernels.plan.row_tiles import RowTiles
from moe_patch.types import ExpertsForward, ExpertWeights, Glu, Kept, Lora, Plan


def forward_alone(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w: ExpertWeights,
    glu: Glu,
    lora13: Lora | None,
    lora2: Lora | None,
    *,
    chunk: int,
    batch_invariant: bool,
) -> ExpertsForward:
    """Compute the weighted sum of each token's experts.

    Args:
        x_TD, ids_TK, weights_TK, w, glu, lora13, lora2, batch_invariant: as in
            :func:`moe_patch.kernels.experts.experts.experts_forward`, with at least one row and
            weights that are not packed.
        chunk: the most tokens of a chunk.

    Returns:
        ExpertsForward, with the offsets of all rows and nothing kept.
    """
    (T, K), (E, D, F) = ids_TK.shape, w.w2_EDF.shape
    out_TD, nothing = x_TD.new_empty(x_TD.shape), x_TD.new_empty(0)
    columns = half_columns(D)
    with on_device_of(x_TD):
        x_TD, weights_TK, whole = unit_stride(x_TD), weights_TK.contiguous(), build_plan(ids_TK, E)

        def call_of(plan: Plan) -> Call:
            # Its rows are those of all tokens.
            args = x_TD, w, glu, lora13, lora2, batch_invariant
            return Call(RowTiles(plan), *args, rows=T * K)

        block_m = call_of(whole).tile("up").m
        cut = tapered(T, K, chunk, D, F, columns, E * (block_m - 1))
        full = FullTiles(whole, ids_TK, cut, block_m)
        whole = Plan(full.row[: T * K], full.slot_TK, whole.offsets_S)
        carried_MD = x_TD.new_empty(E * block_m if len(cut.chunks) > 1 else 1, D)
        places = [_place(full, number, D, F, columns) for number in range(len(cut.chunks))]
        own = x_TD.new_empty(max(y + a for y, a in places))
        for number, part in enumerate(cut.chunks):
            call = call_of(full.plan(number))
            y, a = places[number]
            # Outputs of later tokens are not written yet.
            later = own[y:] if a > 0 else out_TD[part.tokens.stop :].view(-1)
            a_NF = later[: call.tiles.count * F].view(-1, F)
            into = nothing, a_NF
            a_NF = call.up(call.inputs_of_B13(), save_h=False, save_a=True, into=into)[1]
            weights, out = weights_TK[part.tokens], out_TD[part.tokens]
            _sum_chunk(call, full, number, a_NF, own[:y], weights, carried_MD, out)
    return ExpertsForward(out_TD, whole, Kept(nothing, nothing, nothing), nothing)


def _place(full: FullTiles, number: int, D: int, F: int, columns: int) -> tuple[int, int]:
    """Return the values of y and a of a chunk that need memory of their own."""
    slots, chunks = full.most_slots(number), full.cut.chunks
    later = (chunks[-1].tokens.stop - chunks[number].tokens.stop) * D
    return slots * columns, slots * F if slots * F > later else 0


def _sum_chunk(
    call: Call,
    full: FullTiles,
    number: int,
    a_NF: Tensor,
    own: Tensor,
    weights_TK: Tensor,
    carried_MD: Tensor,
    out_TD: Tensor,
) -> None:
    """Write the weighted sums of a chunk from its a, some columns at a time; y is in ``own``."""
    for some, compute in call.down_by_columns(a_NF, call.inputs_of_B2(a_NF), own, LEAST):
        rows, carried = compute(), carried_MD[:, some]
        combine_carried(rows, carried, call.plan, weights_TK, out_TD[:, some])
        if number + 1 < len(full.cut.chunks):
            carry(rows, full, number, carried)
