"""The experts operators and their autograd: one operator each for forward and backward.

They are opaque operators with fake implementations, so that ``torch.compile``, CUDA graphs and
checkpointing see one call (ops/experts/schema.py). In plain eager execution :class:`Experts` takes
the place of the registered formula, and calls the functions behind the operators (ops/direct.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_patch.formats.packed import plain_weights
from moe_patch.ops.define import define
from moe_patch.ops.direct import is_plain_eager
from moe_patch.ops.experts import schema
from moe_patch.ops.experts.long_context import drops_rows, without_saved
from moe_patch.types import ExpertWeights

Lend = Callable[[], contextlib.AbstractContextManager[ExpertWeights]]

_OPERATORS: Any = torch.ops.moe_patch


class Call(NamedTuple):
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


def _setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
    ctx.mark_non_differentiable(*output[1:])
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


class Experts(torch.autograd.Function):
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
            return Experts.gradients(ctx.needs_input_grad, dout, saved, call)
        with call.lend() as w:
            plain, scales = plain_weights(w)[:2]
            saved = *saved[:2], plain.w13_EHD, plain.w2_EDF, *saved[4:]
            call = call._replace(scales=scales)
            return Experts.gradients(ctx.needs_input_grad, dout, saved, call)

    @staticmethod
    def gradients(wanted: Any, dout: Tensor, saved: Sequence[Any], call: Call) -> Any:
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
