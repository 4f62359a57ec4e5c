"""What one MoE layer records, and how the bound forwards find it.

A recording or replaying layer has a :class:`Taps` in the patch record of its router and of its
experts (``ModulePatch.taps``). Everywhere else it is None, and a forward pays that one look.

Forward and backward meet in two places:
    router   ``routed``  keeps the logits (and the router's input, when asked)
    experts  ``begin``   keeps ids, weights and counts, and hands out the :class:`Signals` that the
                         experts operator fills: the activation norms now, the others in backward
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
    """The function that calls ``function(*args)`` outside compiled code (one graph break)."""
    # Not at import: it loads the compiler.
    return torch.compiler.disable(_call)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@dataclass
class Taps:
    """What listens on one module.

    Attributes:
        path: the module's path in the model that was handed to the recorder or replay.
        layer: where to record, or None.
        replay: a LayerReplay (replay.py) that chooses instead of the router, or None.
        eagerly: calls ``function(*args)`` outside compiled code (one graph break).
    """

    path: str
    layer: LayerSignals | None = None
    replay: Any = None
    eagerly: Callable[..., Any] = field(default_factory=eagerly)

    def __reduce__(self) -> tuple:
        """A copied or pickled model is not recorded: its taps are None."""
        return type(None), ()

    def impl(self, own: RouteImpl) -> RouteImpl:
        """What runs in the place of a router's implementation of ``route``."""
        return own if self.replay is None else self.replay.impl(self.path, own)

    def decided(self, spec: FamilySpec, hidden: Tensor, args: tuple, routing: Routing) -> Routing:
        """What the router is to return; it is recorded on the way."""
        if self.replay is not None:
            routing = replace(routing, weights_TK=self.replay.with_values(routing.weights_TK))
        if self.layer is not None:
            self.layer.routed(self.path, spec, hidden, args, routing)
        return routing

    def heard(self, call: Callable[..., Any], record: Any, args: tuple) -> Any:
        """A router's call; what a forward of a family's own returns is recorded."""
        spec = record.spec
        if self.layer is None or spec.router_forward is None:
            return call(*args)
        return self.eagerly(self._heard, call, spec, *args)

    def _heard(self, call: Callable[..., Any], spec: FamilySpec, hidden: Tensor, *args: Any) -> Any:
        out = call(hidden, *args)
        if self.layer is not None and isinstance(out, tuple) and fused(spec):
            # Llama-4's router returns dense scores and logits, the others logits, weights, ids.
            logits_TE, weights_TK = (out[1], None) if len(out) == 2 else out[:2]
            self.layer.returned(self.path, hidden, logits_TE, weights_TK)
        return out


def fused(spec: FamilySpec) -> bool:
    """Whether the experts operator reads the family's experts as they are stored."""
    return spec.layout is None or spec.layout.fused


@dataclass
class LayerSignals:
    """The newest forward of one MoE layer; every tensor is detached.

    A forward that runs inside a backward is a checkpoint's recompute: it takes the place of a
    forward that ran without a graph, and is otherwise left out, so that nothing counts twice.

    Attributes:
        path: the block's module path (that of the module around the experts if there is no block).
        missing: field -> why this family cannot give it; such a field is always None.
        ids: [T, K] expert ids as the experts received them; outside [0, E) is an empty slot.
        weights: [T, K] routing weights as the experts received them, in the family's dtype.
        logits: [T, E] raw router logits.
        router_weights: [T, K] the routing function's weights, before a family's own changes.
        router_input: [T, D] hidden states before the router, when asked for.
        tokens_per_expert: [E] int64, rows of the newest forward.
        load: [E] int64, rows of all forwards since the last ``Recorder.step``.
        router_path: path of the router module that ran, or of a block that chooses by itself.
        no_logits: why ``smk_loss`` cannot compute this router's logits again, or None.
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
        """[T, K] norm of each expert's output, before its routing weight; 0 in empty slots."""
        norms = None if self.signals is None else self.signals.act_norm_TK
        return None if "act_norm" in self.missing else self._shaped(norms)

    @property
    def grad_norm_output(self) -> Tensor | None:
        """[T, K] norm of dL/dy, the gradient at the expert's output; None before backward."""
        return self._gradient(0)

    @property
    def grad_norm_params(self) -> Tensor | None:
        """[T, K] norm of the row's share of the gradient of the experts' weights and biases."""
        return self._gradient(1)

    @property
    def grad_norm_lora(self) -> Tensor | None:
        """[T, K] the same for the low-rank factors; None without adapters on the experts."""
        return self._gradient(2) if self.has_lora else None

    def snapshot(self) -> LayerSignals:
        """A copy that later forwards and backwards leave as it is."""
        signals = self.signals
        if signals is not None:
            kept = signals.grads_3TK.new_empty(0)
            if _written(signals):
                # Not clone: a copy has to count as written too.
                kept = torch.empty_like(signals.grads_3TK).copy_(signals.grads_3TK)
            signals = replace(signals, grads_3TK=kept)
        return replace(self, missing=dict(self.missing), signals=signals)

    def routed(
        self, path: str, spec: FamilySpec, hidden: Tensor, args: tuple, routing: Routing
    ) -> None:
        """Keep what the router saw and decided."""
        if self._is_recompute():
            return
        self.returned(path, hidden, routing.logits_TE, routing.weights_TK)
        self.bias = args[spec.bias.index - 1] if isinstance(spec.bias, Arg) else None

    def returned(
        self, path: str, hidden: Tensor, logits_TE: Tensor, weights_TK: Tensor | None
    ) -> None:
        """Keep what a router saw and returned."""
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
        """Keep what the experts received; what the experts operator is to fill, or None."""
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
            # Reentrant checkpoints run the layer once without a graph and once inside backward.
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
    """Rows per expert, int64 [E], without a host sync; ids outside [0, E) are not counted."""
    ids_N = ids_TK.reshape(-1).long()
    inside_N = (ids_N >= 0) & (ids_N < experts)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids_TK.device)
    ids_N = torch.where(inside_N, ids_N, experts)
    return counts.scatter_add_(0, ids_N, torch.ones_like(ids_N))[:experts]


def _written(signals: Signals | None) -> bool:
    """Whether backward has filled the gradient norms; its write is the buffer's only one."""
    if signals is None or signals.grads_3TK.is_inference():
        return False
    return signals.grads_3TK.dim() == 3 and signals.grads_3TK._version > 0


def inside_backward() -> bool:
    """Return whether a backward pass runs: a forward inside it is a checkpoint's recompute."""
    return _inside_backward()()


@functools.cache
def _inside_backward() -> Callable[[], bool]:
    """The function behind :func:`inside_backward`; a private name of torch is looked up once."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return _engine_takes_callbacks if task is None else lambda: task() != -1


def _engine_takes_callbacks() -> bool:
    """Queue a callback that does nothing: outside a backward pass autograd's engine refuses."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: None)
    except RuntimeError:
        return False
    return True
