"""Product-key routing: choose among E = P*P experts from two rows of P logits, without P*P sums.

:func:`product_key_reference` is the definition, in torch. :func:`product_key_topk` runs it on a CPU
and the Triton kernels on CUDA. Source: product keys (arXiv:1907.05242 section 3.1), as in Doge's
cross-domain experts.
"""

from __future__ import annotations

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
from moe_patch.ops.routing import best_ids, stable_topk
from moe_patch.types import Routing

NEG_INF = float("-inf")
MAX_KEYS = 1024
MAX_TOP_K = 64
SCORES = ("softmax", "none")
_WHERE = "moe_patch.ops.product_key.product_key_topk"


def product_key_reference(
    logits_x_TP: Tensor,
    logits_y_TP: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    renormalize: bool = False,
) -> Routing:
    """Define :func:`product_key_topk` in differentiable torch, for any floating dtype.

    Raises:
        UnsupportedOptionError: as :func:`product_key_topk`.
    """
    _check_pair(logits_x_TP, logits_y_TP)
    T, P = logits_x_TP.shape
    kept = min(top_k, P)
    x_Tk, ix_Tk = stable_topk(logits_x_TP, kept)
    y_Tk, iy_Tk = stable_topk(logits_y_TP, kept)
    sum_TC = (x_Tk[:, :, None] + y_Tk[:, None, :]).view(T, kept * kept)
    id_TC = (ix_Tk[:, :, None] * P + iy_Tk[:, None, :]).view(T, kept * kept)
    absent_TC = ((x_Tk == NEG_INF)[:, :, None] | (y_Tk == NEG_INF)[:, None, :]).view(T, kept * kept)
    absent_TC = absent_TC | (sum_TC == NEG_INF)
    id_TC, order_TC = id_TC.sort(dim=-1)
    candidate_TC = sum_TC.masked_fill(absent_TC, NEG_INF).gather(1, order_TC)
    place_TK = best_ids(candidate_TC, min(top_k, kept * kept))
    value_TK = candidate_TC.gather(1, place_TK)
    ids_TK = id_TC.gather(1, place_TK).masked_fill(value_TK == NEG_INF, -1)
    missing = top_k - ids_TK.shape[1]
    value_TK = torch.nn.functional.pad(value_TK, (0, missing), value=NEG_INF)
    ids_TK = torch.nn.functional.pad(ids_TK, (0, missing), value=-1)
    return Routing(
        ids_TK, _weights(value_TK, ids_TK, score, renormalize), logits_x_TP.new_empty(T, 0)
    )


def _weights(value_TK: Tensor, ids_TK: Tensor, score: str, renormalize: bool) -> Tensor:
    empty_TK = ids_TK < 0
    if score == "none":
        return value_TK.masked_fill(empty_TK, 0.0)
    # In a row without candidates, a finite value replaces -inf to keep NaN out of the gradient.
    none_T1 = empty_TK.all(dim=-1, keepdim=True)
    weights_TK = torch.softmax(value_TK.masked_fill(none_T1, 0.0), dim=-1)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return weights_TK.masked_fill(empty_TK, 0.0)


def product_key_topk(
    logits_x_TP: Tensor,
    logits_y_TP: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    renormalize: bool = False,
    backend: str = "auto",
) -> Routing:
    """Choose the ``top_k`` experts with the largest ``x[ix] + y[iy]``; expert id = ix * P + iy.

    First take the best k of x and the best k of y (equal logits: lower index first). Then take the
    best k of the k * k sums, each rounded to the logits' dtype (equal sums: lower id first).

    A logit of -inf excludes its whole row or column of experts; a sum of -inf excludes its expert.
    If fewer than k experts remain, the last choices are empty: id -1 and weight 0. NaN counts as
    larger than every number and propagates to the weights.

    A Doge block calls this with ``x, y = router_gate(h).view(2, T, P)``, ``score="softmax"`` and
    ``renormalize=config.norm_topk_prob``.

    Args:
        logits_x_TP, logits_y_TP: fp32, bf16 or fp16 (on the torch backend also fp64), both of one
            dtype, any strides; P at most 1024.
        top_k: at most 64; may exceed P.
        score: "softmax" over the k sums, or "none" for the sums themselves.
        renormalize: divide the softmax weights by their sum once more (after rounding).
        backend: "auto", "torch" or "triton", as in :func:`moe_patch.patch_model`.

    Returns:
        Routing in descending order of the sums, with int64 ids. The weights have the logits' dtype
        and are differentiable in both logits. ``logits_TE`` is empty, [T, 0], because the E logits
        are never formed.

    Raises:
        UnsupportedOptionError: a shape, dtype or option is not listed above, or a forward-mode
            derivative of the Triton kernels is requested.
    """
    _check(logits_x_TP, logits_y_TP, top_k, score)
    if choose_backend(backend, logits_x_TP.device, logits_x_TP.dtype).name == "torch":
        return product_key_reference(
            logits_x_TP, logits_y_TP, top_k, score=score, renormalize=renormalize
        )
    return product_key_triton(logits_x_TP, logits_y_TP, top_k, score=score, renormalize=renormalize)


def product_key_triton(
    logits_x_TP: Tensor,
    logits_y_TP: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    renormalize: bool = False,
) -> Routing:
    """Run :func:`product_key_topk` on the Triton kernels, without checking the arguments."""
    refuse_forward_mode(logits_x_TP, logits_y_TP, what="product_key_topk")
    ids_TK, weights_TK = torch.ops.moe_patch.product_key_forward(
        logits_x_TP, logits_y_TP, top_k, score, renormalize
    )
    return Routing(ids_TK, weights_TK, logits_x_TP.new_empty(logits_x_TP.shape[0], 0))


def _check_pair(logits_x_TP: Tensor, logits_y_TP: Tensor) -> None:
    for name, logits_TP in (("logits_x_TP", logits_x_TP), ("logits_y_TP", logits_y_TP)):
        check_logits(logits_TP, _WHERE, name, "tokens, keys")
    if logits_x_TP.shape != logits_y_TP.shape or logits_x_TP.dtype != logits_y_TP.dtype:
        _refuse(
            f"x is {logits_x_TP.dtype} {tuple(logits_x_TP.shape)}, y is {logits_y_TP.dtype} "
            f"{tuple(logits_y_TP.shape)}; both must be [tokens, keys] of one dtype"
        )


def _check(logits_x_TP: Tensor, logits_y_TP: Tensor, top_k: int, score: str) -> None:
    _check_pair(logits_x_TP, logits_y_TP)
    if score not in SCORES:
        _refuse(f"score={score!r}; accepted: {', '.join(SCORES)}")
    if not 1 <= top_k <= MAX_TOP_K or not 1 <= logits_x_TP.shape[1] <= MAX_KEYS:
        _refuse(
            f"top_k={top_k} with {logits_x_TP.shape[1]} keys per axis; accepted: top_k from 1 to "
            f"{MAX_TOP_K} and 1 to {MAX_KEYS} keys"
        )


def _refuse(found: str) -> None:
    raise UnsupportedOptionError(f"{_WHERE}: {found}")


def _forward(
    logits_x_TP: Tensor, logits_y_TP: Tensor, top_k: int, score: str, renormalize: bool
) -> tuple[Tensor, Tensor]:
    from moe_patch.kernels.routing.product_key import product_key_forward

    return product_key_forward(
        logits_x_TP, logits_y_TP, top_k, softmax=score == "softmax", renormalize=renormalize
    )


def _forward_fake(
    logits_x_TP: Tensor, logits_y_TP: Tensor, top_k: int, score: str, renormalize: bool
) -> tuple[Tensor, Tensor]:
    T = logits_x_TP.shape[0]
    return logits_x_TP.new_empty((T, top_k), dtype=torch.int64), logits_x_TP.new_empty((T, top_k))


def _backward(
    dweights_TK: Tensor, x_TP: Tensor, y_TP: Tensor, ids_TK: Tensor, score: str, renormalize: bool
) -> tuple[Tensor, Tensor]:
    from moe_patch.kernels.routing.product_key import product_key_backward

    return product_key_backward(
        dweights_TK, x_TP, y_TP, ids_TK, softmax=score == "softmax", renormalize=renormalize
    )


def _backward_fake(
    dweights_TK: Tensor, x_TP: Tensor, y_TP: Tensor, ids_TK: Tensor, score: str, renormalize: bool
) -> tuple[Tensor, Tensor]:
    return x_TP.new_empty(x_TP.shape), y_TP.new_empty(y_TP.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[0])
    ctx.mark_non_differentiable(output[0])
    ctx.set_materialize_grads(False)
    ctx.options = inputs[3:]


def _autograd(ctx: Any, dids: Any, dweights_TK: Tensor | None) -> tuple[Any, ...]:
    if dweights_TK is None:
        return None, None, None, None, None
    dx_TP, dy_TP = torch.ops.moe_patch.product_key_backward(
        dweights_TK, *ctx.saved_tensors, *ctx.options
    )
    return dx_TP, dy_TP, None, None, None


_OPTIONS = "str score, bool renormalize"
define(
    "moe_patch::product_key_forward",
    f"(Tensor logits_x, Tensor logits_y, int top_k, {_OPTIONS}) -> (Tensor, Tensor)",
    _forward, _forward_fake, _autograd, _setup_context,
)  # fmt: skip
define(
    "moe_patch::product_key_backward",
    f"(Tensor dweights, Tensor x, Tensor y, Tensor ids, {_OPTIONS}) -> (Tensor, Tensor)",
    _backward, _backward_fake,
)  # fmt: skip
