"""The update filter: only the experts with the lowest or highest scores keep their gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.errors import UnsupportedOptionError
from moe_patch.patching.discover import discover
from moe_patch.schema import check_choice
from moe_patch.signals.losses import TARGETS, Row, delta_of, rows_of, sum_by_expert
from moe_patch.signals.recorder import Recorder, require_whole

KEEP = ("min", "max")


def keep_updates(
    recorder: Recorder,
    model: nn.Module,
    k: int,
    by: str = "surprise",
    keep: str = "min",
    gradient: str = "params",
) -> dict[str, Tensor]:
    """Zero the gradients of all experts but ``k`` per layer, between backward and the optimiser.

    An expert's score is the mean of its rows' surprise or delta_sc. Experts without rows come last;
    ties go to the lower id. Base weights, biases and low-rank factors are filtered.

    Args:
        recorder, gradient: as :func:`delta_sc`.
        model: the recorded model; ``.grad`` of its experts is written in place.
        k: experts per layer that keep their gradient.
        by: "surprise" or "delta_sc".
        keep: "min" keeps the lowest scores, "max" the highest.

    Returns:
        Block path -> bool [E], which experts kept their gradient.

    Raises:
        UnsupportedModelError: the experts' parameters are sharded (FSDP2).
        UnsupportedOptionError: ``k`` is below 1, or a word is wrong.
    """
    if k < 1:
        raise UnsupportedOptionError(
            f"keep_updates: k is {k}; accepted: at least 1 expert per layer"
        )
    check_choice("by", by, TARGETS)
    check_choice("keep", keep, KEEP)
    blocks = {block.path: block for block in discover(model)}
    masks = {}
    for path, row in rows_of(recorder, gradient).items():
        counts = recorder.layers[path].tokens_per_expert
        assert counts is not None
        score_TK = row.surprise_TK if by == "surprise" else delta_of(row)
        masks[path] = _best_experts(row, score_TK, counts, k, keep)
        for name, experts in blocks[path].experts:
            require_whole(experts, f"keep_updates: {name}")
            _filter_base(experts, masks[path])
        for _, wrapper in blocks[path].wrappers:
            _filter_factors(wrapper, masks[path])
    return masks


def _best_experts(row: Row, score_TK: Tensor, counts_E: Tensor, k: int, keep: str) -> Tensor:
    """Return bool [E]: the k experts with the lowest or highest mean score."""
    E = counts_E.shape[0]
    mean_E = sum_by_expert(score_TK, row.ids_TK, E) / counts_E.clamp(min=1)
    order_E = mean_E if keep == "min" else -mean_E
    order_E = order_E.masked_fill(counts_E == 0, float("inf"))
    best = torch.sort(order_E, stable=True).indices[:k]
    return torch.zeros_like(counts_E, dtype=torch.bool).index_fill(0, best, True)


def _filter_base(experts: nn.Module, kept_E: Tensor) -> None:
    for parameter in experts.parameters():
        grad = parameter.grad
        if grad is not None and grad.shape[0] == kept_E.shape[0]:
            grad.masked_fill_(~kept_E.view(-1, *(1,) * (grad.dim() - 1)), 0.0)


def _filter_factors(wrapper: Any, kept_E: Tensor) -> None:
    """Filter the gradients of PEFT's factors, packed as A (E * R, in) and B (out, R * E)."""
    E = kept_E.shape[0]
    for name, a in wrapper.lora_A.items():
        b = wrapper.lora_B[name]
        if a.weight.grad is not None:
            grad = a.weight.grad
            grad.view(E, -1, grad.shape[1]).masked_fill_(~kept_E.view(E, 1, 1), 0.0)
        if b.weight.grad is not None:
            grad = b.weight.grad
            grad.view(grad.shape[0], -1, E).masked_fill_(~kept_E, 0.0)
