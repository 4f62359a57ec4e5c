"""Record which experts every token used, and make a later forward use them again.

A recompute in another precision, the choice of a rollout engine, or the old policy of an RL update
can then use the same experts. The gate still computes its own weights and receives its gradient.

    with record_routing(model) as capture:          with replay_routing(model, trace):
        model(**batch)                                  loss(model(**batch)).backward()
    trace = capture.trace()

Inference engines return tokens x layers x K, without prompt and padding. Use
:meth:`RoutingTrace.from_rows` and :meth:`RoutingTrace.rows` to translate by a mask over the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.ops.routing import RouteImpl, weights_at
from moe_patch.patching.discover import FoundBlock
from moe_patch.runtime.module_patch import ModulePatch, patch_of
from moe_patch.runtime.taps import Taps, inside_backward
from moe_patch.signals.recorder import (
    Recorder,
    drop_idle,
    patched_blocks,
    record,
    why_no_logits,
)
from moe_patch.signals.trace import RoutingTrace
from moe_patch.types import RouteSpec, Routing


@dataclass(frozen=True)
class RoutingCapture:
    """The capture that :func:`record_routing` yields."""

    recorder: Recorder

    def trace(self, weights: bool = False) -> RoutingTrace:
        """Return the newest forward's routing.

        Args:
            weights: keep the routing weights as well as the ids.

        Raises:
            UnsupportedOptionError: no forward has run, or the layers had different numbers of
                tokens or of experts per token.
        """
        layers = list(self.recorder.layers.values())
        shapes = {layer.path: None if layer.ids is None else layer.ids.shape for layer in layers}
        if len(set(shapes.values())) != 1 or None in shapes.values():
            raise UnsupportedOptionError(
                f"record_routing: ids by layer are {shapes}; accepted: one forward in which every "
                "layer sees the same tokens and the same K"
            )
        ids_TLK = torch.stack([layer.ids for layer in layers if layer.ids is not None], dim=1)
        weights_TLK = None
        if weights:
            kept = [w for layer in layers if (w := layer.router_weights) is not None]
            weights_TLK = torch.stack(kept, dim=1)
        widths = {layer.logits.shape[1] for layer in layers if layer.logits is not None}
        experts = widths.pop() if len(widths) == 1 else 0
        return RoutingTrace(ids_TLK, weights_TLK, tuple(shapes), experts)


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingCapture]:
    """Record which experts each token uses inside a ``with`` block.

    Args:
        model: a patched model whose routers all run the common router forward.

    Raises:
        PatchStateError: there is no patched MoE block, or the model is already being recorded.
        UnsupportedModelError: a block routes in a way that cannot be replayed.
    """
    replayable(model, "record_routing")
    with record(model) as recorder:
        yield RoutingCapture(recorder)


@dataclass(frozen=True)
class Replay:
    """The replay that :func:`replay_routing` yields."""

    layers: tuple[LayerReplay, ...]

    def counts(self) -> Tensor:
        """Return int64 [2]: prescribed choices so far, and those that the router did not make.

        A choice is one of a token's K experts in one layer. Recomputes in backward do not count.

        Raises:
            UnsupportedOptionError: the replay does not compare, or no forward has run.
        """
        found = [layer.counts_2 for layer in self.layers if layer.counts_2 is not None]
        if not found:
            raise UnsupportedOptionError(
                "replay_routing: nothing was compared; accepted: compare=True and a forward inside "
                "the `with`"
            )
        return torch.stack([counts_2.to(found[0].device) for counts_2 in found]).sum(0)


@contextmanager
def replay_routing(
    model: nn.Module, trace: RoutingTrace, compare: bool = False
) -> Iterator[Replay]:
    """Make every forward inside a ``with`` block use the experts of a trace.

    The weights follow the family's own formula at the prescribed experts, so the gate receives its
    gradient. If the trace has weights, their values replace the formula's, but not its gradient.
    Recomputes under checkpointing use the same experts if backward also runs inside.

    Args:
        model: a patched model.
        trace: has as many tokens as every forward inside.
        compare: also run each router's own choice, for :meth:`Replay.counts`.

    Raises:
        PatchStateError: there is no patched MoE block.
        UnsupportedModelError: a block routes in a way that cannot be replayed.
        UnsupportedOptionError: the trace is of another model, or (from the forward) of another
            number of tokens.
    """
    blocks = replayable(model, "replay_routing")
    layers = _match(blocks, trace, compare)
    tapped: list[ModulePatch] = []
    try:
        for block, layer in zip(blocks, layers, strict=True):
            for path, router in block.routers:
                patch = patch_of(router)
                assert patch is not None
                patch.taps = patch.taps or Taps(path)
                if patch.taps.replay is not None:
                    raise UnsupportedOptionError(
                        f"{path}: a replay is already active; leave that `with` first"
                    )
                patch.taps.replay = layer
                tapped.append(patch)
        yield Replay(tuple(layers))
    finally:
        for patch in tapped:
            patch.taps.replay = None
            drop_idle(patch)


@dataclass
class LayerReplay:
    """One layer of a trace, in the form that a router uses.

    Attributes:
        ids_TK: int64, prescribed experts.
        weights_TK: prescribed weights or None.
        given_T: which tokens are prescribed; None if all are.
        highest: the largest id.
        experts: the trace's E, or 0.
        compare: count how often the router's own choice differs.
        counts_2: int64, prescribed choices and those that differ; None before the first.
    """

    ids_TK: Tensor
    weights_TK: Tensor | None
    given_T: Tensor | None
    highest: int
    experts: int
    compare: bool = False
    counts_2: Tensor | None = None

    def impl(self, path: str, own: RouteImpl) -> RouteImpl:
        """Return a routing implementation that takes the prescribed experts instead of the best."""

        def route(logits_TE: Tensor, spec: RouteSpec, bias_E: Tensor | None = None) -> Routing:
            self._check(path, logits_TE, spec)
            self._move(logits_TE.device)
            ids_TK = self.ids_TK
            counting = self.compare and not inside_backward()
            if self.given_T is not None or counting:
                own_TK = own(logits_TE.detach(), spec, bias_E).ids_TK.long()
                if counting:
                    self._count(own_TK)
                if self.given_T is not None:
                    ids_TK = torch.where(self.given_T.unsqueeze(1), ids_TK, own_TK)
            return Routing(ids_TK, weights_at(logits_TE, spec, ids_TK), logits_TE)

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

    def _check(self, path: str, logits_TE: Tensor, spec: RouteSpec) -> None:
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


def replayable(model: nn.Module, caller: str) -> list[FoundBlock]:
    blocks = patched_blocks(model, caller)
    for block in blocks:
        if (why := why_no_logits(block)) is not None:
            raise UnsupportedModelError(
                f"{caller}: {block.path}: {why}; accepted: blocks whose router runs moe_patch's "
                "common router forward"
            )
    return blocks


def _match(blocks: list[FoundBlock], trace: RoutingTrace, compare: bool) -> list[LayerReplay]:
    """Split the trace by layer, and check it (values too) against the model once."""
    paths = tuple(block.path for block in blocks)
    L = trace.ids_TLK.shape[1]
    if len(paths) != L or (trace.paths and trace.paths != paths):
        raise UnsupportedOptionError(
            f"replay_routing: the trace has {L} layers {trace.paths or '(paths unknown)'}, the "
            f"model has {len(paths)}: {paths}; accepted: a trace of this model"
        )
    ids_LTK = trace.ids_TLK.transpose(0, 1).long().contiguous()
    given_LT = (ids_LTK >= 0).all(-1)
    order_LTK = ids_LTK.sort(-1).values
    twice_LT = (order_LTK[..., 1:] == order_LTK[..., :-1]).any(-1) & given_LT
    # Check all layers together: on a GPU each of these values is waited for.
    facts = torch.stack([twice_LT.sum(1), given_LT.all(1).long(), _largest(ids_LTK)]).tolist()
    layers = []
    for index, (path, twice, whole, highest) in enumerate(zip(paths, *facts, strict=True)):
        if twice:
            raise UnsupportedOptionError(
                f"replay_routing: {path}: {twice} tokens name an expert twice; accepted: K "
                "different experts per token, or a negative id to leave a token free"
            )
        weights_TK = None if trace.weights_TLK is None else trace.weights_TLK[:, index]
        given_T = None if whole else given_LT[index]
        ids_TK = ids_LTK[index]
        layers.append(LayerReplay(ids_TK, weights_TK, given_T, highest, trace.experts, compare))
    return layers


def _largest(ids_LTK: Tensor) -> Tensor:
    if ids_LTK.numel() == 0:
        return ids_LTK.new_full((ids_LTK.shape[0],), -1)
    return ids_LTK.flatten(1).amax(1)
