"""Transformer Engine's fused router (CUDA), optional: from the environment or the peers folder.

It returns a dense [T, E] of weights, zero for experts not chosen, in the logits' dtype, and is
timed in that form. Only the check converts this to the op's [T, K] and to the op's rule for equal
scores, because Transformer Engine promises no rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench_lib.rotating import RotatingInputs
from bench_lib.spec import Program
from moe_patch.ops.routing import route
from moe_patch.types import RouteSpec


def build(inputs: RotatingInputs, spec: RouteSpec, bias_E: Tensor | None) -> Program:
    """Build the router on the op's own logits; convert ``dout`` and results between layouts."""
    from transformer_engine.pytorch.router import fused_topk_with_score_function

    groups = (spec.groups, spec.top_groups) if spec.groups else (None, None)
    scale = None if spec.scale == 1.0 else spec.scale
    # Softmax after the choice equals softmax before it with renormalised weights.
    options = (spec.top_k, False, *groups, scale, spec.score, bias_E)

    def run(leaf: dict[str, Tensor]) -> Tensor:
        return fused_topk_with_score_function(leaf["logits"], *options)[0]

    logits_TE = inputs.copies[0]["logits"].detach()
    columns = Columns(logits_TE, bias_E, fused_topk_with_score_function(logits_TE, *options)[1])
    ids_TK = route(logits_TE.double(), spec, None if bias_E is None else bias_E.double()).ids_TK
    dout_TE = torch.zeros_like(logits_TE)
    dout_TE.scatter_(1, ids_TK, inputs.dout_TD.to(dout_TE.dtype))
    program = inputs.program(run)
    return Program(
        program.forward,
        program.leaves,
        {"logits": columns.to_ours},
        dout=columns.to_theirs(dout_TE),
        result=lambda weights_TE: columns.to_ours(weights_TE).gather(1, ids_TK),
    )


class Columns:
    """Map between the experts that two routers take among equal scores of a row.

    This library takes the lowest ids of equal scores; another router may take any.
    """

    def __init__(self, logits_TE: Tensor, bias_E: Tensor | None, chosen_TE: Tensor) -> None:
        score_TE = logits_TE if bias_E is None else logits_TE.float().sigmoid() + bias_E
        self.ours_TE = _descending(score_TE)
        chosen_first_TE = _descending(chosen_TE.to(torch.int8))
        order_TE = _descending(score_TE.gather(1, chosen_first_TE))
        self.theirs_TE = chosen_first_TE.gather(1, order_TE)

    def to_ours(self, values_TE: Tensor) -> Tensor:
        """Move values from the other router's experts to ours."""
        moved_TE = values_TE.gather(1, self.theirs_TE)
        return torch.empty_like(values_TE).scatter_(1, self.ours_TE, moved_TE)

    def to_theirs(self, values_TE: Tensor) -> Tensor:
        """Move values from our experts to the other router's."""
        moved_TE = values_TE.gather(1, self.ours_TE)
        return torch.empty_like(values_TE).scatter_(1, self.theirs_TE, moved_TE)


def _descending(values_TE: Tensor) -> Tensor:
    return values_TE.sort(dim=1, descending=True, stable=True).indices
