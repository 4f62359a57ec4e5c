"""Measure expert load, and balance it by a bias update without an auxiliary loss.

With c_e rows of expert e and mean c = sum c / E:

    max violation  max c / mean c - 1: 0 when even, E - 1 when one expert takes everything
    entropy        -sum p log p over p = c / sum c, divided by log E: 1 when even
    dead           experts without a row
    bias update    b_e += rate * sign(mean c - c_e), where the family has a correction bias
                   (arXiv:2408.15664, DeepSeek-V3 arXiv:2412.19437 section 2.1.2)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_patch.errors import PatchStateError, UnsupportedOptionError
from moe_patch.runtime.module_patch import patch_of
from moe_patch.runtime.modules import is_sharded
from moe_patch.runtime.spec import read
from moe_patch.runtime.taps import LayerSignals
from moe_patch.signals.recorder import (
    Recorder,
    StepSignals,
    require_whole,
    sum_over_group,
)


class Balance(NamedTuple):
    """Measures of one layer's load; NaN, NaN and E for a layer that received no row."""

    max_violation: float
    entropy: float
    dead: int


def balance(load_E: Tensor) -> Balance:
    """Measure a load, [E] rows per expert. Copies the counts to the host."""
    counts = load_E.double().cpu()
    E, total = counts.shape[0], counts.sum()
    share_E = counts / total
    entropy = -torch.xlogy(share_E, share_E).sum() / max(math.log(E), 1e-300)
    violation = share_E.max() * E - 1
    return Balance(violation.item(), entropy.item(), int((counts == 0).sum()))


def balance_metrics(closed: StepSignals) -> dict[str, float]:
    """Return mean and worst measures over the layers of a closed step, by their logged names."""
    found = [balance(load_E) for load_E in closed.load.values()]
    if not found:
        return {}
    violations = [layer.max_violation for layer in found]
    return {
        "moe/max_violation": max(violations),
        "moe/mean_violation": sum(violations) / len(found),
        "moe/entropy": sum(layer.entropy for layer in found) / len(found),
        "moe/dead_experts": float(sum(layer.dead for layer in found)),
    }


def balance_table(recorder: Recorder) -> str:
    """Return the load by layer over the whole history, as a text table."""
    totals: dict[str, Tensor] = {}
    for closed in recorder.history:
        for path, load_E in closed.load.items():
            totals[path] = totals[path] + load_E if path in totals else load_E
    head = ("layer", "rows", "max violation", "entropy", "dead", "most used", "least used")
    lines = [head]
    for path, load_E in totals.items():
        found = balance(load_E)
        lines.append(
            (
                path,
                str(int(load_E.sum())),
                f"{found.max_violation:.3f}",
                f"{found.entropy:.3f}",
                f"{found.dead} of {load_E.shape[0]}",
                str(int(load_E.argmax())),
                str(int(load_E.argmin())),
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    texts = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(text.rstrip() for text in texts)


@torch.no_grad()
def update_expert_bias(
    model: nn.Module,
    recorder: Recorder,
    rate: float = 1e-3,
    group: Any = None,
    load: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Move every correction bias by ``rate`` towards an even load; call it once per optimiser step.

    Args:
        model: the recorded model.
        recorder: provides the counts since its last ``step``, so call this before ``step``.
        rate: how far a bias moves.
        group: process group over which counts are summed first, so that ranks stay equal.
        load: counts to use instead, block path -> [E], for example those of a closed step.

    Returns:
        Block path -> the signs that were applied, [E] in the bias's dtype.

    Raises:
        UnsupportedOptionError: no recorded layer has a correction bias.
        PatchStateError: a layer with a bias ran no forward since the last step (on any rank).
    """
    if load is None:
        load = {p: layer.load for p, layer in recorder.layers.items() if layer.load is not None}
        if group is not None:
            load = sum_over_group(load, list(recorder.layers), group)
    found = {path: bias_of(model, layer) for path, layer in recorder.layers.items()}
    biases = {path: bias for path, bias in found.items() if bias is not None}
    if not biases:
        raise UnsupportedOptionError(
            f"update_expert_bias: no recorded layer of {type(model).__name__} has a correction "
            "bias; accepted: families whose router has one (docs/families.md, column bias)"
        )
    signs = {}
    for path, bias in biases.items():
        if path not in load:
            raise PatchStateError(f"update_expert_bias: {path} ran no forward since the last step")
        counts_E = load[path].to(bias.device, torch.float64)
        sign_E = torch.sign(counts_E.mean() - counts_E).to(bias.dtype)
        signs[path] = sign_E
        bias.add_(sign_E.view(bias.shape), alpha=rate)
    return signs


def bias_of(model: nn.Module, layer: LayerSignals) -> Tensor | None:
    """Return the live correction bias of a recorded layer (a parameter or buffer), or None.

    Raises:
        PatchStateError: the block passes a bias that is no tensor of the model (sharded, a copy).
        UnsupportedModelError: the router's own bias is sharded.
    """
    if layer.router_path is None:
        return None
    router = model.get_submodule(layer.router_path)
    patch = patch_of(router)
    if patch is None or patch.spec.bias is None:
        return None
    if isinstance(patch.spec.bias, str):
        bias: Tensor = read(router, patch.spec.bias)
        if is_sharded(bias):
            require_whole(router, f"update_expert_bias: {layer.router_path}")
        counts = layer.tokens_per_expert
        if counts is not None and bias.numel() != counts.numel():
            return None  # Zaya has one more class, which names no expert
        return bias
    if layer.bias is None:
        return None
    if not any(t is layer.bias for t in (*model.parameters(), *model.buffers())):
        raise PatchStateError(
            f"{layer.path}: the correction bias that reached the router is no parameter or buffer "
            "of the model; accepted: an unsharded bias"
        )
    return layer.bias


def log_balance(
    trainer: Any,
    recorder: Recorder,
    print_table: bool = True,
    *,
    bias_rate: float | None = None,
    group: Any = None,
) -> Any:
    """Log load measures of a transformers Trainer's model wherever its ``report_to`` says.

    Args:
        trainer: transformers.Trainer; gets one more callback.
        recorder: recorder of the model, active while the Trainer trains it.
        print_table: print :func:`balance_table` when training ends.
        bias_rate: also call :func:`update_expert_bias` with this rate after each optimiser step.
        group: process group over which counts are summed; None counts only this process.

    Returns:
        The callback. It closes the recorder's step after each optimiser step; evaluations in
        between do not count.
    """
    from transformers import TrainerCallback

    class BalanceCallback(TrainerCallback):
        """Closes a step per optimiser step, logs with the Trainer's own logs, prints at the end."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            recorder.drop()  # an evaluation after the last step must not count in this one

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if bias_rate is not None:
                update_expert_bias(trainer.model, recorder, bias_rate, group)
            recorder.step(group)
            self._log(control)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._log(control)  # logging_strategy="epoch" sets should_log only here

        def _log(self, control: Any) -> None:
            if control.should_log and recorder.history:
                trainer.log(balance_metrics(recorder.history[-1]))

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if print_table and state.is_world_process_zero:
                print(balance_table(recorder))

    callback = BalanceCallback()
    trainer.add_callback(callback)
    return callback
