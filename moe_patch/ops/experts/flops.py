"""FLOPs of the experts operators, for ``torch.utils.flop_counter.FlopCounterMode``.

Matrix products alone, 2 m n k each, as torch counts its own: activations, norms, sums over a
token's experts and routing are no products and count nothing. With N = T * K rows, a gated MLP has

    forward    6 N D F              2 N R (I + O) more for each pair of low-rank factors
    backward  12 N D F at most      4 N R (I + O) more at most

N is read from the shapes, so an empty slot counts like any other. What ``recompute`` or gradient
checkpointing runs twice counts twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from moe_patch.formats.packed import packed_weights
from moe_patch.ops.experts.schema import read_options
from moe_patch.types import ExpertsNeeds, ExpertWeights


class _Products(NamedTuple):
    """FLOPs of one product over all rows, by the matrix in it; 0 for factors that are absent."""

    w13: int
    w2: int
    a13: int
    b13: int
    a2: int
    b2: int


def _products(rows: int, x: Any, operands: Any, scales: Any) -> _Products:
    w13, w2, _, _, a13, lb13, a2, lb2, *_, spelled = operands
    storage = read_options(spelled).storage
    w = packed_weights(ExpertWeights(w13, w2), scales, storage, x.dtype)
    return _Products(*(_product(rows, m) for m in (w.w13_EHD, w.w2_EDF, a13, lb13, a2, lb2)))


def _product(rows: int, matrices: Any) -> int:
    """FLOPs of each row times the matrix of its expert, [E, out, in]; 0 for None."""
    return 0 if matrices is None else 2 * rows * matrices.shape[1] * matrices.shape[2]


def experts_flops(x: Any, ids: Any, weights: Any, *args: Any, out_val: Any = None) -> int:
    """Count ``experts``, both overloads: T * K rows through both projections and their factors."""
    return sum(_products(ids.numel(), x, args[:13], args[-1]))


def experts_bwd_flops(dout: Any, x: Any, weights: Any, *args: Any, out_val: Any = None) -> int:
    """Count ``experts_bwd``, both overloads: what the gradients in ``needs`` depend on, once each.

    What forward did not keep is computed again and counted. The Triton kernels run just these
    products; the torch backend forms W2ᵀ dout, B2ᵀ dout and B13ᵀ dh also where no gradient depends
    on them.
    """
    *operands, _, _, _, h, u13, u2, wanted, scales = args
    needs = ExpertsNeeds(*wanted)
    f = _products(weights.numel(), x, operands, scales)
    dh = any((needs.x, needs.w13, needs.b13, needs.lora13_A, needs.lora13_B, needs.norms))
    through_w2 = dh or needs.weights
    # What forward kept is not empty.
    again_u2 = _reads_u(operands[6], needs.lora2_B, needs) and not u2.numel()
    reads_h = any((through_w2, needs.w2, needs.lora2_A, again_u2))
    again_h = reads_h and not h.numel()
    reads_u13 = again_h or _reads_u(operands[4], needs.lora13_B, needs)
    runs = (
        # Again: h with its factors, and the inputs of both factors B.
        (f.w13 + f.b13, again_h),
        (f.a13, reads_u13 and not u13.numel()),
        (f.a2, again_u2),
        # W2ᵀ dout, through the factors too.
        (f.w2 + f.a2, through_w2),
        (f.b2, through_w2 or needs.lora2_A),
        # W13ᵀ dh, through the factors too.
        (f.w13 + f.a13, needs.x),
        (f.b13, any((needs.x, needs.lora13_A, needs.norms))),
        # Outer sums, one for each gradient.
        (f.w13, needs.w13),
        (f.w2, needs.w2),
        (f.a13, needs.lora13_A),
        (f.b13, needs.lora13_B),
        (f.a2, needs.lora2_A),
        (f.b2, needs.lora2_B),
    )
    return sum(flops for flops, run in runs if run)


def _reads_u(A_ERI: Any, trained: bool, needs: ExpertsNeeds) -> bool:
    """Return whether backward reads what the factor B is multiplied with."""
    return A_ERI is not None and (trained or needs.norms)


def linear_flops(x: Any, w: Any, b: Any, a: Any, lb: Any, *_: Any, out_val: Any = None) -> int:
    """Count a composed block's grouped product of rows [N, I]: 2 N I O, and 2 N R (I + O)."""
    return sum(_product(x.shape[0], matrices) for matrices in (w, a, lb))


def linear_bwd_flops(
    dy: Any, x: Any, w: Any, b: Any, a: Any, lb: Any, *args: Any, out_val: Any = None
) -> int:
    """Count a grouped product's backward; the gradient of x is formed whatever ``needs`` says."""
    of_w, of_a, of_lb = (_product(x.shape[0], matrices) for matrices in (w, a, lb))
    _, w_needed, _, a_needed, lb_needed = args[-1]
    # The gradient of a factor B first computes that factor's input again.
    runs = ((of_w, w_needed), (of_a, a_needed), (of_a + of_lb, lb_needed))
    return of_w + of_a + of_lb + sum(flops for flops, needed in runs if needed)


def register_flop_formulas() -> None:
    """Give FlopCounterMode the formulas above (idempotent); counters made before do not have them.

    Imported here, since torch's counter imports Triton. A formula that is there already stays.
    """
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    ours, steps = torch.ops.moe_patch, torch.ops.moe_patch_steps
    for packet, formula in (
        (ours.experts, experts_flops),
        (ours.experts_bwd, experts_bwd_flops),
        (steps.linear, linear_flops),
        (steps.linear_bwd, linear_bwd_flops),
    ):
        if packet not in flop_registry:
            register_flop_formula(packet, get_raw=True)(formula)
