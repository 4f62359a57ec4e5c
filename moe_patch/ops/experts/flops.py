"""FLOPs of the experts operators, for ``torch.utils.flop_counter.FlopCounterMode``.

Only matrix products count, 2 m n k each, as for torch's own operators. Activations, norms, routing
and the sum over a token's experts count as zero. With N = T * K rows, a gated MLP has

    forward    6 N D F              2 N R (I + O) more for each pair of low-rank factors
    backward  12 N D F at most      4 N R (I + O) more at most

N comes from the shapes, so empty slots are counted too. Work that ``recompute`` or gradient
checkpointing runs twice is counted twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from moe_patch.formats.packed import packed_weights
from moe_patch.ops.experts.schema import read_options
from moe_patch.types import ExpertsNeeds, ExpertWeights


class _Products(NamedTuple):
    """FLOPs of one product over all rows, for each matrix; 0 for absent factors."""

    w13: int
    w2: int
    a13: int
    b13: int
    a2: int
    b2: int


def _products(rows: int, x: Any, operands: Any, scales: Any) -> _Products:
    w13, w2, _, _, a13, lb13, a2, lb2, *_, encoded = operands
    storage = read_options(encoded).storage
    w = packed_weights(ExpertWeights(w13, w2), scales, storage, x.dtype)
    return _Products(*(_product(rows, m) for m in (w.w13_EHD, w.w2_EDF, a13, lb13, a2, lb2)))


def _product(rows: int, matrices: Any) -> int:
    """Return the FLOPs of all rows times their expert's matrix, [E, out, in]; 0 for None."""
    return 0 if matrices is None else 2 * rows * matrices.shape[1] * matrices.shape[2]


def experts_flops(x: Any, ids: Any, weights: Any, *args: Any, out_val: Any = None) -> int:
    """Count both overloads of ``experts``: T * K rows times both projections and their factors."""
    return sum(_products(ids.numel(), x, args[:13], args[-1]))


def experts_bwd_flops(dout: Any, x: Any, weights: Any, *args: Any, out_val: Any = None) -> int:
    """Count both overloads of ``experts_bwd``: each product that a gradient in ``needs`` requires.

    Recomputing what forward did not save is counted too. The Triton kernels run exactly these
    products. The torch backend also computes W2ᵀ dout, B2ᵀ dout and B13ᵀ dh when no gradient needs
    them.
    """
    *operands, _, _, _, h, u13, u2, wanted, scales = args
    needs = ExpertsNeeds(*wanted)
    f = _products(weights.numel(), x, operands, scales)
    dh = any((needs.x, needs.w13, needs.b13, needs.lora13_A, needs.lora13_B, needs.norms))
    through_w2 = dh or needs.weights
    # An empty tensor means that forward did not save it.
    again_u2 = _reads_u(operands[6], needs.lora2_B, needs) and not u2.numel()
    reads_h = any((through_w2, needs.w2, needs.lora2_A, again_u2))
    again_h = reads_h and not h.numel()
    reads_u13 = again_h or _reads_u(operands[4], needs.lora13_B, needs)
    runs = (
        # Recomputed: h with its factors, and the inputs of both factors B.
        (f.w13 + f.b13, again_h),
        (f.a13, reads_u13 and not u13.numel()),
        (f.a2, again_u2),
        # W2ᵀ dout, with its low-rank term.
        (f.w2 + f.a2, through_w2),
        (f.b2, through_w2 or needs.lora2_A),
        # W13ᵀ dh, with its low-rank term.
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
    """Return whether backward reads the input of the low-rank factor B."""
    return A_ERI is not None and (trained or needs.norms)


def linear_flops(x: Any, w: Any, b: Any, a: Any, lb: Any, *_: Any, out_val: Any = None) -> int:
    """Count a grouped product of rows [N, I]: 2 N I O, and 2 N R (I + O) with LoRA."""
    return sum(_product(x.shape[0], matrices) for matrices in (w, a, lb))


def linear_bwd_flops(
    dy: Any, x: Any, w: Any, b: Any, a: Any, lb: Any, *args: Any, out_val: Any = None
) -> int:
    """Count the backward of a grouped product; it always computes the gradient of x."""
    of_w, of_a, of_lb = (_product(x.shape[0], matrices) for matrices in (w, a, lb))
    _, w_needed, _, a_needed, lb_needed = args[-1]
    # The gradient of a factor B first recomputes the input of B.
    runs = ((of_w, w_needed), (of_a, a_needed), (of_a + of_lb, lb_needed))
    return of_w + of_a + of_lb + sum(flops for flops, needed in runs if needed)


def register_flop_formulas() -> None:
    """Register the formulas above with FlopCounterMode; counters created earlier do not see them.

    Idempotent: a formula that is already registered stays. The import is local because torch's
    counter imports Triton.
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
