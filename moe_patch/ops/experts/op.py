"""The experts operator. All other packages call ``experts_mlp``.

It dispatches to ``torch.ops.moe_patch.experts``, which ops/experts/autograd.py defines together
with its backward. In plain eager execution the functions behind the operators are called without
torch's dispatcher (ops/direct.py). A backend implements ``experts_forward`` and
``experts_backward``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_patch.errors import refuse_forward_mode
from moe_patch.formats.packed import plain_weights
from moe_patch.ops.backend import choose_backend
from moe_patch.ops.direct import is_plain_eager
from moe_patch.ops.experts import schema
from moe_patch.ops.experts.autograd import Call, Experts, Lend
from moe_patch.ops.experts.long_context import chunks_of
from moe_patch.ops.experts.schema import encode_options
from moe_patch.types import ExpertWeights, Glu, Lora

_OPERATORS: Any = torch.ops.moe_patch
_NO_LORA = (None, None, 1.0)


@dataclass
class Signals:
    """Per-row signals of one experts call, written by forward and backward.

    Attributes:
        act_norm_TK: ||y_tk||, set by forward.
        grads_3TK: written by backward, fp32 (fp64 for fp64 models). Holds ||dL/dy_tk|| and the
            norms of the row's contribution to two sums: the gradients of the parameters, and of the
            low-rank factors (zeros without LoRA).
    """

    grads_3TK: Tensor
    act_norm_TK: Tensor | None = None


def experts_mlp(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w: ExpertWeights,
    glu: Glu,
    *,
    lora13: Lora | None = None,
    lora2: Lora | None = None,
    backend: str = "auto",
    recompute: bool = False,
    batch_invariant: bool = False,
    chunk_tokens: int | str = 0,
    signals: Signals | None = None,
    lend: Lend | None = None,
) -> Tensor:
    """Return the weighted sum of each token's expert MLPs, differentiable in all float inputs.

    Args:
        x_TD: hidden states; x and the weights share one floating dtype.
        ids_TK: integer expert ids; an id outside [0, E) is an empty slot (weight and gradient 0).
        weights_TK: routing weights, any floating dtype.
        w, glu: weights of the experts ([E, out, in] views, or PackedWeight for both projections)
            and their activation.
        lora13, lora2: low-rank factors of the up and the down projection, any floating dtype. They
            are cast for the products, and their gradients are cast back. No cast copy is saved for
            backward.
        backend: "auto", "torch" or "triton".
        recompute: save only the plan between forward and backward. Otherwise h is saved too, and
            the input of each trained factor B (R values per row).
        batch_invariant: make the results of a token independent, bit for bit, of the number of
            tokens and of the other tokens. Applies to its output and to the gradients of x and of
            its routing weights.
        chunk_tokens: run more tokens than this one chunk after another, on the Triton backend; 0
            runs all at once. "auto" limits a chunk's memory (kernels/common/chunks.py). Outputs and
            gradients by token have the same bits; other gradients are summed by chunk, in fp32.
        signals: if given, receives per-row norms.
        lend: if given, autograd does not save w13 and w2: backward enters the context that this
            returns and takes them from there. They get no gradient.

    Returns:
        out_TD in the dtype of x.

    Raises:
        UnsupportedOptionError: the backend cannot run on this device and dtype or with
            ``batch_invariant``, or a forward-mode derivative is requested.
    """
    backend = choose_backend(backend, x_TD.device, x_TD.dtype, batch_invariant).name
    plain, scales, storage = plain_weights(w)
    a13, lb13, s13 = lora13 or _NO_LORA
    a2, lb2, s2 = lora2 or _NO_LORA
    tensors = *plain, a13, lb13, a2, lb2
    inputs = x_TD, weights_TK, *tensors
    refuse_forward_mode(*inputs)
    grad = torch.is_grad_enabled()
    graph = grad and _any_requires_grad(inputs)
    chunk, alone = chunks_of(
        chunk_tokens, backend, x_TD, ids_TK, w, graph=graph, recompute=recompute
    )
    output_only = not grad and signals is None
    encoded = encode_options(glu, backend, batch_invariant, storage, chunk, output_only)
    scalars = s13, s2, glu.alpha, glu.limit, encoded
    if output_only:
        run = (
            schema.inference if is_plain_eager((ids_TK, *inputs)) else _OPERATORS.experts.inference
        )
        return run(x_TD, ids_TK, weights_TK, *tensors, *scalars, scales)
    keep, norms = graph and not recompute, signals is not None
    call = Call(
        scalars,
        [keep, _keeps_u(lora13, keep, norms), _keeps_u(lora2, keep, norms), norms],
        None if signals is None else signals.grads_3TK,
        scales,
        lend,
        chunk,
        alone,
        w.w13_EHD.shape[1],
    )
    # Compilers use the operator's registered formula. In eager mode, autograd.Function takes a
    # third of its time.
    if graph and not torch.compiler.is_compiling():
        found = Experts.apply(x_TD, ids_TK, weights_TK, *tensors, call)
    else:
        found = _OPERATORS.experts.default(*call.arguments(x_TD, ids_TK, weights_TK, tensors))
    if signals is None:
        return found if isinstance(found, Tensor) else found[0]
    signals.act_norm_TK = found[-1].detach()
    return found[0]


def _any_requires_grad(tensors: Iterable[Tensor | None]) -> bool:
    for tensor in tensors:  # noqa: SIM110 (any() over a generator takes three times as long)
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def _keeps_u(lora: Lora | None, keep: bool, norms: bool) -> bool:
    """Return whether forward saves the input of the low-rank factor B for backward."""
    return keep and lora is not None and (norms or lora.B_EOR.requires_grad)
