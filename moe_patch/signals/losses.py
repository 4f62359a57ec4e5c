"""Scores and losses made from recorded norms.

With M_A = ||y_tk|| (act_norm) and the surprise M_G, which the option ``gradient`` selects:

    params         grad_norm_params, the default
    output         grad_norm_output: w_tk times a constant of the token, nothing about the expert
    expert         the same for all rows of an expert: the root of the sum of their squares

and from these

    delta_sc       z(M_A) - z(M_G), z over the experts that the token chose (population std)
    target         argmax delta_sc, or argmin surprise; ties to the lower expert id
    smk_loss       ce * CE(logits, target) + kl * KL(softmax(-M_G / mean M_G) || softmax(logits)),
                   both over the chosen experts
    gate_accuracy  how often the router's first choice is the target
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_patch.errors import PatchStateError, UnsupportedModelError, UnsupportedOptionError
from moe_patch.runtime.adapters import is_param_wrapper, paused
from moe_patch.runtime.module_patch import patch_of
from moe_patch.runtime.spec import read
from moe_patch.runtime.taps import LayerSignals
from moe_patch.schema import check_choice
from moe_patch.signals.recorder import Recorder, require_whole

TARGETS = ("delta_sc", "surprise")
GRADIENTS = {
    "params": "grad_norm_params",
    "output": "grad_norm_output",
    "expert": "grad_norm_params",
}


class Row(NamedTuple):
    """Input of the scores: ids, slots that hold an expert, M_A and M_G, all [T, K]."""

    ids_TK: Tensor
    valid_TK: Tensor
    activation_TK: Tensor
    surprise_TK: Tensor

    @property
    def kept_T(self) -> Tensor:
        """Return rows with any surprise; the others (padding, masked labels) carry no signal."""
        return (self.valid_TK & (self.surprise_TK > 0)).any(-1)


def delta_sc(recorder: Recorder, gradient: str = "params") -> dict[str, Tensor]:
    """Return z(M_A) - z(M_G) per row, [T, K] by block path; 0 in empty slots.

    Args:
        recorder: after backward.
        gradient: the norm used as M_G: "params", or for comparison "output" or "expert" (see the
            head of this module). "output" says nothing about the expert and "expert" nothing about
            the token; docs/signals.md shows what a router learns from each.

    Raises:
        PatchStateError: no backward since the newest forward, or a family without these norms.
        UnsupportedOptionError: one expert per token (there is nothing to compare), or a wrong word.
    """
    return {path: delta_of(row) for path, row in rows_of(recorder, gradient).items()}


def gate_accuracy(
    recorder: Recorder, target: str = "delta_sc", gradient: str = "params"
) -> dict[str, Tensor]:
    """Return how often the router's first choice (slot 0) is the target, a scalar by block path.

    Rows without surprise are left out; the result is NaN if none remain. Arguments and errors as
    :func:`delta_sc`; ``target`` is "delta_sc" or "surprise".
    """
    found = {}
    for path, row in rows_of(recorder, gradient).items():
        hits_T = (_target(row, target) == 0) & row.kept_T
        found[path] = hits_T.sum().double() / row.kept_T.sum()
    return found


def smk_loss(
    recorder: Recorder,
    model: nn.Module,
    target: str = "delta_sc",
    ce: float = 1.0,
    kl: float = 1.0,
    gradient: str = "params",
) -> Tensor:
    """Return a loss that teaches each router the chosen expert that the backward pass favours.

    The logits are computed again from the recorded, detached router input. This uses the router's
    own expression, with adapters and without hooks. The gradient therefore reaches only router
    parameters. Call it after the main backward, when the first graph has been freed.

    Args:
        recorder: of ``record(model, router_input=True)``, after backward.
        model: the recorded model.
        target: "delta_sc" (argmax) or "surprise" (argmin).
        ce, kl: factors of the two terms.
        gradient: as :func:`delta_sc`.

    Returns:
        A scalar: the mean over rows with any surprise, then over layers.

    Raises:
        PatchStateError: no router input or no norms were recorded.
        UnsupportedModelError: the router's parameters are sharded (FSDP2).
        UnsupportedOptionError: one expert per token, or a wrong word.
    """
    check_choice("target", target, TARGETS)
    losses = []
    for path, row in rows_of(recorder, gradient).items():
        logits_TE = router_logits(model, recorder.layers[path])
        losses.append(_layer_loss(row, logits_TE, _target(row, target), ce, kl))
    return torch.stack(losses).mean()


def router_logits(model: nn.Module, layer: LayerSignals) -> Tensor:
    """Compute a recorded layer's logits again, [T, E], with a graph to the router's parameters.

    Raises:
        PatchStateError: the router's input was not recorded.
        UnsupportedModelError: the router's parameters are sharded, or the family's router runs a
            forward of its own.
    """
    if layer.router_input is None or layer.router_path is None:
        why = layer.missing.get("router_input", "use record(model, router_input=True)")
        raise PatchStateError(f"{layer.path}: no router input was recorded: {why}")
    if layer.no_logits is not None:
        raise UnsupportedModelError(
            f"{layer.path}: the router's logits cannot be computed again: {layer.no_logits}; "
            "accepted: blocks whose router runs moe_patch's common router forward"
        )
    router = model.get_submodule(layer.router_path)
    patch = patch_of(router)
    if patch is None:
        raise PatchStateError(f"{layer.router_path} is no longer patched; call patch_model")
    require_whole(router, f"smk_loss: {layer.router_path}")
    assert patch.spec.logits is not None
    adapted = {f"router.{name}": t for name, t in _adapted(model, router).items()}
    logits: Tensor = torch.func.functional_call(
        _Logits(router, patch.spec.logits), adapted, (layer.router_input,)
    )
    return logits


class _Logits(nn.Module):
    """The logits expression as a module of its own, so that no hook of the router fires."""

    def __init__(self, router: nn.Module, expression: Any) -> None:
        super().__init__()
        self.router = router
        self.expression = expression

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.expression(self.router, x_TD)


def _adapted(model: nn.Module, router: nn.Module) -> dict[str, Tensor]:
    """Return router parameters with their active adapters added, by name."""
    tensors: dict[str, Tensor] = {}
    for wrapper in model.modules():
        if not is_param_wrapper(wrapper):
            continue
        found: Any = wrapper
        if found.get_base_layer() is not router or paused(found) is not None:
            continue
        name = found.parameter_name
        for adapter in found.active_adapters:
            if adapter in found.lora_A:
                before = tensors[name] if name in tensors else read(router, name)
                tensors[name] = before + found.get_delta_weight(adapter)
    return tensors


def rows_of(recorder: Recorder, gradient: str) -> dict[str, Row]:
    """Return the input of the scores for every recorded layer; errors as :func:`delta_sc`."""
    check_choice("gradient", gradient, tuple(GRADIENTS))
    rows = {}
    for path, layer in recorder.layers.items():
        norms = [_recorded(layer, name) for name in ("act_norm", GRADIENTS[gradient])]
        ids_TK = _recorded(layer, "ids")
        if ids_TK.shape[1] == 1:
            raise UnsupportedOptionError(
                f"{path}: one expert per token; scores over the chosen experts need at least two"
            )
        experts = _recorded(layer, "tokens_per_expert").shape[0]
        row = Row(ids_TK, (ids_TK >= 0) & (ids_TK < experts), *norms)
        if gradient == "expert":
            total_E = sum_by_expert(row.surprise_TK.square(), ids_TK, experts).sqrt()
            of_expert_TK = total_E[ids_TK.long().clamp(0, experts - 1)]
            silent_TK = ~(row.valid_TK & row.kept_T.unsqueeze(1))
            row = row._replace(surprise_TK=of_expert_TK.masked_fill(silent_TK, 0.0))
        rows[path] = row
    return rows


def sum_by_expert(values_TK: Tensor, ids_TK: Tensor, experts: int) -> Tensor:
    """Return the sum of each expert's rows, [E], in a fixed order, unlike a scattered addition."""
    here_TKE = ids_TK.unsqueeze(-1) == torch.arange(experts, device=ids_TK.device)
    return torch.where(here_TKE, values_TK.unsqueeze(-1), 0.0).sum((0, 1))


def _recorded(layer: LayerSignals, name: str) -> Tensor:
    value: Tensor | None = getattr(layer, name)
    if value is None:
        why = layer.missing.get(name, "run forward and backward inside `with record(model)` first")
        raise PatchStateError(f"{layer.path}: {name} was not recorded: {why}")
    return value


def delta_of(row: Row) -> Tensor:
    """Return delta_sc of one layer, [T, K]."""
    return _z(row.activation_TK, row.valid_TK) - _z(row.surprise_TK, row.valid_TK)


def _z(values_TK: Tensor, valid_TK: Tensor) -> Tensor:
    """Return z-scores over a row's valid slots with the population std; 0 if all are equal."""
    count_T1 = valid_TK.sum(-1, keepdim=True).clamp(min=1)
    mean_T1 = values_TK.masked_fill(~valid_TK, 0.0).sum(-1, keepdim=True) / count_T1
    off_TK = (values_TK - mean_T1).masked_fill(~valid_TK, 0.0)
    # The mean of equal values may differ from them by rounding; squares of small norms underflow.
    low, high = (values_TK.masked_fill(~valid_TK, sign * float("inf")) for sign in (1, -1))
    low_T1, high_T1 = low.amin(-1, keepdim=True), high.amax(-1, keepdim=True)
    differs_T1 = high_T1 > low_T1
    off_TK = off_TK / torch.where(differs_T1, high_T1 - low_T1, 1.0)
    std_T1 = (off_TK.square().sum(-1, keepdim=True) / count_T1).sqrt()
    z_TK = off_TK / torch.where(differs_T1, std_T1, 1.0)
    # Use exactly 1 and -1 for two values: with rounding, equal scores would no longer tie.
    pair_TK = torch.where(values_TK == high_T1, 1.0, -1.0).masked_fill(~valid_TK, 0.0)
    return torch.where(differs_T1, torch.where(count_T1 == 2, pair_TK, z_TK), 0.0)


def _target(row: Row, target: str) -> Tensor:
    """Return the slot of the target expert, [T]."""
    check_choice("target", target, TARGETS)
    score_TK = delta_of(row) if target == "delta_sc" else -row.surprise_TK
    score_TK = score_TK.masked_fill(~row.valid_TK, -float("inf"))
    best_TK = score_TK == score_TK.amax(-1, keepdim=True)
    last = torch.iinfo(row.ids_TK.dtype).max
    return row.ids_TK.masked_fill(~(best_TK & row.valid_TK), last).argmin(-1)


def _layer_loss(row: Row, logits_TE: Tensor, target_T: Tensor, ce: float, kl: float) -> Tensor:
    kept_T = row.kept_T
    # Even a row that is left out needs finite numbers: anomaly detection checks inner gradients.
    valid_TK = row.valid_TK | ~kept_T.unsqueeze(1)
    wide = torch.promote_types(logits_TE.dtype, torch.float32)
    ids_TK = row.ids_TK.long().clamp(0, logits_TE.shape[1] - 1)
    chosen_TK = logits_TE.gather(1, ids_TK).to(wide).masked_fill(~valid_TK, -float("inf"))
    log_q_TK = torch.log_softmax(chosen_TK, dim=-1)
    surprise_TK = row.surprise_TK.to(wide).masked_fill(~valid_TK, 0.0)
    mean_T1 = surprise_TK.sum(-1, keepdim=True) / valid_TK.sum(-1, keepdim=True)
    scaled_TK = surprise_TK / torch.where(kept_T.unsqueeze(1), mean_T1, 1.0)
    log_p_TK = torch.log_softmax((-scaled_TK).masked_fill(~valid_TK, -float("inf")), dim=-1)
    gap_TK = torch.where(valid_TK, log_p_TK - log_q_TK, 0.0)
    loss_T = kl * (log_p_TK.exp() * gap_TK).sum(-1)
    loss_T = loss_T - ce * log_q_TK.gather(1, target_T.unsqueeze(1)).squeeze(1)
    return torch.where(kept_T, loss_T, 0.0).sum() / kept_T.sum().clamp(min=1)
