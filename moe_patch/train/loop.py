"""Train once with HF Trainer: losses per step, a progress bar, an optional early end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from moe_patch.errors import UnsupportedOptionError
from moe_patch.signals.recorder import Recorder
from moe_patch.tools.base_identity import Base, base_of, note_checkpoint
from moe_patch.tools.checkpoint_loading import check_loaded, watch_loading
from moe_patch.train.build import one_line
from moe_patch.train.data import TokenBlocks
from moe_patch.train.router_losses import RouterLossConfig, RouterLossTrainer
from moe_patch.train.sharded import gather
from moe_patch.train.smk import SmkConfig, SmkRouterLossTrainer, SmkTrainer, recorded_for

FIRST_STEPS = 3


@dataclass(frozen=True)
class Trained:
    """Results of one training.

    Attributes:
        losses: optimizer step -> training loss, for the logged steps.
        seconds: wall time of the training alone.
        steps, steady: number and wall time of the steps after the first :data:`FIRST_STEPS`; zero
            if there were no more. The first ones compile kernels and fill caches.
        metrics: optimizer step -> the routers' measures, with ``smk``.
        whole: all weights, gathered on the first process, if the model itself holds only parts.
    """

    losses: dict[int, float]
    seconds: float
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    whole: dict[str, Tensor] | None = None
    steps: int = 0
    steady: float = 0.0


class _Recorder(TrainerCallback):
    """Keeps the losses, shows them in one progress bar, and ends the run after ``last_step``."""

    def __init__(self, name: str, last_step: int | None, show: bool) -> None:
        self.name = name
        self.last_step = last_step
        self.show = show
        self.losses: dict[int, float] = {}
        self.metrics: dict[int, dict[str, float]] = {}
        self.bar: Any = None
        self.base: Base | None = None
        self.steps, self.settled = 0, 0.0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        check_loaded(model)
        self.base = base_of(model)
        total = min(state.max_steps, self.last_step or state.max_steps)
        hidden = not (self.show and state.is_world_process_zero)
        self.bar = tqdm(
            total=total, initial=state.global_step, desc=self.name, unit="step", disable=hidden
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1
        if self.steps == FIRST_STEPS:
            self.settled = time.perf_counter()
        self.bar.update(state.global_step - self.bar.n)
        if self.last_step is not None and state.global_step >= self.last_step:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses[state.global_step] = logs["loss"]
            if found := {key: value for key, value in logs.items() if "/" in key}:
                self.metrics[state.global_step] = found
            self.bar.set_postfix(loss=f"{logs['loss']:.3f}", refresh=False)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        note_checkpoint(args, state, self.base)

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self.bar.close()
        check_loaded(model)


def train_once(
    model: Any,
    args: TrainingArguments,
    blocks: TokenBlocks,
    *,
    name: str,
    last_step: int | None = None,
    router_losses: RouterLossConfig | None = None,
    smk: SmkConfig | None = None,
) -> Trained:
    """Train ``model`` in place.

    Args:
        model: a causal language model, with or without adapters.
        args: the Trainer's arguments; they alone determine learning-rate schedule and data order.
        blocks: the training examples.
        name: label of the progress bar.
        last_step: stop after this optimizer step without changing the schedule.
        router_losses: factors of the router losses to add; None adds none.
        smk: the options of smk_loss; None records nothing. Needs a patched model.

    Raises:
        UnsupportedOptionError: the Trainer refuses its arguments, there is no step to train, or a
            checkpoint that it loads lacks weights.
    """
    kept = _Recorder(name, last_step, show=not args.disable_tqdm)
    with recorded_for(model, smk) as recorder:
        make = _trainer_class(router_losses, smk, recorder)
        try:
            trainer = make(
                model=model,
                args=args,
                train_dataset=blocks,
                data_collator=default_data_collator,
                callbacks=[kept],
            )
        except (ImportError, ValueError) as error:
            raise UnsupportedOptionError(f"training: {one_line(error)}") from error
        # Our callback replaces both, because a line per logged step would break up the bar.
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        watch_loading(model)
        if args.dataloader_drop_last and len(blocks) < args.train_batch_size * args.world_size:
            raise _no_step(blocks, args)  # some releases of transformers fail in this case
        start = time.perf_counter()
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        end = time.perf_counter()
        if trainer.state.global_step == 0:
            raise _no_step(blocks, args)
    steps = max(kept.steps - FIRST_STEPS, 0)
    steady = end - kept.settled if steps else 0.0
    return Trained(kept.losses, end - start, kept.metrics, gather(trainer), steps, steady)


def _no_step(blocks: TokenBlocks, args: TrainingArguments) -> UnsupportedOptionError:
    return UnsupportedOptionError(
        f"training: there is no step to train: {len(blocks)} examples, batches of "
        f"{args.train_batch_size} on each of {args.world_size} processes, "
        f"{args.num_train_epochs} epochs, max_steps {args.max_steps}; use smaller batches, more "
        "data or more steps"
    )


def _trainer_class(
    router_losses: RouterLossConfig | None, smk: SmkConfig | None, recorder: Recorder | None
) -> Any:
    if smk is None or recorder is None:
        if router_losses is None:
            return Trainer
        return partial(RouterLossTrainer, router_losses=router_losses)
    if router_losses is None:
        return partial(SmkTrainer, smk=smk, recorder=recorder)
    return partial(SmkRouterLossTrainer, smk=smk, recorder=recorder, router_losses=router_losses)
