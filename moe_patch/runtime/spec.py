"""FamilySpec: description of one family of MoE models, as data that is checked on creation."""

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
    """One family: its class names, its routing function, and the sources of its parameters.

    Everything else (weight layout, biases, activation) is read from the model's own modules.

    Attributes:
        model_types: transformers model types that use these classes.
        module: the transformers model folder that defines the classes ("qwen3_moe"); None matches
            the class names in any module.
        experts, router, block: class names; None if the family has no such class.
        logits: (router, hidden) -> logits_TE, transformers' own expression, casts included.
        routing: a :class:`moe_patch.ops.routing.RouteRule`, or a function that is called like one
            and has its parameters as keyword-only arguments.
        params: routing parameter -> attribute path on the router, or Const. Paths start at the
            block if that chooses the experts (``chooses_in_block``); so does the path of ``bias``.
        bias: correction bias, flattened to [E]: an attribute path on the router, Arg(i) if the
            block passes it, or None.
        weights_dtype: dtype of the routing weights: the dtype of the "score", of the "logits" or
            of the "hidden" states.
        shared, shared_gate: attribute names on the block of a shared expert and of its gate; the
            bound block forward adds the shared expert.
        shared_by_block: name of a shared expert that transformers' own code adds. It may do more
            than add (a norm, a scale), or add outside the block. For the report only.
        router_attr: attribute name of the router on the block.
        router_input_3d: the block passes [batch, sequence, hidden] to the router, not [T, D].
        router_reads_weight: the router reads the weight of its Linear and never calls the module.
            An adapter on the module would have no effect and no gradient.
        glu: set if the experts class overrides ``_apply_gate``.
        experts_fp32: the experts compute in fp32 whatever the dtype of their weights, unless
            autocast is on.
        layout: set if transformers does not decorate the experts class, which then has no layout
            flags.
        returns: (router, routing) -> the return value of transformers' router; None means
            (logits, weights, ids).
        ids_first: the router returns (logits, ids, weights).
        router_forward, experts_forward, block_forward: functions made with
            :func:`moe_patch.runtime.module_patch.bound`, for a module with another calling
            convention. By default the router gets the common forward, and the experts use
            transformers' registry (with a ``layout``, the common experts forward). A block with a
            shared expert gets the common block forward.
        block_slot: the block's attribute that ``block_forward`` replaces. For a routing function
            without a router class: the block's own method, logits -> (ids, weights).
        block_choice: (block, ties) -> RouteSpec, used by ``block_forward`` if the router only
            computes logits.
        check_call: (block, hidden) -> outputs, used by the self-check if the block takes more than
            hidden states.
        since: the first transformers release whose classes the entry describes. In earlier releases
            the entry is inert, and decorated experts are patched without it.
        until: the first release whose classes the entry no longer describes; inert from there on.
        tier: the level of support of a patched model; "refused" needs a ``reason``.
        reason: why the family is refused.
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
            fail("shared and shared_by_block are both set; accepted: one of them")
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
        """Check field types here, where a mistake is easy to find."""
        for role in ("experts", "router", "block"):
            name = getattr(self, role)
            if name is not None and self.module is None and hasattr(nn, name):
                fail(
                    f"{role}={name!r} is a class of torch.nn, which all models have; accepted: a "
                    "class of the family's own (if the router is a plain Linear: tier='experts', "
                    "or a block_forward)"
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
                fail(f"{name} is {release!r}; accepted: a release such as '5.21'")

    @property
    def checked_as_block(self) -> bool:
        """True if the self-check runs the block as a whole, besides its router and experts.

        That is so whenever more than the common router forward is bound. Otherwise a block forward
        that was replaced on the class or in a subclass would be overridden silently.
        """
        more = (self.router_forward, self.experts_forward, self.block_forward, self.check_call)
        given = any(function is not None for function in more)
        return self.shared is not None or given or self.chooses_in_block

    @property
    def chooses_in_block(self) -> bool:
        """True if a method of the block chooses the experts and the router only computes logits."""
        own_slot = self.block_slot != "forward" and self.block_forward is None
        return own_slot and self.routing is not None and self.router is None

    @property
    def decided_by(self) -> str:
        """Name of the function that chooses the experts; "transformers" if it is not ours."""
        decides = self.routing or self.block_forward or self.router_forward
        return "transformers" if decides is None else decides.__name__

    @property
    def runs_experts_alone(self) -> bool:
        """True if the experts can run under transformers' own router and block."""
        return self.experts is not None and self.experts_forward is None

    def experts_only(self) -> FamilySpec:
        """Return the entry for the experts only; transformers' router and block stay."""
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
            router: the live router; its parameters and attributes are read on each call.
            hidden: hidden states, [..., D].
            args: further positional arguments of the router.
            ties, impl: tie rule and implementation of ``route``.

        Raises:
            EntryMismatchError: the router lacks an attribute that this entry names.
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
        """Run the family's routing on given logits; other arguments as for :meth:`route`."""
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
        """Return the RouteSpec of :meth:`choose`, without dtypes; None if routing is not a rule."""
        if not isinstance(self.routing, RouteRule):
            return None
        return self.routing.spec(experts, ties=ties, **self.params_of(router))

    def params_of(self, router: nn.Module) -> dict[str, Any]:
        """Read the values of the routing parameters from a router.

        Raises:
            EntryMismatchError: the router lacks an attribute that this entry names.
        """
        return {name: read(router, source) for name, source in self.params.items()}

    def values_of(self, router: nn.Module) -> tuple:
        """Return all values that :meth:`choose` reads from a router, except tensors."""
        return *self.params_of(router).values(), self._takes_argument(router)

    def bias_of(self, router: nn.Module, args: tuple) -> Tensor | None:
        """Return the correction bias [E] of a router, from its further arguments or attributes."""
        if isinstance(self.bias, Arg):
            return args[self.bias.index - 1] if self._takes_argument(router) else None
        return None if self.bias is None else read(router, self.bias).reshape(-1)

    def _takes_argument(self, router: nn.Module) -> bool:
        when = self.bias.when if isinstance(self.bias, Arg) else None
        return when is None or bool(read(router, when))
