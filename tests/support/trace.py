"""Functions that really ran: their code objects prove a tier, independently of the report.

ran = executed(lambda: model(**batch).loss.backward())
assert_tier("full", model, ran)
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import nn

from moe_patch.families import families, lookup
from moe_patch.ops.experts import composed, op
from moe_patch.ops.routing import RouteRule
from moe_patch.patching import by_name
from moe_patch.runtime import forward


def executed(function: Callable[[], Any]) -> set[CodeType]:
    """Return code objects of every Python function that ``function()`` runs in this thread.

    On CPU autograd's backward runs in the calling thread, so a backward inside ``function`` counts.
    """
    seen: set[CodeType] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return seen


def transformers_routers(model: nn.Module) -> set[CodeType]:
    """Return the code that chooses experts in transformers: router forwards or block methods."""
    methods = {
        _code(getattr(type(m), lookup(m)[0].block_slot)) for m in _of_role(model, "block")
        if lookup(m)[0].chooses_in_block
    }  # fmt: skip
    return methods | {_code(type(m).forward) for m in _of_role(model, "router")}


def transformers_experts(model: nn.Module) -> set[CodeType]:
    """Return the eager forwards of the model's experts classes, and all other implementations."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    registered = [*ALL_EXPERTS_FUNCTIONS.values(), *ALL_FP8_EXPERTS_FUNCTIONS.values()]
    entries = (by_name.experts_by_name, forward.experts_forward, forward.refuse_fp8)
    our_entries = {entry.__code__ for entry in entries}
    functions = {_code(f) for f in registered} - our_entries
    # A family without an experts module computes its experts in the block.
    whole = [m for m in _of_role(model, "block") if lookup(m)[0].experts is None]
    return functions | {_code(type(m).forward) for m in [*_of_role(model, "experts"), *whole]}


def assert_tier(tier: str, model: nn.Module, ran: set[CodeType]) -> None:
    """Expect ``ran`` to prove the tier: "full", "experts", or "refused" (transformers alone).

    Args:
        tier: of every block of the model.
        model: whose classes count.
        ran: from :func:`executed`.
    """
    routers, experts = transformers_routers(model), transformers_experts(model)
    if tier == "refused":
        assert ran & experts, "transformers' experts did not run"
        assert ran >= routers, "transformers' routing did not run"
        assert not ran & our_experts(), "our experts ran"
        return
    assert ran & our_experts(), "our experts did not run"
    assert not ran & experts, f"transformers' experts ran: {_names(ran & experts)}"
    if tier == "full":
        assert ran >= our_routing(model), "our routing did not run"
        assert not ran & routers, f"transformers' router ran: {_names(ran & routers)}"


def our_experts() -> set[CodeType]:
    """Return the code that computes experts here: operator, its steps, and family forwards."""
    common = (op.experts_mlp, composed.experts_composed, composed.grouped_linear)
    brought = [(spec.experts_forward, spec.block_forward) for spec in families()]
    return {_code(f) for f in (*common, *sum(brought, ())) if f is not None}


def our_routing(model: nn.Module) -> set[CodeType]:
    """Return the routing functions, or code of all rules, that routers or blocks must have run."""
    holders = [m for m in _of_role(model, "block") if lookup(m)[0].chooses_in_block]
    found = [lookup(m)[0].routing for m in [*_of_role(model, "router"), *holders]]
    rules = [RouteRule.spec if isinstance(r, RouteRule) else r for r in found if r is not None]
    return {_code(rule) for rule in rules}


def _of_role(model: nn.Module, role: str) -> list[nn.Module]:
    return [m for m in model.modules() if (found := lookup(m)) is not None and found[1] == role]


def _code(function: Any) -> CodeType:
    return inspect.unwrap(function).__code__


def _names(codes: set[CodeType]) -> list[str]:
    return sorted(code.co_qualname for code in codes)
