"""The replay of one router, and what all routers of a replay share; see signals/replay.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.errors import PatchStateError, UnsupportedOptionError
from moe_patch.ops.routing import RouteImpl
from moe_patch.runtime.module_patch import ModulePatch
from moe_patch.runtime.taps import inside_backward
from moe_patch.signals.recorder import drop_idle
from moe_patch.types import RouteSpec, Routing


@dataclass(frozen=True)
class ModelReplay:
    """The state that the layers of a replay share.

    Attributes:
        compare: count how often the routers' own choices differ.
        thread: the thread that entered the replay.
        grad: whether the replay was entered with gradients enabled.
    """

    compare: bool
    thread: int = field(default_factory=threading.get_ident)
    grad: bool = field(default_factory=torch.is_grad_enabled)


def reentrant_at(model: nn.Module, path: str) -> bool | None:
    """Return whether transformers' checkpoint around a module is reentrant; None without one.

    The forward inside a reentrant checkpoint builds no graph.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    module = model
    for name in path.split("."):
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            function: Any = module._gradient_checkpointing_func
            return bool(function.keywords.get("use_reentrant", True))
        module = module._modules[name]  # type: ignore[assignment]
    return None


@dataclass
class LayerReplay:
    """One layer of a trace, in the form that a router uses.

    Attributes:
        model: what all layers share.
        ids_TK: int64, prescribed experts.
        weights_TK: prescribed weights or None.
        given_T: which tokens are prescribed; None if all are.
        highest: the largest id.
        experts: the trace's E, or 0.
        reentrant: result of :func:`reentrant_at` for the block.
        counts_2: int64, prescribed choices and those that differ; None before the first.
        forwards: checkpointed forwards that backward has not run again yet.
    """

    model: ModelReplay
    ids_TK: Tensor
    weights_TK: Tensor | None
    given_T: Tensor | None
    highest: int
    experts: int
    reentrant: bool | None
    counts_2: Tensor | None = None
    forwards: int = 0

    def impl(self, path: str, own: Callable[..., Routing]) -> RouteImpl:
        """Return a routing implementation that takes the prescribed experts instead of the best.

        Args:
            path: of the router, for errors.
            own: the router's implementation, as :func:`route_impl` returns it.
        """

        def route(logits_TE: Tensor, spec: RouteSpec, bias_E: Tensor | None = None) -> Routing:
            again = inside_backward()
            self._check(path, logits_TE, spec, again)
            self._move(logits_TE.device)
            self._checkpointed(again)
            ids_TK = self.ids_TK
            counting = self.model.compare and not again
            if self.given_T is not None or counting:
                own_TK = own(logits_TE.detach(), spec, bias_E).ids_TK.long()
                if counting:
                    self._count(own_TK)
                if self.given_T is not None:
                    ids_TK = torch.where(self.given_T.unsqueeze(1), ids_TK, own_TK)
            return own(logits_TE, spec, bias_E, ids_TK)

        return route

    def with_values(self, weights_TK: Tensor) -> Tensor:
        """Return the trace's values with the gradient of the gate's own weights."""
        if self.weights_TK is None:
            return weights_TK
        values_TK = self.weights_TK.to(weights_TK.dtype) + (weights_TK - weights_TK.detach())
        if self.given_T is None:
            return values_TK
        return torch.where(self.given_T.unsqueeze(1), values_TK, weights_TK)

    def _count(self, own_TK: Tensor) -> None:
        other_TK = (self.ids_TK.unsqueeze(2) != own_TK.unsqueeze(1)).all(-1)
        given_TK = torch.ones_like(other_TK)
        if self.given_T is not None:
            given_TK = self.given_T.unsqueeze(1).expand_as(other_TK)
        counts_2 = torch.stack([given_TK.sum(), (other_TK & given_TK).sum()])
        self.counts_2 = counts_2 if self.counts_2 is None else self.counts_2 + counts_2

    def _checkpointed(self, again: bool) -> None:
        if self.reentrant is None:
            return
        if again:
            self.forwards -= 1
        elif self.model.grad if self.reentrant else torch.is_grad_enabled():
            self.forwards += 1

    def _check(self, path: str, logits_TE: Tensor, spec: RouteSpec, again: bool) -> None:
        # On a GPU, autograd's own threads recompute.
        if threading.get_ident() != self.model.thread and not again:
            raise PatchStateError(
                f"{path}: replay_routing: a forward of thread {threading.current_thread().name!r}; "
                "accepted: forwards of the thread that entered the `with`"
            )
        T, E = logits_TE.shape
        if (T, spec.top_k) != tuple(self.ids_TK.shape):
            raise UnsupportedOptionError(
                f"{path}: replay_routing: this forward routes (tokens, K) = {(T, spec.top_k)}, the "
                f"trace has {tuple(self.ids_TK.shape)}; accepted: a forward of the trace's tokens"
            )
        if self.highest >= E or self.experts not in (0, E):
            raise UnsupportedOptionError(
                f"{path}: replay_routing: the router has {E} experts, the trace "
                f"{self.experts or 'an unknown number'} and ids up to {self.highest}; accepted: a "
                "trace of this model"
            )

    def _move(self, device: torch.device) -> None:
        if self.ids_TK.device != device:
            self.ids_TK = self.ids_TK.to(device)
            self.weights_TK = None if self.weights_TK is None else self.weights_TK.to(device)
            self.given_T = None if self.given_T is None else self.given_T.to(device)


@dataclass
class EndedReplay:
    """The place of a replay that ended before the recomputes of its forwards.

    It refuses these recomputes, which would use other experts, and leaves at the next forward.
    """

    patch: ModulePatch

    def impl(self, path: str, own: RouteImpl) -> RouteImpl:
        """Return the router's own implementation.

        Raises:
            PatchStateError: backward recomputes a forward.
        """
        if inside_backward():
            raise PatchStateError(
                f"{path}: replay_routing: backward recomputes a forward after its replay ended; "
                "accepted: backward inside the `with`, if the model is checkpointed"
            )
        self.patch.taps.replay = None
        drop_idle(self.patch)
        return own

    def with_values(self, weights_TK: Tensor) -> Tensor:
        """Return the router's own weights."""
        return weights_TK
