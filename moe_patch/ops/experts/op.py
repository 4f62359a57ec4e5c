"""The experts as one operator each for forward and backward, with autograd.

All other packages call ``experts_mlp``. It dispatches to ``torch.ops.moe_patch.experts``, and in
backward to ``experts_bwd``. These are opaque operators with fake implementations, so that
``torch.compile``, CUDA graphs and checkpointing see one call (ops/experts/schema.py). A backend
module implements ``experts_forward`` and ``experts_backward``. In plain eager execution they are
called without torch's dispatcher (ops/direct.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_patch.errors import refuse_forward_mode
from moe_patch.formats.packed import plain_weights
from moe_patch.ops.backend import choose_backend
from moe_patch.ops.define import define
from moe_patch.ops.direct import is_plain_eager
from moe_patch.ops.experts import schema
from moe_patch.ops.experts.long_context import chunks_of, drops_rows, without_saved
from moe_patch.ops.experts.schema import encode_options
from moe_patch.types import ExpertWeights, Glu, Lora

Lend = Callable[[], contextlib.AbstractContextManager[ExpertWeights]]

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
    call = _Call(
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
        found = _Experts.apply(x_TD, ids_TK, weights_TK, *tensors, call)
    else:
        found = _OPERATORS.experts.default(*call.arguments(x_TD, ids_TK, weights_TK, tensors))
    if signals is None:
        return found if isinstance(found, Tensor) else found[0]
    signals.act_norm_TK = found[-1].detach()
    return found[0]


class _Call(NamedTuple):
    """Arguments of the operator other than differentiable tensors, in its order.

    Attributes:
        scalars: both scalings, the numbers of the activation, and the options as a string.
        keep: flags of the tensors that forward saves for backward; the last one is True if forward
            returns norms.
        signals: tensor into which backward writes norms, or None.
        scales: scales of packed weights.
        lend: lends the weights to backward, which are then not saved.
        chunk, alone: tokens of a chunk, or 0; the same for a call that keeps nothing.
        width: the width of h.
    """

    scalars: tuple[float | str, ...]
    keep: list[bool]
    signals: Tensor | None
    scales: list[Tensor]
    lend: Lend | None
    chunk: int
    alone: int
    width: int

    def arguments(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, tensors: Sequence[Tensor | None]
    ) -> tuple[Any, ...]:
        """Return all arguments of the operator."""
        scalars, keep, signals, scales, *_ = self
        return x_TD, ids_TK, weights_TK, *tensors, *scalars, keep, signals, scales


def _any_requires_grad(tensors: Iterable[Tensor | None]) -> bool:
    for tensor in tensors:  # noqa: SIM110 (any() over a generator takes three times as long)
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def _keeps_u(lora: Lora | None, keep: bool, norms: bool) -> bool:
    """Return whether forward saves the input of the low-rank factor B for backward."""
    return keep and lora is not None and (norms or lora.B_EOR.requires_grad)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
    ctx.mark_non_differentiable(*output[1:])
    _save(ctx, inputs, output)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, _, weights, *others = inputs
    *operands, _, signals, scales = others
    tensors, scalars = operands[:8], operands[8:]
    _, *for_backward, _ = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weights, *tensors, *for_backward, *scales)
    ctx.scalars, ctx.signals = scalars, signals


def _backward(ctx: Any, dout: Any, *_: Any) -> Any:
    x, weights, *tensors = ctx.saved_tensors
    tensors, from_forward, scales = tensors[:8], tensors[8:14], tensors[14:]
    others = [*(None for _ in ctx.scalars), None, None, [None for _ in scales]]
    if dout is None:
        return (*(None for _ in range(11)), *others)
    wanted = ctx.needs_input_grad
    needs = [wanted[0], *wanted[2:11], ctx.signals is not None]
    *grads, out_TK, params_TK, lora_TK = _OPERATORS.experts_bwd.default(
        dout, x, weights, *tensors, *ctx.scalars, *from_forward, needs, scales
    )
    _fill(ctx.signals, tensors, out_TK, params_TK, lora_TK)
    grads = [g if need else None for g, need in zip(grads, needs[:10], strict=True)]
    return (grads[0], None, *grads[1:], *others)


def _fill(signals: Tensor | None, tensors: Sequence[Tensor | None], *norms_TK: Any) -> None:
    """Write the gradient norms into ``signals``, unless that is None."""
    if signals is None:
        return
    out_TK, params_TK, lora_TK = norms_TK
    if tensors[4] is None and tensors[6] is None:
        lora_TK = torch.zeros_like(out_TK)
    signals.copy_(torch.stack([out_TK, params_TK, lora_TK]))


@functools.cache
def _graph_is_kept() -> Callable[[], bool]:
    """Return a function that tells whether the running backward keeps its graph for another pass.

    It returns True if torch lacks the private name, which is looked up once. torch's compiler uses
    the same name.
    """
    return getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


class _Experts(torch.autograd.Function):
    """Same autograd formula as :func:`_backward`, in a third of the time.

    Autograd takes a microsecond for each argument and each output. So one argument holds all that
    is not a tensor, and tensors for backward are saved without being returned.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, weights: Tensor, *others: Any) -> Any:
        *tensors, call = others
        direct = is_plain_eager((x, ids, weights, *tensors, call.signals, *call.scales))
        run = schema.experts if direct else _OPERATORS.experts.default
        if direct and call.keep[0] and drops_rows(x.shape[0], call.chunk):
            output = without_saved(run, call, x, ids, weights, tensors)
        else:
            output = run(*call.arguments(x, ids, weights, tensors))
        ctx.set_materialize_grads(False)
        if call.lend is not None:
            tensors, call = [None, None, *tensors[2:]], call._replace(scales=[])
        ctx.save_for_backward(x, weights, *tensors, *output[1:-1], *call.scales)
        ctx.call = call
        if call.signals is None:
            return output[0]
        ctx.mark_non_differentiable(output[-1])
        return output[0], output[-1]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *_: Any) -> Any:
        if dout is None:
            return (None,) * 12
        call, saved = ctx.call, ctx.saved_tensors
        if call.lend is None:
            return _Experts.gradients(ctx.needs_input_grad, dout, saved, call)
        with call.lend() as w:
            plain, scales = plain_weights(w)[:2]
            saved = *saved[:2], plain.w13_EHD, plain.w2_EDF, *saved[4:]
            call = call._replace(scales=scales)
            return _Experts.gradients(ctx.needs_input_grad, dout, saved, call)

    @staticmethod
    def gradients(wanted: Any, dout: Tensor, saved: Sequence[Any], call: _Call) -> Any:
        tensors = saved[2:10]
        needs = [wanted[0], *wanted[2:11], call.signals is not None]
        arguments = dout, *saved[:10], *call.scalars, *saved[10:16], needs, call.scales
        again = torch.compiler.is_compiling() or torch.is_grad_enabled() or _graph_is_kept()()
        if not torch.is_grad_enabled() and is_plain_eager((dout, *saved)):
            grads = schema.experts_bwd(*arguments, overwrite_h=not again)
        else:
            # h may be overwritten only if this backward neither repeats nor is differentiated.
            operator, returned = _OPERATORS.experts_bwd, (*needs, *needs[-1:] * 2)
            grads = (operator.default if again else operator.inplace_h)(*arguments)
            grads = [g if need else None for g, need in zip(grads, returned, strict=True)]
        _fill(call.signals, tensors, *grads[10:])
        return grads[0], None, *grads[1:10], None


define(
    "moe_patch::experts", schema.EXPERTS,
    schema.experts_operator, schema.experts_fake, _backward, _setup_context,
)  # fmt: skip
# With gradients off, a separate overload saves autograd's layer and the unused outputs, which
# cost more than the call.
define(
    "moe_patch::experts.inference", schema.INFERENCE,
    schema.inference, lambda x, *_: x.new_empty(x.shape), backward=None,
)  # fmt: skip
define(
    "moe_patch::experts_bwd", schema.EXPERTS_BWD,
    schema.experts_bwd_operator, schema.experts_bwd_fake,
)  # fmt: skip
# If backward runs only once, write dh over h: this lowers peak memory.
define(
    "moe_patch::experts_bwd.inplace_h", schema.INPLACE_H,
    functools.partial(schema.experts_bwd_operator, overwrite_h=True), schema.experts_bwd_fake,
    backward=None,
)  # fmt: skip
