"""Intermediate results that a backward of the experts computes for the requested gradients."""

from __future__ import annotations

import functools
from typing import NamedTuple

from moe_patch.types import ExpertsNeeds


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
