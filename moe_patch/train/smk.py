"""Add smk_loss to a Trainer run: a second, small backward to the routers after each one.

These means over the layers are logged beside the loss, for the newest micro-batch of a logged step:

    smk/gate_accuracy  how often a router's first choice is the target
    smk/ce, smk/kl     the two terms of the loss, before their factors
    smk/confidence     the routing softmax's largest probability over the chosen experts
    moe/...            load measures of the whole step (moe_patch.signals.balance)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from moe_patch.errors import UnsupportedOptionError
from moe_patch.schema import check_factor
from moe_patch.signals.balance import balance_metrics
from moe_patch.signals.losses import gate_accuracy, router_logits, smk_loss
from moe_patch.signals.recorder import Recorder, record
from moe_patch.train.router_losses import RouterLossTrainer


@dataclass(frozen=True)
class SmkConfig:
    """Arguments of :func:`moe_patch.smk_loss`, and its factor.

    Attributes:
        target: "delta_sc" or "surprise".
        gradient: the norm used as surprise: "params", "output" or "expert".
        ce, kl: factors of the two terms.
        weight: factor of the whole; 0 measures without training.

    Raises:
        UnsupportedOptionError: a factor is negative or not finite.
    """

    target: str = "delta_sc"
    gradient: str = "params"
    ce: float = 1.0
    kl: float = 1.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("ce", "kl", "weight"):
            check_factor(f"smk.{name}", getattr(self, name))


class SmkTrainer(Trainer):
    """A Trainer that adds the gradient of smk_loss to the routers after each backward pass.

    Raises:
        UnsupportedModelError: in a step, the router's parameters are sharded (FSDP2).
        UnsupportedOptionError: in a step, tokens have one expert, a word is wrong, or no router is
            trained.
    """

    def __init__(self, *args: Any, smk: SmkConfig, recorder: Recorder, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.smk = smk
        self.recorder = recorder

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the Trainer's own step, then add the routers' gradient."""
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        if self.smk.weight:
            self._add_gradients()
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the routers' measures with every training loss, and close the recorder's step."""
        if "loss" in logs:
            with self.compute_loss_context_manager():
                logs = {**logs, **router_metrics(self.recorder, self.model, self.smk)}
        super().log(logs, *args, **kwargs)

    def _add_gradients(self) -> None:
        smk = self.smk
        with self.compute_loss_context_manager():
            loss = smk_loss(self.recorder, self.model, smk.target, smk.ce, smk.kl, smk.gradient)
        if not loss.requires_grad:
            raise UnsupportedOptionError(
                "smk: no router is trained, and this loss has no gradient for anything else; train "
                "the routers (with adapters: lora.target_parameters or modules_to_save), set "
                "weight: 0 to only measure, or leave smk out"
            )
        loss = loss * (smk.weight / self.current_gradient_accumulation_steps)
        if self.accelerator.scaler is not None:
            loss = self.accelerator.scaler.scale(loss)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(loss, trained, allow_unused=True)
        for parameter, grad in zip(trained, grads, strict=True):
            if grad is None:
                continue
            # backward() outside the model's own forward would not be averaged by data parallelism.
            grad = self.accelerator.reduce(grad, reduction="mean")
            if parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad += grad


class SmkRouterLossTrainer(SmkTrainer, RouterLossTrainer):
    """Combine both: router losses in the forward pass, smk_loss after the backward pass."""


@torch.no_grad()
def router_metrics(recorder: Recorder, model: nn.Module, smk: SmkConfig) -> dict[str, float]:
    """Return the measures listed at the top of this module; close the recorder's step."""
    words = {"target": smk.target, "gradient": smk.gradient}
    accuracy = torch.stack(list(gate_accuracy(recorder, **words).values()))
    confidence = [_confidence(model, layer) for layer in recorder.layers.values()]
    return {
        "smk/gate_accuracy": accuracy.nanmean().item(),
        "smk/ce": smk_loss(recorder, model, ce=1.0, kl=0.0, **words).item(),
        "smk/kl": smk_loss(recorder, model, ce=0.0, kl=1.0, **words).item(),
        "smk/confidence": sum(confidence) / len(confidence),
        **balance_metrics(recorder.step()),
    }


def _confidence(model: nn.Module, layer: Any) -> float:
    ids_TK = layer.ids.long()
    chosen_TK = router_logits(model, layer).gather(1, ids_TK.clamp(min=0))
    return chosen_TK.float().softmax(-1).amax(-1).mean().item()


@contextmanager
def recorded_for(model: nn.Module, smk: SmkConfig | None) -> Iterator[Recorder | None]:
    """Record the routers' inputs if smk_loss is used; yield the recorder or None."""
    if smk is None:
        yield None
        return
    with record(model, router_input=True) as recorder:
        yield recorder
