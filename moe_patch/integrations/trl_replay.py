"""Replay the experts of a rollout in TRL's GRPOTrainer (read and tested with TRL 1.16.0).

    trainer = GRPOTrainer(..., rollout_func=rollout, callbacks=[MoePatchCallback()])
    replay_rollouts(trainer)
    trainer.train()

``rollout`` returns one more field, ``routed_experts``: the engine's routing of each completion. No
``rollout_func`` is needed with ``use_vllm=True`` (see integrations/trl_engines.py).

Design. TRL gives extra fields of a rollout to reward functions only, so ``_generate`` is wrapped to
keep this one. ``_generate_and_score_completions`` then adds the ids to its batch as a tensor
[batch, sequence, layers, K], which TRL itself buffers, shuffles and splits with the rest. Every
pass for log-probabilities (old policy, reference, policy) is one call of
``_get_per_token_logps_and_entropies``, in which each forward takes its rows of the ids in order.
``training_step`` ends the replay after the backward, so that recomputes use the same experts. All
wrappers are attributes of the one trainer, and :meth:`RolloutReplay.undo` removes them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.errors import PatchStateError, UnsupportedOptionError
from moe_patch.integrations.trl_engines import FIELD, MODES, EngineRouting, Wrapper
from moe_patch.signals.engines import EngineLayers, EngineRows, engine_trace
from moe_patch.signals.replay import Replay, replay_routing
from moe_patch.signals.trace import RoutingTrace

PASS = "_get_per_token_logps_and_entropies"
WRAPPED = ("_generate", "_generate_and_score_completions", PASS, "_compute_loss", "training_step")


def replay_rollouts(trainer: Any) -> RolloutReplay:
    """Make a GRPOTrainer replay the routing of its rollouts; call it before ``train``.

    Args:
        trainer: trl.GRPOTrainer of a patched model; its reference model, if any, is patched too.
            Its ``rollout_func`` returns ``routed_experts``, one entry per completion: an array,
            tensor or text as vLLM returns it, or an :class:`EngineRows`. Without a
            ``rollout_func``, it generates with vLLM, from text and without tools.

    Returns:
        A handle to undo it. The trainer logs three more measures:

        - ``moe/replay_disagreement``: share of the replayed choices that the policy's own router
          does not make in the same forward.
        - ``moe/replay_free_tokens``: tokens per sequence that no row covers, left to the router.
        - ``moe/rollout_kl``: an estimate of KL(rollout || trainer), where TRL computes the old
          log-probabilities. Mean of exp(d) - 1 - d with d = log p(trainer) - log p(rollout).

    Raises:
        UnsupportedOptionError: the trainer has no ``rollout_func``, or is of another kind.
        PatchStateError: a model is not patched, or the trainer already replays.
        UnsupportedModelError: a model's routing cannot be replayed.
    """
    if why := _why_not(trainer):
        raise UnsupportedOptionError(
            f"replay_rollouts: {type(trainer).__name__} {why}; accepted: trl.GRPOTrainer (1.16) "
            "with a rollout_func that returns routed_experts, or with use_vllm=True and no tools"
        )
    if any(isinstance(vars(trainer).get(name), Wrapper) for name in WRAPPED):
        raise PatchStateError("replay_rollouts: the trainer already replays; call undo() first")
    layers = EngineLayers.of(trainer.model)
    if trainer.ref_model is not None:
        EngineLayers.of(trainer.ref_model)
    return RolloutReplay(trainer, layers)


def _why_not(trainer: Any) -> str:
    """Say why the routing of a trainer's rollouts cannot be had, or return an empty string."""
    if missing := [name for name in WRAPPED if not hasattr(type(trainer), name)]:
        return f"has no {', '.join(missing)}"
    if trainer.rollout_func is not None:
        return ""
    if not trainer.use_vllm or trainer.vllm_mode not in MODES:
        return "has rollout_func=None and generates without vLLM"
    return "has tools and rollout_func=None" if trainer.tools else ""


class RolloutReplay:
    """The handle that :func:`replay_rollouts` returns.

    Attributes:
        trainer: the trainer.
        layers: the policy's MoE layers.
        engine: the vLLM engine's routing, or None with a ``rollout_func``.
        rows: the engine's rows between a rollout and the end of its scoring, else None.
        spans: prompt and completion length of each of these sequences.
        ids_BSLK: the ids of the batch whose log-probabilities are computed, or None.
        active: the replay that is active, as an open context.
    """

    def __init__(self, trainer: Any, layers: EngineLayers) -> None:
        self.trainer, self.layers = trainer, layers
        self.rows: list[EngineRows] | None = None
        self.spans: list[tuple[int, int]] = []
        self.ids_BSLK: Tensor | None = None
        self.active = ExitStack()
        self.replay: Replay | None = None
        self.before = {name: vars(trainer)[name] for name in WRAPPED if name in vars(trainer)}
        own: list[Callable[..., Any]] = [self._generate, self._score, self._pass]
        own += [self._loss, self._step]
        for name, wrapper in zip(WRAPPED, own, strict=True):
            setattr(trainer, name, Wrapper(wrapper, getattr(trainer, name)))
        self.engine = EngineRouting(trainer) if trainer.rollout_func is None else None

    def undo(self) -> None:
        """Remove the wrappers; the trainer's attributes are those from before."""
        self._close()
        if self.engine is not None:
            self.engine.undo()
        for name in WRAPPED:
            if name in self.before:
                setattr(self.trainer, name, self.before[name])
            else:
                delattr(self.trainer, name)

    def _generate(self, generate: Callable[..., Any], prompts: list) -> Any:
        """Keep the rollout's routing, which would otherwise reach reward functions only."""
        made = generate(prompts)
        prompt_ids, completion_ids, extra = made[0], made[1], made[5]
        returned = extra.pop(FIELD, self.engine and self.engine.take())
        if returned is None or len(returned) != len(completion_ids):
            found = "none" if returned is None else f"{len(returned)} entries"
            raise UnsupportedOptionError(
                f"replay_rollouts: the rollout returned {found} in {FIELD!r} for "
                f"{len(completion_ids)} completions; accepted: one entry per completion"
            )
        self.spans = [(len(p), len(c)) for p, c in zip(prompt_ids, completion_ids, strict=True)]
        self.rows = [
            entry if isinstance(entry, EngineRows) else EngineRows(entry, prompt + completion)
            for entry, (prompt, completion) in zip(returned, self.spans, strict=True)
        ]
        return made

    def _score(self, score: Callable[..., Any], inputs: Any) -> Any:
        """Add the ids to the batch that TRL buffers, shuffles and splits."""
        try:
            output = score(inputs)
            prompt, completion = (
                output[f"{part}_ids"].shape[1] for part in ("prompt", "completion")
            )
            ids_BSLK = self._placed(prompt + completion, completion)
        finally:
            self.rows = self.ids_BSLK = None
        self._log_kl(output)
        return {**output, FIELD: ids_BSLK}

    def _placed(self, width: int, keep: int) -> Tensor:
        """Return the rollout's ids, int [B, S, L, K]: prompts end where completions begin."""
        if self.ids_BSLK is None:
            assert self.rows is not None
            at_S = torch.arange(width) - (width - keep)
            prompts_B1, completions_B1 = torch.tensor(self.spans).unsqueeze(-1).unbind(1)
            mask_BS = (at_S >= -prompts_B1) & (at_S < completions_B1)
            placed = engine_trace(self.layers, self.rows, mask_BS)
            small = max(self.layers.experts) <= torch.iinfo(torch.int16).max
            ids_TLK = placed.trace.ids_TLK.to(torch.int16 if small else torch.int32)
            ids_BSLK = ids_TLK.reshape(*mask_BS.shape, *ids_TLK.shape[1:])
            self.ids_BSLK = ids_BSLK.to(self.trainer.accelerator.device)
            self._log("moe/replay_free_tokens", sum(placed.free), len(placed.free))
        return self.ids_BSLK

    def _pass(
        self,
        logps: Callable[..., Any],
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        **options: Any,
    ) -> Any:
        """Replay each forward of a pass over a batch, in the order of its rows."""
        if self.rows is not None:
            self._placed(input_ids.shape[1], logits_to_keep)
        if self.ids_BSLK is None:
            raise PatchStateError(
                f"replay_rollouts: {PASS} was called outside a rollout and its loss; accepted: "
                "calls by the trainer itself"
            )
        ids_BSLK, done = self.ids_BSLK, 0

        def enter(module: nn.Module, args: tuple, inputs: dict[str, Any]) -> None:
            nonlocal done
            start, done = done, done + inputs["input_ids"].shape[0]
            self._open(module, ids_BSLK[start:done].flatten(0, 1))

        handle = model.register_forward_pre_hook(enter, with_kwargs=True)
        try:
            found = logps(model, input_ids, attention_mask, logits_to_keep, **options)
        finally:
            handle.remove()
            if not torch.is_grad_enabled():
                self._close()
        if done != ids_BSLK.shape[0]:
            raise UnsupportedOptionError(
                f"replay_rollouts: the model ran {done} of {ids_BSLK.shape[0]} sequences; "
                "accepted: each sequence exactly once"
            )
        return found

    def _loss(self, loss: Callable[..., Any], model: nn.Module, inputs: dict[str, Any]) -> Any:
        self.ids_BSLK = inputs[FIELD]
        try:
            return loss(model, inputs)
        finally:
            self.ids_BSLK = None

    def _step(self, step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """End the replay after the backward, and log how often the router differs."""
        try:
            out = step(*args, **options)
            if self.replay is not None:
                prescribed, other = self.replay.counts().tolist()
                self._log("moe/replay_disagreement", other, prescribed)
        finally:
            self._close()
        return out

    def _open(self, model: nn.Module, ids_TLK: Tensor) -> None:
        self._close()
        widths = set(self.layers.experts)
        trace = RoutingTrace(ids_TLK, experts=widths.pop() if len(widths) == 1 else 0)
        training = torch.is_grad_enabled()
        replay = self.active.enter_context(replay_routing(model, trace, compare=training))
        self.replay = replay if training else None

    def _close(self) -> None:
        self.replay = None
        self.active.close()

    def _log_kl(self, output: dict[str, Any]) -> None:
        old, rollout = (output.get(f"{kind}_per_token_logps") for kind in ("old", "sampling"))
        if old is None or rollout is None:
            return
        mask = output["completion_mask"].bool()
        if "tool_mask" in output:
            mask = mask & output["tool_mask"].bool()
        gap = (old - rollout)[mask].double().nan_to_num()
        self._log("moe/rollout_kl", float((gap.expm1() - gap).sum()), gap.numel())

    def _log(self, name: str, total: float, count: int) -> None:
        """Append a mean over the ranks to the measures that the trainer logs next."""
        trainer = self.trainer
        sums = torch.tensor([total, count], dtype=torch.float64)
        gathered = trainer.accelerator.gather(sums.to(trainer.accelerator.device)).view(-1, 2)
        total, count = gathered.sum(0).tolist()
        mode = "train" if trainer.model.training else "eval"
        trainer._metrics[mode][name].append(total / max(count, 1))
