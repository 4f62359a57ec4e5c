"""Auxiliary router losses from recorded router logits: load balance and z.

Both losses are computed from per-layer sums over rows. No intermediate is larger than
[tokens, experts], the choices are never one-hot encoded, and backward saves only the logits. A
single pass over the logits computes both (:func:`router_losses`).

Sources: load balance, Switch Transformer (arXiv:2101.03961 equations 4 to 6) in the form of
transformers' ``load_balancing_loss_func``; z loss, ST-MoE (arXiv:2202.08906 equation 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_patch.errors import (
    UnsupportedOptionError,
    check_logits,
    refuse_forward_mode,
)
from moe_patch.ops.backend import choose_backend
from moe_patch.ops.define import define
from moe_patch.ops.routing import best_ids


def load_balancing_loss(
    gate_logits: Tensor | Sequence[Tensor] | None,
    num_experts: int | None = None,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
) -> Tensor | int:
    """Return E * sum_e f_e * p_e; expert e has the share f_e of choices and mean probability p_e.

    Drop-in replacement for transformers' ``load_balancing_loss_func``: same arguments and same
    result, including where the softmax is rounded to bf16. Only a tie for the k-th place differs:
    here the lower id wins, in transformers the winner is undefined.

    Args:
        gate_logits: one tensor per layer, each [batch * sequence, experts]; a single tensor means
            one layer. Anything else gives 0, as in transformers (a model that recorded no logits).
        num_experts: E; must equal the last dimension of the logits.
        top_k: experts chosen per token.
        attention_mask: [batch, sequence], 0 for tokens to ignore.

    Returns:
        fp32 scalar, differentiable in the logits.

    Raises:
        UnsupportedOptionError: as :func:`router_losses`, or ``num_experts`` does not match.
    """
    layers = _layers(gate_logits)
    if not layers:
        return 0
    _check(layers, top_k)
    if num_experts is not None and num_experts != (width := layers[0].shape[1]):
        raise UnsupportedOptionError(
            f"balance_loss: num_experts={num_experts}, but the logits have {width} columns"
        )
    balance, _ = router_losses(layers, top_k, attention_mask)
    return balance


def router_z_loss(
    gate_logits: Tensor | Sequence[Tensor] | None, attention_mask: Tensor | None = None
) -> Tensor | int:
    """Return the mean of logsumexp(logits)^2 over layers and unmasked tokens.

    Takes the arguments of :func:`load_balancing_loss`.
    """
    layers = _layers(gate_logits)
    if not layers:
        return 0
    _, z = router_losses(layers, 1, attention_mask)
    return z


def router_losses(
    layers: Sequence[Tensor], top_k: int, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute (load_balancing_loss, router_z_loss) in one pass over the logits of all layers.

    Raises:
        UnsupportedOptionError: no layers; logits that are not floating-point matrices of one width;
            ``top_k`` greater than the number of experts; a mask for another number of tokens.
    """
    _check(layers, top_k)
    device = layers[0].device
    mask_T = None
    if attention_mask is not None:
        mask_T = attention_mask.reshape(-1).to(device=device, dtype=torch.float32)
        _check_mask(attention_mask, layers)
    E = layers[0].shape[1]
    tokens_E = torch.zeros(E, dtype=torch.float32, device=device)
    probabilities_E, z = torch.zeros_like(tokens_E), torch.zeros((), device=device)
    for logits_TE in layers:
        logits_TE = logits_TE.to(device)
        refuse_forward_mode(logits_TE, what="router losses")
        more_tokens_E, more_probabilities_E, more_z = torch.ops.moe_patch.router_sums(
            logits_TE, mask_T, top_k
        )
        tokens_E = tokens_E + more_tokens_E
        probabilities_E = probabilities_E + more_probabilities_E
        z = z + more_z
    if mask_T is None:
        rows: Tensor | int = sum(logits_TE.shape[0] for logits_TE in layers)
    else:
        rows = mask_T.sum() * len(layers)
    balance = torch.sum((tokens_E / rows) * (probabilities_E / rows)) * E
    return balance, z / rows


def _check_mask(mask: Tensor, layers: Sequence[Tensor]) -> None:
    """Refuse a mask of another size, because the kernel reads one mask value per row, unchecked."""
    for place, logits_TE in enumerate(layers):
        if mask.numel() != logits_TE.shape[0]:
            raise UnsupportedOptionError(
                f"balance_loss: attention_mask is {tuple(mask.shape)}, {mask.numel()} tokens, but "
                f"the logits of layer {place} have {logits_TE.shape[0]}; accepted: a mask [batch, "
                "sequence] with one value for each token of the logits"
            )


def _layers(gate_logits: Tensor | Sequence[Tensor] | None) -> list[Tensor]:
    if isinstance(gate_logits, Tensor):
        return [gate_logits]
    return list(gate_logits) if isinstance(gate_logits, tuple | list) else []


def _check(layers: Sequence[Tensor], top_k: int) -> None:
    if not layers:
        raise UnsupportedOptionError(
            "moe_patch.ops.balance_loss: no router logits; accepted: logits of at least one layer"
        )
    for place, logits_TE in enumerate(layers):
        check_logits(logits_TE, "moe_patch.ops.balance_loss", f"gate_logits of layer {place}")
        if logits_TE.shape[1] != (width := layers[0].shape[1]):
            raise UnsupportedOptionError(
                f"balance_loss: the logits of layer {place} have {logits_TE.shape[1]} columns, the "
                f"logits of layer 0 have {width}; accepted: the same number in all layers"
            )
    if not 1 <= top_k <= width:
        raise UnsupportedOptionError(
            f"balance_loss: top_k={top_k}; accepted: 1 to {width}, the number of experts"
        )


Sums = tuple[Tensor, Tensor, Tensor]


def _sums(logits_TE: Tensor, mask_T: Tensor | None, top_k: int) -> Sums:
    if choose_backend("auto", logits_TE.device, logits_TE.dtype).name == "triton":
        from moe_patch.kernels.routing.losses import router_sums

        return tuple(part.clone() for part in router_sums(logits_TE, mask_T, top_k))
    return sums_torch(logits_TE, mask_T, top_k)


def sums_torch(logits_TE: Tensor, mask_T: Tensor | None, top_k: int) -> Sums:
    """Compute (tokens_E, probabilities_E, z), as ``kernels.routing.losses.router_sums`` does."""
    T, E = logits_TE.shape
    softmax_TE = torch.softmax(logits_TE, dim=-1)
    ids_TK = best_ids(softmax_TE, top_k)
    weight_T = logits_TE.new_ones(T, dtype=torch.float32) if mask_T is None else mask_T
    tokens_E = torch.zeros(E, dtype=torch.float32, device=logits_TE.device)
    tokens_E.scatter_add_(0, ids_TK.reshape(-1), weight_T.repeat_interleave(top_k))
    lse_T = torch.logsumexp(_wide(logits_TE), dim=-1).float()
    return (
        tokens_E,
        (softmax_TE.float() * weight_T[:, None]).sum(0),
        (lse_T.square() * weight_T).sum(),
    )


def _sums_backward(
    dprobabilities_E: Tensor, dz: Tensor, logits_TE: Tensor, mask_T: Tensor | None
) -> Tensor:
    if choose_backend("auto", logits_TE.device, logits_TE.dtype).name == "triton":
        from moe_patch.kernels.routing.losses import router_sums_backward

        return router_sums_backward(dprobabilities_E, dz, logits_TE, mask_T)
    return sums_backward_torch(dprobabilities_E, dz, logits_TE, mask_T)


def sums_backward_torch(
    dprobabilities_E: Tensor, dz: Tensor, logits_TE: Tensor, mask_T: Tensor | None
) -> Tensor:
    """Compute the gradient of the logits, as ``kernels.routing.losses`` does in backward."""
    wide_TE = _wide(logits_TE)
    softmax_TE = torch.softmax(wide_TE, dim=-1)
    slope_TE = dprobabilities_E - (softmax_TE @ dprobabilities_E.to(wide_TE.dtype))[:, None]
    slope_TE = slope_TE + 2 * dz * torch.logsumexp(wide_TE, dim=-1, keepdim=True)
    dlogits_TE = softmax_TE * slope_TE
    if mask_T is not None:
        dlogits_TE = dlogits_TE * mask_T[:, None]
    return dlogits_TE.to(logits_TE.dtype)


def _wide(logits_TE: Tensor) -> Tensor:
    return logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()


def _sums_fake(logits_TE: Tensor, mask_T: Tensor | None, top_k: int) -> Sums:
    new = logits_TE.new_empty
    E = logits_TE.shape[1]
    return (
        new((E,), dtype=torch.float32),
        new((E,), dtype=torch.float32),
        new((), dtype=torch.float32),
    )


def _sums_backward_fake(
    dprobabilities_E: Tensor, dz: Tensor, logits_TE: Tensor, mask_T: Tensor | None
) -> Tensor:
    return torch.empty(logits_TE.shape, dtype=logits_TE.dtype, device=logits_TE.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Sums) -> None:
    ctx.mark_non_differentiable(output[0])
    ctx.save_for_backward(inputs[0], inputs[1])


def _autograd(ctx: Any, dtokens: Any, dprobabilities_E: Tensor, dz: Tensor) -> tuple[Any, ...]:
    logits_TE, mask_T = ctx.saved_tensors
    dlogits_TE = torch.ops.moe_patch.router_sums_backward(dprobabilities_E, dz, logits_TE, mask_T)
    return dlogits_TE, None, None


define(
    "moe_patch::router_sums",
    "(Tensor logits, Tensor? mask, int top_k) -> (Tensor, Tensor, Tensor)",
    _sums, _sums_fake, _autograd, _setup_context,
)  # fmt: skip
define(
    "moe_patch::router_sums_backward",
    "(Tensor dprobabilities, Tensor dz, Tensor logits, Tensor? mask) -> Tensor",
    _sums_backward, _sums_backward_fake,
)  # fmt: skip
