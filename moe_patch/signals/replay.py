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
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.patching.discover import FoundBlock
from moe_patch.runtime.module_patch import ModulePatch, patch_of
from moe_patch.runtime.taps import Taps
from moe_patch.signals.layer_replay import EndedReplay, LayerReplay, ModelReplay, reentrant_at
from moe_patch.signals.recorder import (
    Recorder,
    drop_idle,
    patched_blocks,
    record,
    why_no_logits,
)
from moe_patch.signals.trace import RoutingTrace


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
    Under transformers' checkpointing, backward has to run inside as well: a later recompute raises
    PatchStateError instead of using other experts.

    Args:
        model: a patched model.
        trace: has as many tokens as every forward inside.
        compare: also run each router's own choice, for :meth:`Replay.counts`.

    Raises:
        PatchStateError: there is no patched MoE block, or (from the forward) another thread runs
            the model.
        UnsupportedModelError: a block routes in a way that cannot be replayed.
        UnsupportedOptionError: the trace is of another model, or (from the forward) of another
            number of tokens; or a replay of the model is active.
    """
    blocks = _known_blocks(model)
    layers = _match(model, blocks, trace, ModelReplay(compare))
    tapped: list[ModulePatch] = []
    try:
        for block, layer in zip(blocks, layers, strict=True):
            for path, router in block.routers:
                patch = patch_of(router)
                assert patch is not None
                patch.taps = patch.taps or Taps(path)
                if isinstance(patch.taps.replay, LayerReplay):
                    raise UnsupportedOptionError(
                        f"{path}: a replay is already active; leave that `with` first"
                    )
                patch.taps.replay = layer
                tapped.append(patch)
        yield Replay(tuple(layers))
    finally:
        for patch in tapped:
            forwards = patch.taps.replay.forwards
            patch.taps.replay = EndedReplay(patch) if forwards > 0 else None
            drop_idle(patch)


# A search of all modules would take 2% of a step of twelve layers. An entry ends with its model.
_KNOWN: WeakKeyDictionary[nn.Module, list[tuple[FoundBlock, list[ModulePatch | None]]]] = (
    WeakKeyDictionary()
)


def _known_blocks(model: nn.Module) -> list[FoundBlock]:
    """Return :func:`replayable` blocks, from the last search if all routers are in place."""
    known = _KNOWN.get(model)
    if known is not None and all(_in_place(model, *each) for each in known):
        return [block for block, _ in known]
    blocks = replayable(model, "replay_routing")
    # An entry that held its own model would never end.
    if all(block.block is not model for block in blocks):
        _KNOWN[model] = [(block, [patch_of(r) for _, r in block.routers]) for block in blocks]
    return blocks


def _in_place(model: nn.Module, block: FoundBlock, patches: list[ModulePatch | None]) -> bool:
    for (path, router), patch in zip(block.routers, patches, strict=True):
        module: nn.Module | None = model
        for name in path.split("."):
            module = None if module is None else module._modules.get(name)
        if patch_of(router) is not patch or module is not router:
            return False
    return True


def replayable(model: nn.Module, caller: str) -> list[FoundBlock]:
    blocks = patched_blocks(model, caller)
    for block in blocks:
        if (why := why_no_logits(block)) is not None:
            raise UnsupportedModelError(
                f"{caller}: {block.path}: {why}; accepted: blocks whose router runs moe_patch's "
                "common router forward"
            )
    return blocks


def _match(
    model: nn.Module, blocks: list[FoundBlock], trace: RoutingTrace, whole: ModelReplay
) -> list[LayerReplay]:
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
    for index, (path, twice, given, highest) in enumerate(zip(paths, *facts, strict=True)):
        if twice:
            raise UnsupportedOptionError(
                f"replay_routing: {path}: {twice} tokens name an expert twice; accepted: K "
                "different experts per token, or a negative id to leave a token free"
            )
        weights_TK = None if trace.weights_TLK is None else trace.weights_TLK[:, index]
        given_T = None if given else given_LT[index]
        ids_TK = ids_LTK[index]
        reentrant = reentrant_at(model, path)
        layers.append(
            LayerReplay(whole, ids_TK, weights_TK, given_T, highest, trace.experts, reentrant)
        )
    return layers


def _largest(ids_LTK: Tensor) -> Tensor:
    if ids_LTK.numel() == 0:
        return ids_LTK.new_full((ids_LTK.shape[0],), -1)
    return ids_LTK.flatten(1).amax(1)
