"""The experts as one operator per direction, with autograd: where the backends meet torch.

``experts_mlp`` is what everything above calls. It dispatches to ``torch.ops.moe_patch.experts``
(and ``experts_bwd`` in backward), opaque operators with fake implementations, so that compile, CUDA
graphs and checkpointing see one call; inside, a backend module supplies ``experts_forward`` and
``experts_backward``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe_patch.backend import choose_backend
from moe_patch.errors import no_second_derivative, refuse_forward_mode
from moe_patch.op_fakes import experts_bwd_fake, experts_fake
from moe_patch.op_options import read_glu, read_options, spell_options, with_scales
from moe_patch.quant.operands import packed_weights, plain_weights
from moe_patch.types import ExpertsNeeds, ExpertWeights, Glu, Kept, Lora, Plan

_BACKEND_MODULES = {"torch": "moe_patch.experts_torch", "triton": "moe_patch.kernels.experts"}

_lib = torch.library.Library("moe_patch", "DEF")
# Few arguments, since torch spends time on each: what is no tensor travels as one string. A list of
# tensors takes autograd longer than all others: an overload of its own has that of packed weights.
_OPERANDS = (
    "Tensor w13, Tensor w2, Tensor? b13, Tensor? b2, Tensor? a13, Tensor? lb13, Tensor? a2, "
    "Tensor? lb2, float s13, float s2, float alpha, float limit, str options"
)
_OVERLOADS = {"": "", ".packed": ", Tensor[] scales"}
for _overload, _scales in _OVERLOADS.items():
    _lib.define(
        f"experts{_overload}(Tensor x, Tensor ids, Tensor weights, {_OPERANDS}, bool[] keep, "
        f"Tensor? signals{_scales}) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    )
# Where gradients are off: autograd's layer and outputs that nothing reads take a third of the time.
_lib.define(
    f"experts.inference(Tensor x, Tensor ids, Tensor weights, {_OPERANDS}, Tensor[] scales) "
    "-> Tensor"
)
# Where backward comes but once, the gradient of h takes its place: so much less at the peak.
_BACKWARD_OVERLOADS = {"": "Tensor", ".over_h": "Tensor(a!)"}
for _overload, _h in _BACKWARD_OVERLOADS.items():
    _lib.define(
        f"experts_bwd{_overload}(Tensor dout, Tensor x, Tensor weights, {_OPERANDS}, Tensor "
        f"row_of_N, Tensor slot_of_TK, Tensor offsets, {_h} h, Tensor u13, Tensor u2, bool[] "
        "needs, Tensor[] scales) -> Tensor[]"
    )


@dataclass
class Signals:
    """Per-row signals of one experts call, filled by forward and backward when asked for.

    Attributes:
        act_norm_TK: ||y_tk||, set by forward.
        grads_3TK: written by backward: ||dL/dy_tk||, the row's gradient norm over the parameters,
            and over the low-rank factors (zeros without LoRA). fp32, fp64 for fp64 models.
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
    signals: Signals | None = None,
) -> Tensor:
    """The weighted sum of each token's expert MLPs, differentiable in every floating input.

    Args:
        x_TD: hidden states; x and the weights share one floating dtype.
        ids_TK: integer expert ids; outside [0, E) is an empty slot (weight and gradient 0).
        weights_TK: routing weights, any floating dtype.
        w, glu: the experts' weights ([E, out, in] views, or both of them PackedWeight) and their
            activation.
        lora13, lora2: low-rank factors of the up and the down projection, of any floating dtype:
            cast for the products, and their gradients cast back; no copy is held for backward.
        backend: "auto", "torch" or "triton".
        recompute: keep nothing but the plan between forward and backward; else h is kept, and
            the rank-sized input of each trained factor B.
        batch_invariant: a token's output, and its gradients to x and to the routing weights, are
            the same bits for any number of tokens and any neighbours.
        signals: asks for per-row norms and receives them.

    Returns:
        out_TD in the dtype of x.

    Raises:
        UnsupportedOptionError: the backend cannot run on this device and dtype, or not with
            ``batch_invariant``; or a forward-mode derivative is asked for.
    """
    backend = choose_backend(backend, x_TD.device, x_TD.dtype, batch_invariant).name
    tensors, scales, storage = plain_weights(w)
    inputs = (x_TD, weights_TK, *tensors, *(lora13 or ())[:2], *(lora2 or ())[:2])
    refuse_forward_mode(*inputs)
    grad = torch.is_grad_enabled()
    a13, lb13, s13 = lora13 or (None, None, 1.0)
    a2, lb2, s2 = lora2 or (None, None, 1.0)
    spelled = spell_options(glu, backend, batch_invariant, storage)
    numbers = s13, s2, glu.alpha, glu.limit
    operands = x_TD, ids_TK, weights_TK, *tensors, a13, lb13, a2, lb2, *numbers, spelled
    if not grad and signals is None:
        return torch.ops.moe_patch.experts.inference(*operands, scales)
    graph = grad and any(t is not None and t.requires_grad for t in inputs)
    keep, norms = graph and not recompute, signals is not None
    # Compilers know the operator's own rule; made by hand it costs a third of the time.
    run = _Experts.apply if graph and not torch.compiler.is_compiling() else _operator
    out_TD, *_, act_norm_TK = run(
        *operands,
        [keep, keep and _reads_u(lora13, norms), keep and _reads_u(lora2, norms), norms],
        None if signals is None else signals.grads_3TK,
        *([scales] if scales else ()),
    )
    if signals is not None:
        signals.act_norm_TK = act_norm_TK.detach()
    return out_TD


def _reads_u(lora: Lora | None, norms: bool) -> bool:
    """Whether backward reads what the factor B is multiplied with."""
    return lora is not None and (norms or lora.B_EOR.requires_grad)


@functools.cache
def _module(backend: str) -> ModuleType:
    return importlib.import_module(_BACKEND_MODULES[backend])


def _operands(
    args: Sequence[Any], scales: list[Tensor], dtype: torch.dtype
) -> tuple[ExpertWeights, Glu, Lora | None, Lora | None, ModuleType, dict[str, bool]]:
    w13, w2, b13, b2, a13, lb13, a2, lb2, s13, s2, alpha, limit, spelled = args
    options = read_options(spelled)
    return (
        packed_weights(ExpertWeights(w13, w2, b13, b2), scales, options.storage, dtype),
        read_glu(spelled, alpha, limit),
        None if a13 is None else Lora(a13.to(dtype), lb13.to(dtype), s13),
        None if a2 is None else Lora(a2.to(dtype), lb2.to(dtype), s2),
        _module(options.backend),
        # The torch backend does not know the option: it cannot hold there.
        {"batch_invariant": True} if options.batch_invariant else {},
    )


_NOTHING = contextlib.nullcontext()


def _no_autocast(device_type: str) -> contextlib.AbstractContextManager:
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return _NOTHING


_KEEP = ("save_h", "save_u13", "save_u2", "norms")


def _experts(x: Any, ids: Any, weights: Any, *args: Any) -> Any:
    *operands, keep, _, scales = with_scales(args)
    w, glu, lora13, lora2, backend, options = _operands(operands, scales, x.dtype)
    options |= zip(_KEEP, keep, strict=True)
    with _no_autocast(x.device.type):
        out, plan, kept, act_norm = backend.experts_forward(
            x, ids, weights, w, glu, lora13, lora2, **options
        )
    # An operator's outputs must not alias: what is empty may be one tensor so far.
    return out, *plan, *(t if t.numel() else t.new_empty(t.shape) for t in (*kept, act_norm))


def _inference(x: Any, ids: Any, weights: Any, *args: Any) -> Any:
    *operands, scales = args
    w, glu, lora13, lora2, backend, options = _operands(operands, scales, x.dtype)
    with _no_autocast(x.device.type):
        return backend.experts_forward(
            x, ids, weights, w, glu, lora13, lora2, save_h=False, **options
        ).out_TD


_FACTORS = ("lora13_A", "lora13_B", "lora2_A", "lora2_B")


def _experts_bwd(dout: Any, x: Any, weights: Any, *args: Any, overwrite_h: bool = False) -> Any:
    *operands, row_of_N, slot_of_TK, offsets, h, u13, u2, needs, scales = args
    w, glu, lora13, lora2, backend, options = _operands(operands, scales, x.dtype)
    needs = ExpertsNeeds(*needs)
    plan = Plan(row_of_N, slot_of_TK, offsets)
    with _no_autocast(x.device.type):
        grads = backend.experts_backward(
            dout, x, weights, w, glu, lora13, lora2, plan, Kept(h, u13, u2), needs,
            overwrite_h=overwrite_h, **options,
        )  # fmt: skip
    typed = {
        name: getattr(grads, name).to(factor.dtype)
        for name, factor in zip(_FACTORS, operands[4:8], strict=True)
        if getattr(grads, name) is not None
    }
    return [x.new_empty(0) if g is None else g for g in grads._replace(**typed)]


def _setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
    x, _, weights, *others = inputs
    *operands, _, signals, scales = with_scales(tuple(others))
    tensors, scalars = operands[:8], operands[8:]
    _, *for_backward, act_norm = output
    ctx.mark_non_differentiable(*for_backward, act_norm)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weights, *tensors, *for_backward, *scales)
    ctx.scalars, ctx.signals = scalars, signals


def _backward(ctx: Any, dout: Any, *_: Any, once: bool = False) -> Any:
    x, weights, *tensors = ctx.saved_tensors
    tensors, from_forward, scales = tensors[:8], tensors[8:14], tensors[14:]
    others: list[Any] = [*(None for _ in ctx.scalars), None, None]
    others += [[None for _ in scales]] if scales else []
    if dout is None:
        return (*(None for _ in range(11)), *others)
    wanted = ctx.needs_input_grad
    needs = [wanted[0], *wanted[2:11], ctx.signals is not None]
    experts_bwd = torch.ops.moe_patch.experts_bwd
    *grads, out_TK, params_TK, lora_TK = (experts_bwd.over_h if once else experts_bwd.default)(
        dout, x, weights, *tensors, *ctx.scalars, *from_forward, needs, scales
    )
    if ctx.signals is not None:
        lora_TK = torch.zeros_like(out_TK) if tensors[4] is None and tensors[6] is None else lora_TK
        ctx.signals.copy_(torch.stack([out_TK, params_TK, lora_TK]))
    grads = [g if need else None for g, need in zip(grads, needs[:10], strict=True)]
    return (grads[0], None, *grads[1:], *others)


def _graph_is_kept() -> bool:
    """Whether the backward pass now running may be run again; torch's compiler asks the same."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _operator(*args: Any) -> Any:
    experts = torch.ops.moe_patch.experts
    return (experts.packed if isinstance(args[-1], list) else experts.default)(*args)


class _Experts(torch.autograd.Function):
    """What ``register_autograd`` makes of the same functions; it looks up arguments' defaults."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        output = _operator(*args)
        _setup_context(ctx, args, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # Neither again nor through: a gradient of gradients is refused by the other operator.
        again = torch.compiler.is_compiling() or torch.is_grad_enabled() or _graph_is_kept()
        return tuple(
            None if isinstance(g, list) else g for g in _backward(ctx, *grads, once=not again)
        )


for _overload in _OVERLOADS:
    _name = f"experts{_overload}"
    _lib.impl(_name, _experts, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moe_patch::{_name}", experts_fake, lib=_lib)
    torch.library.register_autograd(
        f"moe_patch::{_name}", _backward, setup_context=_setup_context, lib=_lib
    )
_lib.impl("experts.inference", _inference, "CompositeExplicitAutograd")
torch.library.register_fake(
    "moe_patch::experts.inference", lambda x, *_: x.new_empty(x.shape), lib=_lib
)
_lib.impl("experts_bwd", _experts_bwd, "CompositeExplicitAutograd")
_lib.impl(
    "experts_bwd.over_h",
    functools.partial(_experts_bwd, overwrite_h=True),
    "CompositeExplicitAutograd",
)
for _overload in _BACKWARD_OVERLOADS:
    torch.library.register_fake(f"moe_patch::experts_bwd{_overload}", experts_bwd_fake, lib=_lib)
torch.library.register_autograd("moe_patch::experts_bwd", no_second_derivative, lib=_lib)
