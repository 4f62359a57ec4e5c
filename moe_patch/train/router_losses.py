"""Load-balance and z loss of the routers in a Trainer run, added to the language model's loss.

Hooks on the routers collect the logits, and :mod:`moe_patch.ops.balance_loss` computes the losses.
The choices never become a one-hot tensor, for any number of layers and tokens. This works on
patched and unpatched models, also for families whose model has no auxiliary loss of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.ops.balance_loss import router_losses
from moe_patch.patching.discover import FoundBlock, discover
from moe_patch.runtime.spec import read
from moe_patch.schema import check_factor


@dataclass(frozen=True)
class RouterLossConfig:
    """Factors of the two losses.

    Attributes:
        load_balance: E * sum_e f_e p_e over the layers together (transformers' own form).
        z: the mean of logsumexp(logits)^2.

    Raises:
        UnsupportedOptionError: a factor is negative or not finite.
    """

    load_balance: float = 0.0
    z: float = 0.0

    def __post_init__(self) -> None:
        for name in ("load_balance", "z"):
            check_factor(f"router_losses.{name}", getattr(self, name))


class RouterLossTrainer(Trainer):
    """A Trainer that adds the router losses to the model's loss.

    Raises:
        UnsupportedModelError: on construction, if a block's router does not return plain logits.
        UnsupportedOptionError: on a step whose logits carry no gradient (reentrant checkpointing).
    """

    def __init__(self, *args: Any, router_losses: RouterLossConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router_losses = router_losses
        self.routers, self.top_k = routers_of(self.model)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the model's loss plus the router losses of the same forward."""
        with recorded_logits(self.routers) as logits:
            loss, outputs = super().compute_loss(
                model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
            )
        # Some logits may lack a gradient: in a frozen model nothing in front of the first router is
        # trained.
        if model.training and not any(layer.requires_grad for layer in logits):
            raise UnsupportedOptionError(
                "router_losses: no router's logits carry a gradient: neither a router nor anything "
                "in front of one is trained, or reentrant checkpointing cuts it off; train the "
                "routers, or set gradient_checkpointing_kwargs: {use_reentrant: false}"
            )
        balance, z = router_losses(logits, self.top_k, inputs.get("attention_mask"))
        added = self.router_losses.load_balance * balance + self.router_losses.z * z
        if num_items_in_batch is not None:
            # In this case the Trainer leaves the division by the accumulation steps to the loss.
            added = added / self.args.gradient_accumulation_steps
        loss = loss + added.to(loss.device, loss.dtype)
        return (loss, outputs) if return_outputs else loss


def routers_of(model: nn.Module) -> tuple[list[nn.Module], int]:
    """Return the router modules of a model in layer order, and their common top-k.

    Raises:
        UnsupportedModelError: there is no router, one does not return logits first, or k differs.
    """
    blocks = [block for block in discover(model) if block.routers]
    if not blocks:
        raise UnsupportedModelError(
            f"router_losses: {type(model).__name__} has no router module that chooses experts "
            "(transformers before 5.13 may choose in the block); use the model's own auxiliary "
            "loss, or a newer transformers"
        )
    top_ks = {_top_k(block) for block in blocks}
    if len(top_ks) > 1:
        raise UnsupportedModelError(f"router_losses: layers choose {sorted(top_ks)} experts each")
    # A block may hold two routers (PEFT's modules_to_save); only the one that runs is recorded.
    return [router for block in blocks for _, router in block.routers], top_ks.pop()


def _top_k(block: FoundBlock) -> int:
    path, router = block.routers[0]
    spec = block.spec_of(router)
    if spec.returns is not None or spec.router_forward is not None or "top_k" not in spec.params:
        raise UnsupportedModelError(
            f"router_losses: {path} ({type(router).__name__}) does not return plain router logits "
            "first; use the model's own auxiliary loss (output_router_logits: true)"
        )
    return int(read(router, spec.params["top_k"]))


@contextmanager
def recorded_logits(routers: list[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the logits of each router's forward while the context is open, one tensor a call."""
    logits: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _, __, output: logits.append(output[0]))
        for router in routers
    ]
    try:
        yield logits
    finally:
        for hook in hooks:
            hook.remove()
