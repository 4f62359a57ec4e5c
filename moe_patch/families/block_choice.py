"""Families before transformers 5.13, where the router made logits and the block chose experts.

The two entries of a family differ only in where things are. Before 5.13 routing attributes belong
to the block and the correction bias to the router. The block's ``route_tokens_to_experts`` returns
(ids, weights).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moe_patch.runtime.spec import FamilySpec

RELEASE = "5.13"
METHOD = "route_tokens_to_experts"


def in_both_forms(
    spec: FamilySpec, experts: str | None = None, **places: str
) -> tuple[FamilySpec, FamilySpec]:
    """Return a family's entry from 5.13 on, and its entry for the releases before.

    Args:
        spec: the family as it is from 5.13 on.
        experts: class name of the experts before 5.13.
        places: routing parameter -> attribute of the block, if its name differs.
    """
    before: dict[str, Any] = {
        "experts": experts or spec.experts,
        "router": None,
        "logits": None,
        "params": {**spec.params, **places},
        "bias": f"{spec.router_attr}.{spec.bias}" if spec.bias else None,
        "shared": None,
        "shared_gate": None,
        "shared_by_block": spec.shared or spec.shared_by_block,
        "router_input_3d": False,
        "block_slot": METHOD,
    }
    return replace(spec, since=RELEASE), replace(spec, **before, until=RELEASE)
