"""FamilySpec: what one family of MoE models needs told, as data that checks itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from moe_patch.ops.routing import RouteImpl, RouteRule
from moe_patch.ops.routing import route as torch_route
from moe_patch.runtime.entry_values import Arg, Const, GluRule, Layout, Source, read
from moe_patch.types import RouteSpec, Routing

__all__ = ["TIERS", "Arg", "Const", "FamilySpec", "GluRule", "Layout", "Source", "read"]

TIERS = ("full", "experts", "refused")
_SET_AT_CALL = ("weights_dtype", "ties", "impl")


@dataclass(frozen=True, kw_only=True)
class FamilySpec:
    """One family: class names, routing function and where its parameters live.

    Everything else (weight layout, biases, activation) is read from the model's own modules.

    Attributes:
        model_types: transformers model types served by these classes.
        module: the transformers model folder that defines the classes ("qwen3_moe"); None matches
            the class names in any module.
        experts, router, block: class names; None where the family has none.
        logits: (router, hidden) -> logits_TE, transformers' own expression, casts included.
        routing: a :class:`moe_patch.ops.routing.RouteRule`, or a function that is called like one
            and has its parameters as keyword-only arguments.
        params: routing parameter -> attribute path on the router, or Const. On the block where
            that chooses the experts (``chooses_in_block``); so is the path of ``bias``.
        bias: correction bias, flattened to [E]: attribute path on the router, Arg(i) when the block
            passes it, None.
        weights_dtype: dtype of the routing weights: that of the "score", the "logits" or the
            "hidden" states.
        shared, shared_gate: attribute names on the block of a shared expert and of its gate; the
            bound block forward adds them.
        shared_by_block: name of a shared expert that transformers' own code adds, because it does
            more than add (a norm, a scale), or does so outside the block. For the report only.
        router_attr: the router's attribute name on the block.
        router_input_3d: the block hands the router [batch, sequence, hidden] instead of [T, D].
        router_reads_weight: the router reads the weight of its Linear and never calls the module,
            so that an adapter on the module would have no effect and no gradient.
        glu: set when the experts class overrides ``_apply_gate``.
        experts_fp32: the experts compute in fp32 whatever their weights' dtype, autocast apart.
        layout: set when the experts class is not decorated by transformers and so does not say how
            its weights lie.
        returns: (router, routing) -> what transformers' router returns; None means
            (logits, weights, ids).
        ids_first: the router returns (logits, ids, weights).
        router_forward, experts_forward, block_forward: functions made with
            :func:`moe_patch.runtime.record.bound`, for a family whose module is called unlike the
            rule. Without them: the common router forward, transformers' experts registry (the
            common experts forward where a ``layout`` is given), and the common block forward where
            there is a shared expert.
        block_slot: the block's attribute that ``block_forward`` replaces. Named for a routing
            function without a router class: the block's own method, logits -> (ids, weights).
        block_choice: (block, ties) -> RouteSpec, how ``block_forward`` chooses where the router
            only makes logits.
        check_call: (block, hidden) -> outputs, how the self-check runs a block that does not take
            hidden states alone.
        since: the first transformers release whose classes the entry describes; in an earlier one
            the entry is inert, and decorated experts are served without it.
        until: the first release whose classes the entry no longer describes; inert from there on.
        tier: what a patched model of the family reaches; "refused" needs a ``reason``.
    """

    model_types: tuple[str, ...]
    module: str | None = None
    experts: str | None = None
    router: str | None = None
    block: str | None = None
    logits: Callable[[Any, Tensor], Tensor] | None = None
    routing: Callable[..., Routing] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    bias: str | Arg | None = None
    weights_dtype: str = "score"
    shared: str | None = None
    shared_gate: str | None = None
    shared_by_block: str | None = None
    router_attr: str = "gate"
    router_input_3d: bool = False
    router_reads_weight: bool = False
    glu: GluRule | None = None
    experts_fp32: bool = False
    layout: Layout | None = None
    returns: Callable[[nn.Module, Routing], Any] | None = None
    ids_first: bool = False
    router_forward: Callable[..., Any] | None = None
    experts_forward: Callable[..., Any] | None = None
    block_forward: Callable[..., Any] | None = None
    block_slot: str = "forward"
    block_choice: Callable[[Any, str], RouteSpec] | None = None
    check_call: Callable[[Any, Tensor], Any] | None = None
    since: str = ""
    until: str = ""
    tier: str = "full"
    reason: str = ""

    def __post_init__(self) -> None:
        def fail(what: str) -> None:
            raise ValueError(f"FamilySpec for {self.model_types}: {what}")

        self._check_types(fail)
        if self.tier not in TIERS:
            fail(f"tier is {self.tier!r}; accepted: {', '.join(TIERS)}")
        if self.weights_dtype not in ("score", "logits", "hidden"):
            fail(f"weights_dtype is {self.weights_dtype!r}; accepted: score, logits, hidden")
        if self.tier == "refused" and not self.reason:
            fail("a refused family needs a reason")
        self._check_shared(fail)
        if self.routing is not None:
            self._check_routing(self.routing, fail)
        elif self.params or (
            self.tier == "full" and self.router_forward is None and self.block_forward is None
        ):
            fail("no routing function; give routing=, or tier='experts' without params")

    def _check_shared(self, fail: Callable[[str], None]) -> None:
        if self.shared_gate and not self.shared:
            fail("shared_gate without shared")
        if self.shared and self.shared_by_block:
            fail("a shared expert is added either by the bound block forward or by transformers'")
        if self.shared and not self.block:
            fail("a shared expert needs the block's class name")

    def _check_routing(self, routing: Callable[..., Routing], fail: Callable[[str], None]) -> None:
        by_router = self.router is not None and self.logits is not None
        if self.block_forward is None and not by_router and not self.chooses_in_block:
            fail("a routing function needs the router's class name and its logits expression")
        accepted = inspect.signature(routing).parameters
        names = [
            n for n, p in accepted.items() if p.kind is p.KEYWORD_ONLY and n not in _SET_AT_CALL
        ]
        if unknown := sorted(set(self.params) - set(names)):
            fail(f"{routing.__name__} has no parameter {unknown}; accepted: {', '.join(names)}")
        required = {n for n in names if accepted[n].default is inspect.Parameter.empty}
        if missing := sorted(required - set(self.params)):
            fail(f"{routing.__name__} needs {missing}")

    def _check_types(self, fail: Callable[[str], None]) -> None:
        """What a slip of the pen leaves here would be an error of some other place later."""
        for role in ("experts", "router", "block"):
            name = getattr(self, role)
            if name is not None and self.module is None and hasattr(nn, name):
                fail(
                    f"{role}={name!r} is a class of torch.nn, which all models have; accepted: a "
                    "class of the family's own (with a plain Linear as router: tier='experts', or "
                    "a block_forward)"
                )
        if not isinstance(self.params, Mapping):
            fail(f"params is {self.params!r}; accepted: a mapping")
        for name, source in self.params.items():
            if not isinstance(source, (str, Const)):
                fail(f"params[{name!r}] is {source!r}; accepted: an attribute path or Const(value)")
        if not (self.bias is None or isinstance(self.bias, (str, Arg))):
            fail(f"bias is {self.bias!r}; accepted: an attribute path, Arg(index) or None")
        if self.routing is not None and not callable(self.routing):
            fail(f"routing is {self.routing!r}; accepted: a rule of moe_patch.ops.routing")
        self._check_releases(fail)

    def _check_releases(self, fail: Callable[[str], None]) -> None:
        for name in ("since", "until"):
            release = getattr(self, name)
            if release and not re.fullmatch(r"\d+(\.\d+)+", release):
                fail(f"{name} is {release!r}; accepted: a release, as '5.21'")

    @property
    def checked_as_block(self) -> bool:
        """Whether the self-check runs a block as a whole, beside its router and experts.

        So wherever more is bound than the common router forward: a block forward that somebody
        replaced on the class, or in a subclass, must not be overridden in silence.
        """
        more = (self.router_forward, self.experts_forward, self.block_forward, self.check_call)
        given = any(function is not None for function in more)
        return self.shared is not None or given or self.chooses_in_block

    @property
    def chooses_in_block(self) -> bool:
        """Return whether a method of the block chooses experts; its router only makes logits."""
        own_slot = self.block_slot != "forward" and self.block_forward is None
        return own_slot and self.routing is not None and self.router is None

    @property
    def decided_by(self) -> str:
        """The name of the function that chooses experts; "transformers" where none of ours does."""
        decides = self.routing or self.block_forward or self.router_forward
        return "transformers" if decides is None else decides.__name__

    @property
    def serves_experts_alone(self) -> bool:
        """Whether the experts run below transformers' own router and block, as it calls them."""
        return self.experts is not None and self.experts_forward is None

    def experts_only(self) -> FamilySpec:
        """The part of the entry that serves the experts; transformers routes and runs the block."""
        return FamilySpec(
            model_types=self.model_types,
            module=self.module,
            experts=self.experts,
            shared_by_block=self.shared or self.shared_by_block,
            glu=self.glu,
            experts_fp32=self.experts_fp32,
            layout=self.layout,
            tier="experts",
        )

    def route(
        self,
        router: nn.Module,
        hidden: Tensor,
        args: tuple,
        *,
        ties: str = "lower",
        impl: RouteImpl = torch_route,
    ) -> Routing:
        """Run the family's routing on a router module: its logits, then the routing function.

        Args:
            router: the live router; parameters and attributes are read now.
            hidden: hidden states, [..., D].
            args: the router's further positional arguments.
            ties, impl: tie rule and implementation of ``route``.

        Raises:
            EntryMismatchError: the router lacks an attribute this entry names.
        """
        assert self.logits is not None
        return self.choose(router, self.logits(router, hidden), hidden, args, ties=ties, impl=impl)

    def choose(
        self,
        router: nn.Module,
        logits_TE: Tensor,
        hidden: Tensor,
        args: tuple = (),
        *,
        ties: str = "lower",
        impl: RouteImpl = torch_route,
    ) -> Routing:
        """The family's routing on given logits; arguments as :meth:`route`."""
        assert self.routing is not None
        dtype = None
        if self.weights_dtype != "score":
            dtype = (logits_TE if self.weights_dtype == "logits" else hidden).dtype
        return self.routing(
            logits_TE,
            self.bias_of(router, args),
            weights_dtype=dtype,
            ties=ties,
            impl=impl,
            **self.params_of(router),
        )

    def route_spec(self, router: nn.Module, experts: int, ties: str) -> RouteSpec | None:
        """The choices of :meth:`choose` but for dtypes; None where a function keeps its own."""
        if not isinstance(self.routing, RouteRule):
            return None
        return self.routing.spec(experts, ties=ties, **self.params_of(router))

    def params_of(self, router: nn.Module) -> dict[str, Any]:
        """The routing parameters' values, read from a router now.

        Raises:
            EntryMismatchError: the router lacks an attribute this entry names.
        """
        return {name: read(router, source) for name, source in self.params.items()}

    def values_of(self, router: nn.Module) -> tuple:
        """All that :meth:`choose` reads from a router, tensors apart."""
        return *self.params_of(router).values(), self._takes_argument(router)

    def bias_of(self, router: nn.Module, args: tuple) -> Tensor | None:
        """The correction bias [E] of a router that is called with further arguments ``args``."""
        if isinstance(self.bias, Arg):
            return args[self.bias.index - 1] if self._takes_argument(router) else None
        return None if self.bias is None else read(router, self.bias).reshape(-1)

    def _takes_argument(self, router: nn.Module) -> bool:
        when = self.bias.when if isinstance(self.bias, Arg) else None
        return when is None or bool(read(router, when))
