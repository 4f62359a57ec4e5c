"""Recording of one MoE layer, called by the bound forwards.

While a layer is recorded or replayed, the patches of its router and experts have a :class:`Taps`
(``ModulePatch.taps``). Otherwise ``taps`` is None, and a forward only checks for that.

The router's forward calls ``routed``, which keeps the logits and, on request, the router's input.
The experts' forward calls ``begin``, which keeps ids, weights and counts and returns a
:class:`Signals`. The experts operator fills that with activation norms, and in backward with the
gradient norms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moe_patch.ops.experts.op import Signals
from moe_patch.ops.routing import RouteImpl
from moe_patch.runtime.spec import Arg, FamilySpec
from moe_patch.types import Routing

SIGNALS = ("act_norm", "grad_norm_output", "grad_norm_params", "grad_norm_lora")


@functools.cache
def eagerly() -> Callable[..., Any]:
    """Return a function that calls ``function(*args)`` outside compiled code (one graph break)."""
    # Not at import time, because torch.compiler.disable loads the compiler.
    return torch.compiler.disable(_call)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@dataclass
class Taps:
    """Recording and replay of one module.

    Attributes:
        path: path of the module in the model given to the recorder or replay.
        layer: destination of the recording, or None.
        replay: a LayerReplay (signals/replay.py) that chooses instead of the router, or None.
        eagerly: calls ``function(*args)`` outside compiled code (one graph break).
    """

    path: str
    layer: LayerSignals | None = None
    replay: Any = None
    eagerly: Callable[..., Any] = field(default_factory=eagerly)

    def __reduce__(self) -> tuple:
        """Copy and pickle as None: a copied or pickled model is not recorded."""
        return type(None), ()

    def impl(self, own: Callable[..., Routing]) -> RouteImpl:
        """Return the implementation of ``route`` to use: the replay's, or else the router's own."""
        return own if self.replay is None else self.replay.impl(self.path, own)

    def decided(self, spec: FamilySpec, hidden: Tensor, args: tuple, routing: Routing) -> Routing:
        """Return the routing that the router has to return, and record it."""
        if self.replay is not None:
            routing = replace(routing, weights_TK=self.replay.with_values(routing.weights_TK))
        if self.layer is not None:
            self.layer.routed(self.path, spec, hidden, args, routing)
        return routing

    def observe_router(self, call: Callable[..., Any], patch: Any, args: tuple) -> Any:
        """Call a router, and record the result if the family has its own router forward."""
        spec = patch.spec
        if self.layer is None or spec.router_forward is None:
            return call(*args)
        return self.eagerly(self._observe_router, call, spec, *args)

    def _observe_router(
        self, call: Callable[..., Any], spec: FamilySpec, hidden: Tensor, *args: Any
    ) -> Any:
        out = call(hidden, *args)
        if self.layer is not None and isinstance(out, tuple) and fused(spec):
            # Llama-4's router returns dense scores and logits; others logits, weights and ids.
            logits_TE, weights_TK = (out[1], None) if len(out) == 2 else out[:2]
            self.layer.returned(self.path, hidden, logits_TE, weights_TK)
        return out


def fused(spec: FamilySpec) -> bool:
    """Return whether the experts operator can read the family's experts as stored."""
    return spec.layout is None or spec.layout.fused


@dataclass
class LayerSignals:
    """Recording of the latest forward of one MoE layer; all tensors are detached.

    A forward inside a backward is the recompute of a checkpoint. It replaces a forward that ran
    without a graph and is ignored otherwise, so nothing is counted twice.

    Attributes:
        path: path of the block (without a block, of the module that contains the experts).
        missing: field -> why this family does not provide it; such a field is always None.
        ids: [T, K] expert ids as the experts received them; an id outside [0, E) is an empty slot.
        weights: [T, K] routing weights as the experts received them, in the family's dtype.
        logits: [T, E] raw router logits.
        router_weights: [T, K] weights from the routing function, before a family's own changes.
        router_input: [T, D] hidden states before the router, if requested.
        tokens_per_expert: [E] int64, rows per expert of the latest forward.
        load: [E] int64, rows per expert of all forwards since the last ``Recorder.step``.
        router_path: path of the router module that ran, or of a block that chooses by itself.
        no_logits: why ``smk_loss`` cannot recompute this router's logits, or None.
    """

    path: str
    missing: dict[str, str] = field(default_factory=dict)
    keeps_input: bool = False
    no_logits: str | None = None
    ids: Tensor | None = None
    weights: Tensor | None = None
    logits: Tensor | None = None
    router_weights: Tensor | None = None
    router_input: Tensor | None = None
    tokens_per_expert: Tensor | None = None
    load: Tensor | None = None
    router_path: str | None = None
    bias: Tensor | None = None
    rows_per_token: int = 1
    signals: Signals | None = None
    has_lora: bool = False
    graph: bool = False

    @property
    def act_norm(self) -> Tensor | None:
        """[T, K] norm of each expert's output, before its routing weight; 0 for empty slots."""
        norms = None if self.signals is None else self.signals.act_norm_TK
        return None if "act_norm" in self.missing else self._shaped(norms)

    @property
    def grad_norm_output(self) -> Tensor | None:
        """[T, K] norm of dL/dy, the gradient at the expert's output; None before backward."""
        return self._gradient(0)

    @property
    def grad_norm_params(self) -> Tensor | None:
        """[T, K] norm of the row's contribution to the gradients of expert weights and biases."""
        return self._gradient(1)

    @property
    def grad_norm_lora(self) -> Tensor | None:
        """[T, K] same as ``grad_norm_params`` for the low-rank factors; None without adapters."""
        return self._gradient(2) if self.has_lora else None

    def snapshot(self) -> LayerSignals:
        """Return a copy that later forwards and backwards do not change."""
        signals = self.signals
        if signals is not None:
            kept = signals.grads_3TK.new_empty(0)
            if _written(signals):
                # `copy_`, not `clone`: `_written` checks the version counter.
                kept = torch.empty_like(signals.grads_3TK).copy_(signals.grads_3TK)
            signals = replace(signals, grads_3TK=kept)
        return replace(self, missing=dict(self.missing), signals=signals)

    def routed(
        self, path: str, spec: FamilySpec, hidden: Tensor, args: tuple, routing: Routing
    ) -> None:
        """Record input and decision of a router."""
        if self._is_recompute():
            return
        self.returned(path, hidden, routing.logits_TE, routing.weights_TK)
        self.bias = args[spec.bias.index - 1] if isinstance(spec.bias, Arg) else None

    def returned(
        self, path: str, hidden: Tensor, logits_TE: Tensor, weights_TK: Tensor | None
    ) -> None:
        """Record input and return value of a router."""
        if self._is_recompute():
            return
        self.router_path = path
        self.logits = logits_TE.detach()
        self.router_weights = None if weights_TK is None else weights_TK.detach()
        if self.keeps_input:
            self.router_input = hidden.detach().reshape(-1, hidden.shape[-1])

    def begin(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        experts: int,
        has_lora: bool,
        fused: bool,
    ) -> Signals | None:
        """Record the inputs of the experts; return Signals for the operator to fill, or None."""
        if self._is_recompute():
            return None
        if has_lora and not fused:
            self.missing["grad_norm_lora"] = "the experts' own code runs between grouped products"
        first = not inside_backward()
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        self.graph, self.has_lora = torch.is_grad_enabled(), has_lora
        shape = (3, *ids_TK.shape) if self.graph else (0,)
        self.signals = Signals(torch.empty(shape, dtype=wide, device=x_TD.device))
        tokens_K = (-1, self.rows_per_token) if self.rows_per_token > 1 else ids_TK.shape
        self.ids = ids_TK.detach().reshape(tokens_K)
        self.weights = None if "weights" in self.missing else weights_TK.detach()
        self.tokens_per_expert = count_rows(self.ids, experts)
        if first:
            # A reentrant checkpoint runs the layer twice: without a graph, and inside backward.
            counts = self.tokens_per_expert
            self.load = counts if self.load is None else self.load + counts
        return self.signals

    def _is_recompute(self) -> bool:
        return self.graph and inside_backward()

    def _shaped(self, values: Tensor | None) -> Tensor | None:
        return None if values is None or self.ids is None else values.reshape(self.ids.shape)

    def _gradient(self, which: int) -> Tensor | None:
        if SIGNALS[which + 1] in self.missing or not _written(self.signals):
            return None
        assert self.signals is not None
        return self._shaped(self.signals.grads_3TK[which])


def count_rows(ids_TK: Tensor, experts: int) -> Tensor:
    """Count the rows per expert, int64 [E], without a host sync; ignore ids outside [0, E)."""
    ids_N = ids_TK.reshape(-1).long()
    inside_N = (ids_N >= 0) & (ids_N < experts)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids_TK.device)
    ids_N = torch.where(inside_N, ids_N, experts)
    return counts.scatter_add_(0, ids_N, torch.ones_like(ids_N))[:experts]


def _written(signals: Signals | None) -> bool:
    """Return whether backward has filled the gradient norms; nothing else writes to the buffer."""
    if signals is None or signals.grads_3TK.is_inference():
        return False
    return signals.grads_3TK.dim() == 3 and signals.grads_3TK._version > 0


def inside_backward() -> bool:
    """Return whether a backward pass runs; a forward inside it is a checkpoint's recompute."""
    return _inside_backward()()


@functools.cache
def _inside_backward() -> Callable[[], bool]:
    """Look up the private torch function for :func:`inside_backward`, once."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return _engine_takes_callbacks if task is None else lambda: task() != -1


def _engine_takes_callbacks() -> bool:
    """Queue a no-op callback; outside a backward pass autograd's engine raises RuntimeError."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: None)
    except RuntimeError:
        return False
    return True
